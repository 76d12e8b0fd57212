"""Calls that reach the kernels of block-sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex
from vsa_kernels.block_sparse import api
from vsa_kernels.selection import select_topk
from vsa_kernels.testing import Call, Case, normal


def block_sparse_attn(case: Case) -> Iterator[Call]:
    """Indices with token masks and without, of every batch and head and broadcast, with spare entries out of range, as
    views of wider tensors, of rows of one length; kv blocks whole and shortened."""
    plain = replace(case.index, kv_num_full_blocks=None, mask_ids=None, mask_bits=None)
    wide = BlockIndex(
        kv_indices=plain.kv_indices.repeat_interleave(2, -1)[..., ::2],
        kv_num_blocks=plain.kv_num_blocks.repeat_interleave(2, -1)[..., ::2],
    )
    (B, _, H, _), num_q, num_kv = case.q.shape, case.q_blocks.num, case.kv_blocks.num
    scores = normal(case, B, H, num_q, num_kv, dtype=torch.float32).detach()
    even = select_topk(scores, (num_kv + 1) // 2, backend="reference")
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    for index in (plain, case.index, wide, even, BlockIndex.from_dense(scores < 0)):
        for valid in (None, case.kv_valid):
            yield Call(_attend, (*leaves, index), {**case.blocks, "kv_valid": valid})


def _attend(q: Tensor, k: Tensor, v: Tensor, index: BlockIndex, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = api.block_sparse_attn(q, k, v, index, **options)
    # finite in rows without blocks too
    return out, lse.masked_fill(lse.isinf(), 0)
