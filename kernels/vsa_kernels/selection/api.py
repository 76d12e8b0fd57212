"""The public call of block selection. B batch, H heads, Nq / Nkv query / kv blocks, Kmax list capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex
from vsa_kernels.checks import check_allowed, check_device
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.selection.op import select_topk_op, unsupported

_CAPACITY_STEP = 32


def select_topk(
    scores: Tensor,
    topk: int | Tensor,
    *,
    candidates: Tensor | None = None,
    always: Tensor | None = None,
    backend: str | None = None,
) -> BlockIndex:
    """The `topk` highest-scoring candidates of each row, and every `always` block on top of them.

    Exact and deterministic: equal scores (0.0 and -0.0 are equal) go to the lowest index, NaN ranks below -inf. A
    row with fewer candidates than `topk` keeps them all. The choice is not differentiable and never waits for the
    device.

    Args:
        scores: `[B, H, Nq, Nkv]` any float dtype.
        topk: blocks to keep per row, at least 1; or int32 `[Nq]`, one count per query block.
        candidates: bool `[Nq, Nkv]`, blocks that may compete; None: all.
        always: bool `[Nq, Nkv]`, blocks every row lists whatever their score; they do not compete.
        backend: `reference`, `triton` (at most 4096 kv blocks) or None (`triton` where it can run, else `reference`).

    Returns:
        Ascending index with capacity Kmax = `topk` rounded up to a multiple of 32, at most Nkv (Nkv when `topk` is a
        tensor or `always` is given, so that capacity never depends on values on the device).

    Raises:
        ValueError: `topk` below 1 (ints only: a tensor is not read), shapes, dtypes or devices that do not fit, or a
            backend that is unknown or cannot take the scores.

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 2 (top-k).
    """
    if scores.ndim != 4 or not scores.is_floating_point():
        raise ValueError(f"scores must be a float [B, H, Nq, Nkv], got {scores.dtype} {list(scores.shape)}")
    if 0 in scores.shape[1:]:
        raise ValueError(f"scores must have at least one head, query block and kv block, got {list(scores.shape)}")
    num_q, num_kv = scores.shape[2], scores.shape[3]
    for name, allowed in (("candidates", candidates), ("always", always)):
        check_allowed(name, allowed, num_q, num_kv, "scores", scores)
    # scores have no head dim to refuse
    chosen, refusal = resolve_plain(backend, scores.device, scores.dtype), unsupported(scores)
    if refusal is not None:
        if backend == "triton":
            raise ValueError(f"backend triton {refusal}")
        chosen = "reference"
    kept, per_row = None, None
    if isinstance(topk, Tensor):
        if topk.shape != (num_q,) or topk.dtype != torch.int32:
            raise ValueError(f"topk must be an int or an int32 tensor {[num_q]}, got {topk.dtype} {list(topk.shape)}")
        check_device("topk", topk, "scores", scores)
        per_row = topk
    elif topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    else:
        kept = min(topk, num_kv)
    known = kept if always is None else None
    capacity = num_kv if known is None else list_capacity(known, num_kv)
    indices, counts = select_topk_op(scores.detach(), kept, per_row, candidates, always, capacity, chosen)
    least = known if candidates is None else None
    return BlockIndex(kv_indices=indices, kv_num_blocks=counts, max_blocks=known, min_blocks=least)


def list_capacity(topk: int, num_kv: int) -> int:
    """Kmax of a list of topk blocks: steps of 32, so that an annealed top-k changes shapes rarely; at most num_kv."""
    return min((topk + _CAPACITY_STEP - 1) // _CAPACITY_STEP * _CAPACITY_STEP, num_kv)
