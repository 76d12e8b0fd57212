"""Public interface of block selection. B batch, H heads, Nq / Nkv query / kv blocks, Kmax list capacity."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.checks import check_allowed, check_blocks, check_device, check_qkv, check_scale
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.selection.op import (
    MAX_COLUMNS,
    MAX_GROUP,
    MAX_SHARE_COLUMNS,
    mean_scores_op,
    select_share_op,
    select_topk_op,
    subblock_scores_op,
    unsupported,
)
from vsa_kernels.selection.weights import CROSSINGS, Crossing

Form = Literal["softmax", "lse"]
FORMS = get_args(Form)
_CAPACITY_STEP = 32


def select_topk(
    scores: Tensor,
    topk: int | Tensor,
    *,
    candidates: Tensor | None = None,
    always: Tensor | None = None,
    backend: str | None = None,
) -> BlockIndex:
    """Top-k selection: the `topk` highest-scoring candidates of each row, and every `always` block besides.

    Exact and deterministic: of equal scores (0.0 and -0.0 are equal) the lowest index comes first, and NaN ranks below
    -inf. A row with fewer candidates than `topk` keeps them all. The selection is not differentiable and never waits
    for the device.

    Args:
        scores: `[B, H, Nq, Nkv]` any float dtype.
        topk: blocks to keep per row, at least 1; or int32 `[Nq]`, one count per query block.
        candidates: bool `[Nq, Nkv]`, blocks that compete; None: all.
        always: bool `[Nq, Nkv]`, blocks that a row lists whatever their score; they do not compete.
        backend: `reference`, `triton` (at most 4096 kv blocks) or None (`triton` where it can run, else `reference`).

    Returns:
        Ascending index with capacity Kmax = `topk` rounded up to a multiple of 32, at most Nkv (Nkv when `topk` is a
        tensor or `always` is given, so that capacity never depends on values on the device).

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 2 (top-k).
    """
    _check_scores(scores)
    num_q, num_kv = scores.shape[2], scores.shape[3]
    for name, mask in (("candidates", candidates), ("always", always)):
        check_allowed(name, mask, num_q, num_kv, "scores", scores)
    resolved_backend = _resolve(backend, scores, MAX_COLUMNS)
    num_selected, per_row = None, None
    if isinstance(topk, Tensor):
        if topk.shape != (num_q,) or topk.dtype != torch.int32:
            raise ValueError(f"topk must be an int or an int32 tensor {[num_q]}, got {topk.dtype} {list(topk.shape)}")
        check_device("topk", topk, "scores", scores)
        per_row = topk
    elif topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    else:
        num_selected = min(topk, num_kv)
    max_blocks = num_selected if always is None else None
    capacity = num_kv if max_blocks is None else list_capacity(max_blocks, num_kv)
    indices, counts = select_topk_op(
        scores.detach(), num_selected, per_row, candidates, always, capacity, resolved_backend
    )
    least = max_blocks if candidates is None else None
    return BlockIndex(kv_indices=indices, kv_num_blocks=counts, max_blocks=max_blocks, min_blocks=least)


def select_share(
    scores: Tensor,
    share: float | Tensor,
    *,
    crossing: Crossing,
    candidates: Tensor | None = None,
    always: Tensor | None = None,
    backend: str | None = None,
) -> BlockIndex:
    """Top-p selection: the best candidates of each row that hold a share of its softmax, and every `always` block.

    Exact and deterministic: of equal scores (0.0 and -0.0 are equal) the lowest index comes first, NaN ranks below
    -inf, and weights are summed as the integers of `weights.py`, the same on every backend and device. A row with any
    candidate keeps at least its best one; a share of 1 keeps all candidates, those of weight 0 too. The selection is
    not differentiable and never waits for the device.

    Args:
        scores: `[B, H, Nq, Nkv]` logits of any float dtype.
        share: a number above 0 and at most 1; or a float tensor, one share per head `[H]` or per row
            `[B|1, H|1, Nq|1]`, whose values are not read on the host (above 1 counts as 1; 0, negative values and NaN
            keep the best candidate only).
        crossing: treatment of the entry that reaches the share. keep: the smallest set that holds at least the share
            (FG-Attn, NABLA); drop: the largest set that holds at most the share (SpargeAttn); exceed: the smallest set
            that holds more than the share (SVG2).
        candidates: bool, broadcasts to the scores, blocks that compete and over which the softmax runs; None: all.
        always: bool, broadcasts to the scores, blocks that a row lists whatever their score; they do not compete and
            have no part in the softmax.
        backend: `reference`, `triton` (at most 8192 kv blocks) or None (`triton` where it can run, else `reference`).

    Returns:
        Ascending index with capacity Nkv; its counts are known on the device only.

    Source: Zhang et al., "SpargeAttention" (arXiv 2502.18137), Algorithm 1 (TopCdf, drop); FG-Attn (arXiv 2509.16518),
    section 5.3 (keep); code of Sparse VideoGen 2 (arXiv 2505.18875, exceed).
    """
    _check_scores(scores)
    if crossing not in CROSSINGS:
        raise ValueError(f"crossing must be one of {', '.join(CROSSINGS)}, got {crossing!r}")
    candidates, always = _by_head("candidates", candidates, scores), _by_head("always", always, scores)
    if isinstance(share, Tensor):
        shares = _by_row(share, scores)
    elif not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    else:
        shares = scores.new_full((1, 1, 1), share, dtype=torch.float64)
    resolved_backend = _resolve(backend, scores, MAX_SHARE_COLUMNS)
    indices, counts = select_share_op(scores.detach(), shares, crossing, candidates, always, resolved_backend)
    return BlockIndex(kv_indices=indices, kv_num_blocks=counts)


def mean_scores(
    q_mean: Tensor, k_mean: Tensor, *, scale: float | None = None, half: bool = False, backend: str | None = None
) -> Tensor:
    """Logits between block means that a selection ranks, scale * q_mean k_mean^T; not differentiable.

    Args:
        q_mean: `[B, Nq, H, D]` means of query blocks, fp32 or fp64, as `block_mean_pool` returns them.
        k_mean: `[B, Nkv, Hkv, D]` means of key blocks, H a multiple of Hkv.
        scale: factor of the logits, default D ** -0.5.
        half: whether the pooled tokens were half precision, so that `triton` may use tf32 products.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        `[B, H, Nq, Nkv]` in the dtype of the means.
    """
    check_qkv(q_mean, k_mean, k_mean)
    if q_mean.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"means must be float32 or float64, got {q_mean.dtype}")
    resolved_backend = resolve_plain(backend, q_mean.device, q_mean.dtype, q_mean.shape[3])
    return mean_scores_op(q_mean.detach(), k_mean.detach(), check_scale(scale, q_mean.shape[3]), half, resolved_backend)


def subblock_scores(
    q_mean: Tensor,
    k_mean: Tensor,
    *,
    q_groups: Blocks,
    kv_groups: Blocks,
    form: Form = "softmax",
    weights: Tensor | None = None,
    candidates: Tensor | None = None,
    scale: float | None = None,
    half: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Scores of kv blocks from the means of smaller blocks inside them; not differentiable.

    With sub-blocks u of query block i and w of kv block j and logits s_uw = scale * q_mean_u k_mean_w + ln n_w:

        softmax   mean over u of the share that the softmax of s_u over all w gives to the w of j
        lse       logsumexp over u and w of s_uw

    No backend but `reference` keeps the logits: for L / R sub-blocks they would take (L / R)^2 numbers.

    Args:
        q_mean: `[B, Sq, H, D]` means of query sub-blocks in the order of the blocks, fp32 or fp64.
        k_mean: `[B, Skv, Hkv, D]` means of key sub-blocks, H a multiple of Hkv.
        q_groups: sub-blocks of each query block, a partition of Sq.
        kv_groups: sub-blocks of each kv block, a partition of Skv.
        form: softmax or lse.
        weights: n, float `[Skv]`, tokens of each key sub-block; None: 1.
        candidates: bool `[Nq, Nkv]`, blocks that compete; others score 0 (softmax) or -inf (lse). None: all.
        scale: factor of the logits, default D ** -0.5.
        half: whether the pooled tokens were half precision, so that `triton` may round the means to bf16.
        backend: `reference`, `triton` (at most 64 sub-blocks a block) or None (`triton` where it can run).

    Returns:
        `[B, H, Nq, Nkv]` in the dtype of the means.

    Source: the router of VSA2 (arXiv 2609.32882) and DFSAttn (softmax before pooling); the sub-block router of SGLang
    (sgl-project/sglang#34148, lse).
    """
    check_qkv(q_mean, k_mean, k_mean)
    if q_mean.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"means must be float32 or float64, got {q_mean.dtype}")
    check_blocks("q_groups", q_groups, "q_mean", q_mean)
    check_blocks("kv_groups", kv_groups, "k_mean", k_mean)
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    check_allowed("candidates", candidates, q_groups.num, kv_groups.num, "q_mean", q_mean)
    subs = k_mean.shape[1]
    if weights is None:
        bias = q_mean.new_zeros(subs)
    elif weights.shape != (subs,) or not weights.is_floating_point():
        raise ValueError(f"weights must be float {[subs]}, got {weights.dtype} {list(weights.shape)}")
    else:
        check_device("weights", weights, "k_mean", k_mean)
        bias = weights.detach().to(q_mean.dtype).log()
    resolved_backend = resolve_plain(backend, q_mean.device, q_mean.dtype, q_mean.shape[3])
    largest = max(q_groups.max_size, kv_groups.max_size)
    if resolved_backend == "triton" and largest > MAX_GROUP:
        if backend == "triton":
            raise ValueError(f"backend triton takes at most {MAX_GROUP} sub-blocks a block, got {largest}")
        resolved_backend = "reference"
    groups = [x for g in (q_groups, kv_groups) for x in (g.offsets, g.max_size, g.min_size)]
    how = (check_scale(scale, q_mean.shape[3]), form == "softmax", half, resolved_backend)
    return subblock_scores_op(q_mean.detach(), k_mean.detach(), *groups, bias, candidates, *how)


def _check_scores(scores: Tensor) -> None:
    if scores.ndim != 4 or not scores.is_floating_point():
        raise ValueError(f"scores must be a float [B, H, Nq, Nkv], got {scores.dtype} {list(scores.shape)}")
    if 0 in scores.shape[1:]:
        raise ValueError(f"scores must have at least one head, query block and kv block, got {list(scores.shape)}")


def _by_head(name: str, mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """A mask with the four dims of the scores; a dim has size 1 where the mask broadcasts."""
    if mask is None:
        return None
    sizes, shape = (1,) * (4 - mask.ndim) + tuple(mask.shape), tuple(scores.shape)
    if mask.dtype != torch.bool or len(sizes) > 4 or any(n not in (1, m) for n, m in zip(sizes, shape, strict=True)):
        raise ValueError(f"{name} must be bool and broadcast to {list(shape)}, got {mask.dtype} {list(mask.shape)}")
    check_device(name, mask, "scores", scores)
    return mask.view(sizes)


def _by_row(share: Tensor, scores: Tensor) -> Tensor:
    """Shares fp64 `[B|1, H|1, Nq|1]` from one share per head or per row."""
    sizes, rows = tuple(share.shape), tuple(scores.shape[:3])
    if len(sizes) == 1:
        sizes = (1, *sizes, 1)
    if (
        not share.is_floating_point()
        or len(sizes) != 3
        or any(n not in (1, m) for n, m in zip(sizes, rows, strict=True))
    ):
        raise ValueError(
            f"share must be a number, or a float {[rows[1]]} or {list(rows)}, got {share.dtype} {list(share.shape)}"
        )
    check_device("share", share, "scores", scores)
    return share.detach().double().view(sizes)


def _resolve(backend: str | None, scores: Tensor, most: int) -> str:
    # scores have no head dim that a backend could reject
    resolved_backend, refusal = resolve_plain(backend, scores.device, scores.dtype), unsupported(scores, most)
    if refusal is not None and backend == "triton":
        raise ValueError(f"backend triton {refusal}")
    return resolved_backend if refusal is None else "reference"


def list_capacity(topk: int, num_kv: int) -> int:
    """Kmax of lists of topk blocks: a multiple of 32, so that an annealed top-k rarely changes shapes, up to num_kv."""
    return min((topk + _CAPACITY_STEP - 1) // _CAPACITY_STEP * _CAPACITY_STEP, num_kv)
