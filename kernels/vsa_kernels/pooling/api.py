"""The public calls of block pooling. B batch, L tokens, H heads, D head dim, N blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.checks import check_blocks, check_device, check_tokens
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.modes import refuse_forward_mode
from vsa_kernels.pooling.op import block_mean_and_similarity_op, block_mean_pool_fwd


def block_mean_pool(x: Tensor, blocks: Blocks, backend: str | None = None) -> Tensor:
    """Mean of each block over its own tokens: the pooled queries, keys and values of VSA's coarse stage.

    Args:
        x: `[B, L, H, D]` tokens in block order.
        blocks: partition of the L tokens; ragged blocks divide by their own size.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        `[B, N, H, D]`, fp32 for half-precision x, otherwise x's dtype; differentiable.

    Raises:
        ValueError: x is not a 4-dim float tensor, the blocks do not cover its tokens, the backend is unknown or cannot
            take it, or a tangent of forward-mode AD comes in.

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 2 (coarse stage).
    """
    check_tokens("x", x)
    check_blocks("blocks", blocks, "x", x)
    refuse_forward_mode(x)
    chosen = resolve_plain(backend, x.device, x.dtype, x.shape[3])
    return block_mean_pool_fwd(x, blocks.offsets, blocks.max_size, blocks.min_size, chosen)


def block_mean_and_similarity(
    x: Tensor, blocks: Blocks, *, center: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Mean of each block over its own tokens, and how alike these tokens are, in one read of x.

    The similarity is the mean of the cosines of all pairs of a block's tokens, each token with itself included: the
    squared norm of the mean of its tokens at length 1. 1 where all point one way, 1 / n for n orthogonal ones. A token
    of zeros has no direction and counts as zeros. Neither result is differentiable.

    Args:
        x: `[B, L, H, D]` tokens in block order.
        blocks: partition of the L tokens; ragged blocks divide by their own size.
        center: floating `[B, H, D]`, subtracted from every token first (SpargeAttn's keys: their mean over the
            sequence); None: zeros.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        Means `[B, N, H, D]` and similarities `[B, N, H]`, fp32 for half-precision x, otherwise x's dtype.

    Raises:
        ValueError: x is not a 4-dim float tensor, the blocks do not cover its tokens, a center that does not fit, or
            the backend is unknown or cannot take it.

    Source: code of Zhang et al., "SpargeAttention" (arXiv 2502.18137), the self-similarity judge of its section 3.3.
    """
    check_tokens("x", x)
    check_blocks("blocks", blocks, "x", x)
    if center is not None:
        wanted = [x.shape[0], *x.shape[2:]]
        if list(center.shape) != wanted or not center.is_floating_point():
            raise ValueError(f"center must be floating {wanted}, got {center.dtype} {list(center.shape)}")
        check_device("center", center, "x", x)
        center = center.detach().to(torch.promote_types(x.dtype, torch.float32))
    chosen = resolve_plain(backend, x.device, x.dtype, x.shape[3])
    sizes = (blocks.max_size, blocks.min_size)
    return block_mean_and_similarity_op(x.detach(), center, blocks.offsets, *sizes, chosen)
