"""Block means in plain tensor operations, without atomics: bit-repeatable on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks


def forward(x: Tensor, blocks: Blocks) -> Tensor:
    """Means `[B, N, H, D]` of x `[B, L, H, D]`."""
    B, L, H, D = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    if blocks.max_size == blocks.min_size:
        return x.reshape(B, blocks.num, blocks.max_size, H, D).mean(2, dtype=dtype)
    place = torch.arange(blocks.max_size, device=x.device)
    inside = place < blocks.sizes[:, None]
    # [N, max_size] tokens; places past the end of a block read some token and are then zeroed
    token = (blocks.offsets[:-1, None] + place).clamp(max=L - 1)
    padded = x.index_select(1, token.reshape(-1)).reshape(B, blocks.num, blocks.max_size, H, D)
    padded = padded.masked_fill_(~inside[..., None, None], 0)
    return padded.sum(2, dtype=dtype) / blocks.sizes[:, None, None]


def backward(grad: Tensor, blocks: Blocks, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Gradient `[B, L, H, D]` of the means' gradient `[B, N, H, D]`."""
    B, N, H, D = grad.shape
    share = (grad / blocks.sizes[:, None, None]).to(dtype)
    if blocks.max_size == blocks.min_size:
        whole = share[:, :, None].expand(B, N, blocks.max_size, H, D)
        return whole.reshape(B, num_tokens, H, D).contiguous()
    token = torch.arange(num_tokens, device=grad.device, dtype=torch.int32)
    block = torch.searchsorted(blocks.offsets[1:].contiguous(), token, right=True)
    return share.index_select(1, block)
