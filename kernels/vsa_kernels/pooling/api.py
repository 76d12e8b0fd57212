"""Public interface of block pooling. B batch, L tokens, H heads, D head dim, N blocks."""

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

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 2 (coarse stage).
    """
    check_tokens("x", x)
    check_blocks("blocks", blocks, "x", x)
    refuse_forward_mode(x)
    resolved_backend = resolve_plain(backend, x.device, x.dtype, x.shape[3])
    return block_mean_pool_fwd(x, blocks.offsets, blocks.max_size, blocks.min_size, resolved_backend)


def block_mean_and_similarity(
    x: Tensor, blocks: Blocks, *, center: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and self-similarity of the tokens of each block, in one read of x.

    The similarity of a block is the mean cosine over all pairs of its tokens, pairs of a token with itself included,
    which equals the squared norm of the mean of the normalised tokens. It is 1 where all tokens have one direction and
    1 / n for n orthogonal tokens. A token of zeros stays zero. Neither result is differentiable.

    Args:
        x: `[B, L, H, D]` tokens in block order.
        blocks: partition of the L tokens; ragged blocks divide by their own size.
        center: float `[B, H, D]`, subtracted from every token first (SpargeAttn subtracts the mean of the keys over the
            sequence); None: zeros.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        Means `[B, N, H, D]` and similarities `[B, N, H]`, fp32 for half-precision x, otherwise x's dtype.

    Source: code of Zhang et al., "SpargeAttention" (arXiv 2502.18137), the self-similarity judge of its section 3.3.
    """
    check_tokens("x", x)
    check_blocks("blocks", blocks, "x", x)
    if center is not None:
        shape = [x.shape[0], *x.shape[2:]]
        if list(center.shape) != shape or not center.is_floating_point():
            raise ValueError(f"center must be floating {shape}, got {center.dtype} {list(center.shape)}")
        check_device("center", center, "x", x)
        center = center.detach().to(torch.promote_types(x.dtype, torch.float32))
    resolved_backend = resolve_plain(backend, x.device, x.dtype, x.shape[3])
    sizes = (blocks.max_size, blocks.min_size)
    return block_mean_and_similarity_op(x.detach(), center, blocks.offsets, *sizes, resolved_backend)
