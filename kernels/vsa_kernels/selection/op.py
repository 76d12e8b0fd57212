"""Registered ops of block selection, none of them differentiable: scores of block means, top-k and top-p lists."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.modes import without_autocast
from vsa_kernels.operators import Operator, declare
from vsa_kernels.selection import reference
from vsa_kernels.selection.weights import Crossing

MAX_COLUMNS = 4096
"""Most kv blocks for which `triton` selects by top-k: it holds a row in registers."""
MAX_SHARE_COLUMNS = 8192
"""Most kv blocks for which `triton` selects by share, with more warps per row."""
MAX_GROUP = 64
"""Most sub-blocks of a block that `triton` scores."""


def unsupported(scores: Tensor, most: int = MAX_COLUMNS) -> str | None:
    """Reason why the backend `triton`, limited to rows of `most` kv blocks, cannot take these scores; None: it can."""
    if scores.dtype == torch.float64:
        return "takes no float64 scores"
    if scores.shape[-1] > most:
        return f"takes at most {most} kv blocks, got {scores.shape[-1]}"
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


@torch.library.custom_op("vsa_kernels::select_share", mutates_args=())
def select_share_op(
    scores: Tensor,
    shares: Tensor,
    crossing: str,
    candidates: Tensor | None,
    always: Tensor | None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    if not scores.shape[0]:
        return _whole_lists_like(scores)
    if backend == "triton":
        from vsa_kernels.selection import triton_share

        return triton_share.select(scores, shares, cast(Crossing, crossing), candidates, always)
    return reference.select_share(scores, shares, cast(Crossing, crossing), candidates, always)


def _whole_lists_like(scores: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape, dtype=torch.int32), scores.new_empty(scores.shape[:3], dtype=torch.int32)


select_share_op.register_fake(_whole_lists_like)


@torch.library.custom_op("vsa_kernels::mean_scores", mutates_args=())
def mean_scores_op(q_mean: Tensor, k_mean: Tensor, scale: float, half: bool, backend: str = "reference") -> Tensor:
    if backend == "triton" and q_mean.shape[0]:
        from vsa_kernels.selection import triton_scores

        (B, _, H, _), precision = q_mean.shape, "tf32" if half else "ieee"
        rows = triton_scores.scores(q_mean.contiguous(), k_mean.contiguous(), scale, 0, B * H, precision=precision)
        return rows.view(B, H, *rows.shape[1:])
    with without_autocast(q_mean.device):
        return reference.mean_scores(q_mean, k_mean, scale)


def _scores_like(q_mean: Tensor, k_mean: Tensor, *_args: Any) -> Tensor:
    B, num_q, H, _ = q_mean.shape
    return q_mean.new_empty((B, H, num_q, k_mean.shape[1]))


mean_scores_op.register_fake(_scores_like)


def _scores_flops(q_shape: Any, k_shape: Any, *_args: Any, out_shape: Any = None, **_: Any) -> int:
    B, num_q, H, D = q_shape
    return 2 * B * H * num_q * k_shape[1] * D


@torch.library.custom_op("vsa_kernels::subblock_scores", mutates_args=())
def subblock_scores_op(
    q_mean: Tensor,
    k_mean: Tensor,
    q_offsets: Tensor,
    q_max: int,
    q_min: int,
    kv_offsets: Tensor,
    kv_max: int,
    kv_min: int,
    bias: Tensor,
    candidates: Tensor | None,
    scale: float,
    softmax: bool,
    half: bool,
    backend: str = "reference",
) -> Tensor:
    if not q_mean.shape[0]:
        return _subblock_scores_like(q_mean, k_mean, q_offsets, q_max, q_min, kv_offsets)
    groups = (
        Blocks(offsets=q_offsets, max_size=q_max, min_size=q_min),
        Blocks(offsets=kv_offsets, max_size=kv_max, min_size=kv_min),
    )
    if backend == "triton":
        from vsa_kernels.selection import triton_subblock

        return triton_subblock.scores(q_mean, k_mean, *groups, bias, candidates, scale, softmax, half=half)
    with without_autocast(q_mean.device):
        return reference.subblock_scores(q_mean, k_mean, *groups, bias, candidates, scale, softmax)


def _subblock_scores_like(q_mean: Tensor, _k: Tensor, *groups: Any) -> Tensor:
    return q_mean.new_empty((q_mean.shape[0], q_mean.shape[2], groups[0].shape[0] - 1, groups[3].shape[0] - 1))


subblock_scores_op.register_fake(_subblock_scores_like)


def _subblock_flops(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    # `triton` computes the logits of a softmax twice
    return _scores_flops(*shapes[:2])


declare(Operator(name="select_topk", module=__name__, ops={"select_topk": None}))
declare(Operator(name="select_share", module=__name__, ops={"select_share": None}))
declare(Operator(name="mean_scores", module=__name__, ops={"mean_scores": _scores_flops}))
declare(Operator(name="subblock_scores", module=__name__, ops={"subblock_scores": _subblock_flops}))
