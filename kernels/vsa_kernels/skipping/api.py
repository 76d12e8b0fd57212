"""Public interface of skipping attention: checks, defaults, then the registered op.

B batch, L / S query / kv tokens, H / Hkv query / kv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse.checks import check_mask
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.checks import check_blocks, check_device, check_qkv, check_scale
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.modes import lowered, refuse_forward_mode
from vsa_kernels.skipping.op import skipping_fwd

MAX_BLOCK = 128
"""Most tokens of a block that the Triton kernel takes."""


def skipping_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    thresholds: Tensor,
    slice_rows: int = 32,
    keeps_sum: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Block-sparse attention whose online softmax skips value products: SpargeAttn's second stage; forward only.

    A query block processes its list in order. Let m be the largest logit of a row up to and including this kv block,
    and m' the largest within this kv block. A slice of rows skips the product with the block's values where
    max over its rows of (m' - m) is below the head's threshold: the skipped weights are then at most exp(threshold)
    times the row's largest. Slices that skip nothing are exact.

    Args:
        q: `[B, L, H, D]` queries.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        index: kv blocks of each query block, without fine masks.
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        thresholds: float `[H]`, at most 0, in natural logarithms (the paper's lambda); -inf skips nothing.
        slice_rows: consecutive rows of a block that skip together; a warp of the paper's kernel has 32 of 128.
        keeps_sum: whether skipped weights stay in the softmax denominator (the paper) or not (its code).
        scale: factor of the logits, default D ** -0.5.
        backend: `reference`, `triton` (blocks of at most 128 tokens, slices of a power of two) or None (`triton` where
            it can run).

    Returns:
        out `[B, L, H, D]` in q's dtype, and the number of skipped (slice, kv block) pairs of each query block, int32
        `[B, H, Nq]`.

    Source: SpargeAttn (arXiv 2502.18137), Algorithm 1, lines 12 to 16.
    """
    q, k, v = lowered(q, k, v)
    check_qkv(q, k, v)
    check_blocks("q_blocks", q_blocks, "q", q)
    check_blocks("kv_blocks", kv_blocks, "k", k)
    check_mask(q, BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=None))
    refuse_forward_mode(q, k, v)
    if index.mask_bits is not None:
        raise ValueError("skipping_attn takes an index without fine masks, got mask_bits")
    if thresholds.shape != (q.shape[2],) or not thresholds.is_floating_point():
        raise ValueError(f"thresholds must be float {[q.shape[2]]}, got {thresholds.dtype} {list(thresholds.shape)}")
    check_device("thresholds", thresholds, "q", q)
    if slice_rows < 1:
        raise ValueError(f"slice_rows must be at least 1, got {slice_rows}")
    largest = max(q_blocks.max_size, kv_blocks.max_size, slice_rows)
    suits = largest <= MAX_BLOCK and slice_rows & (slice_rows - 1) == 0
    if backend == "triton" and not suits:
        raise ValueError(
            f"backend triton takes blocks of at most {MAX_BLOCK} tokens and slices of a power of two, "
            f"got {largest} and {slice_rows}"
        )
    resolved_backend = resolve_plain(backend if suits else backend or "reference", q.device, q.dtype, q.shape[3])
    factor = check_scale(scale, q.shape[-1], resolved_backend)
    partitions = (x for blocks in (q_blocks, kv_blocks) for x in (blocks.offsets, blocks.max_size, blocks.min_size))
    lists = (index.kv_indices, index.kv_num_blocks, index.max_blocks)
    with torch.no_grad():
        return skipping_fwd(q, k, v, *lists, *partitions, thresholds, slice_rows, keeps_sum, factor, resolved_backend)
