"""Calls that reach the kernel of skipping attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vsa_kernels.block_index import BlockIndex
from vsa_kernels.skipping import api
from vsa_kernels.testing import Call, Case, normal


def skipping_attn(case: Case) -> Iterator[Call]:
    """With either denominator."""
    (B, _, H, _), num_q, num_kv = case.q.shape, case.q_blocks.num, case.kv_blocks.num
    index = BlockIndex.from_dense(normal(case, B, H, num_q, num_kv).detach() < 0)
    rows = 1 << (max(1, case.q_blocks.max_size // 4).bit_length() - 1)
    options = {**case.blocks, "thresholds": torch.full((H,), -1.0, device=case.q.device), "slice_rows": rows}
    for keeps_sum in (True, False):
        yield Call(api.skipping_attn, (case.q, case.k, case.v, index), {**options, "keeps_sum": keeps_sum})
