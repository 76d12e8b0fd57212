"""One vector a tile, from the tokens it holds. B batch, L tokens, N tiles, H heads, D head dim."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from vsa_kernels import block_mean_pool

from vsa.attention.layout import TileLayout
from vsa.attention.tiling import Grid

Pooling = Literal["mean", "max", "conv"]


class TilePool(nn.Module):
    """Pools tokens of tiles.

    Args:
        kind: mean; max, of each channel; or conv, a 3-D convolution with the tile as kernel and stride, D to D
            channels, shared by the heads, without bias; a short tile is filled up with zeros.
        head_dim: D.
        tile_thw: tokens of a tile.

    Source: VSA (arXiv 2505.13389), Table 1(e); that the heads share a convolution is our reading.
    """

    def __init__(self, kind: Pooling, head_dim: int, tile_thw: Grid):
        super().__init__()
        self.kind, self.tile_thw = kind, tile_thw
        self.conv = nn.Linear(math.prod(tile_thw) * head_dim, head_dim, bias=False) if kind == "conv" else None

    def forward(self, x: Tensor, layout: TileLayout) -> Tensor:
        """`[B, N, H, D]`, at least fp32, of tile-major tokens x `[B, L, H, D]`."""
        if self.kind == "mean":
            return block_mean_pool(x, layout.blocks)
        blocks = layout.blocks
        if self.kind == "max":
            x = x if x.dtype == torch.float64 else x.float()
            if blocks.min_size == blocks.max_size:
                return x.unflatten(1, (blocks.num, blocks.max_size)).amax(2)
            rows = x.movedim(1, 0).contiguous()
            return torch.segment_reduce(rows, "max", lengths=blocks.sizes.long()).movedim(0, 1)
        assert self.conv is not None
        volume = math.prod(self.tile_thw)
        slots = x.new_zeros(x.shape[0], blocks.num * volume, *x.shape[2:])
        slots = slots.index_copy(1, tile_slots(layout), x)
        # [B, N, H, volume * D]
        tokens = slots.unflatten(1, (blocks.num, volume)).transpose(2, 3).flatten(3)
        pooled = self.conv(tokens)
        return pooled if pooled.dtype == torch.float64 else pooled.float()


@lru_cache(maxsize=64)
def tile_slots(layout: TileLayout) -> Tensor:
    """int64 `[L]`: tile * volume + place in a whole tile, of the tile-major tokens of a row of one video."""
    places = token_places(layout) % torch.tensor(layout.tile_thw)
    _, th, tw = layout.tile_thw or (1, 1, 1)
    tile = torch.repeat_interleave(layout.blocks.sizes.long().cpu())
    with torch.inference_mode(False):
        place = (places[:, 0] * th + places[:, 1]) * tw + places[:, 2]
        return (tile * math.prod(layout.tile_thw or (1,)) + place).to(layout.device)


def token_places(layout: TileLayout) -> Tensor:
    """int64 `[L, 3]` on the CPU: time, height and width of the tile-major tokens of a row of one video."""
    grid = layout.only_video("the place of a token").grid_thw
    return torch.stack(torch.unravel_index(layout.order.cpu(), grid), dim=-1)
