"""Block means and similarities in plain tensor operations, without atomics: bit-repeatable on every device."""

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


def mean_and_similarity(x: Tensor, center: Tensor | None, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Means `[B, N, H, D]` and similarities `[B, N, H]` of x `[B, L, H, D]` minus its center `[B, H, D]`."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x if center is None else x - center[:, None]
    length = x.norm(dim=-1, keepdim=True)
    sizes = blocks.sizes[:, None, None]
    units = by_block(torch.where(length == 0, 0, x / length), blocks).sum(2) / sizes
    return by_block(x, blocks).sum(2) / sizes, units.square().sum(-1)
