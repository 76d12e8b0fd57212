"""Calls that reach every kernel of attention with a pooled tail."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vsa_kernels.block_index import BlockIndex
from vsa_kernels.tail import api
from vsa_kernels.testing import Call, Case


def tail_attn(case: Case) -> Iterator[Call]:
    """With listed blocks excluded, and counted twice among candidates."""
    index = BlockIndex(kv_indices=case.index.kv_indices, kv_num_blocks=case.index.kv_num_blocks)
    inputs = (*(x.detach().requires_grad_() for x in (case.q, case.k, case.v)), index)
    num_q, num_kv = case.q_blocks.num, case.kv_blocks.num
    candidates = torch.arange(num_q * num_kv, device=case.q.device).view(num_q, num_kv) % 3 > 0
    yield Call(api.tail_attn, inputs, case.blocks)
    yield Call(api.tail_attn, inputs, {**case.blocks, "exclude": False, "candidates": candidates})
