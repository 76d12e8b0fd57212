"""Registered op of block selection; integer outputs, so there is no gradient and no matmul to count."""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.selection import reference


@torch.library.custom_op("vsa_kernels::select_topk", mutates_args=())
def select_topk_op(
    scores: Tensor,
    topk: int | None,
    topk_per_row: Tensor | None,
    candidates: Tensor | None,
    always: Tensor | None,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    if candidates is None and always is None and topk is not None:
        return reference.select_plain(scores, topk, capacity)
    limit = topk_per_row if topk is None else topk
    assert limit is not None
    return reference.select(scores, limit, candidates, always, capacity)


@select_topk_op.register_fake
def _(
    scores: Tensor,
    topk: int | None,
    topk_per_row: Tensor | None,
    candidates: Tensor | None,
    always: Tensor | None,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    B, H, Nq, _ = scores.shape
    return (
        scores.new_empty((B, H, Nq, capacity), dtype=torch.int32),
        scores.new_empty((B, H, Nq), dtype=torch.int32),
    )
