"""Registered op of block selection; integer outputs, so there is no gradient and no matmul to count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.selection import reference

MAX_COLUMNS = 4096
"""Kv blocks up to which `triton` selects: it holds a row in registers."""


def unsupported(scores: Tensor) -> str | None:
    """Why the backend `triton` cannot take these scores; None when it can."""
    if scores.dtype == torch.float64:
        return "takes no float64 scores"
    if scores.shape[-1] > MAX_COLUMNS:
        return f"takes at most {MAX_COLUMNS} kv blocks, got {scores.shape[-1]}"
    return None


@torch.library.custom_op("vsa_kernels::select_topk", mutates_args=())
def select_topk_op(
    scores: Tensor,
    topk: int | None,
    topk_per_row: Tensor | None,
    candidates: Tensor | None,
    always: Tensor | None,
    capacity: int,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    if not scores.shape[0]:
        return _lists_like(scores, topk, topk_per_row, candidates, always, capacity)
    if backend == "triton":
        from vsa_kernels.selection import triton_topk

        return triton_topk.select(scores, topk, topk_per_row, candidates, always, capacity)
    return reference.select(scores, topk, topk_per_row, candidates, always, capacity)


def _lists_like(scores: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    rows, capacity = scores.shape[:3], args[4]
    return scores.new_empty((*rows, capacity), dtype=torch.int32), scores.new_empty(rows, dtype=torch.int32)


select_topk_op.register_fake(_lists_like)
