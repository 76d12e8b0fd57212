"""Block means in plain tensor operations, without atomics: bit-repeatable on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks, by_block, token_places


def forward(x: Tensor, blocks: Blocks) -> Tensor:
    """Means `[B, N, H, D]` of x `[B, L, H, D]`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    padded = by_block(x, blocks)
    if blocks.max_size == blocks.min_size:
        return padded.mean(2, dtype=dtype)
    return padded.sum(2, dtype=dtype) / blocks.sizes[:, None, None]


def backward(grad: Tensor, blocks: Blocks, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Gradient `[B, L, H, D]` of the means' gradient `[B, N, H, D]`."""
    B, N, H, D = grad.shape
    share = (grad / blocks.sizes[:, None, None]).to(dtype)
    if blocks.max_size == blocks.min_size:
        whole = share[:, :, None].expand(B, N, blocks.max_size, H, D)
        return whole.reshape(B, num_tokens, H, D).contiguous()
    block, _ = token_places(blocks, num_tokens)
    return share.index_select(1, block)
