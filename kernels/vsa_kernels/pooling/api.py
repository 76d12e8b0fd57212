"""The public call of block pooling. B batch, L tokens, H heads, D head dim, N blocks."""

from __future__ import annotations

from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.checks import check_blocks, check_tokens
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.modes import refuse_forward_mode
from vsa_kernels.pooling.op import block_mean_pool_fwd


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
