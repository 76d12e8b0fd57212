"""Pooling of the tokens of each tile to one vector. B batch, L tokens, N tiles, H heads, D head dim."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vsa_kernels import block_mean_pool

from vsa.attention.layout import TileLayout
from vsa.attention.tiling import Grid

Pooling = Literal["mean", "max", "conv"]
ConvSharing = Literal["heads", "all", "none"]


class TilePool(nn.Module):
    """Pooling of tiles by mean, maximum or convolution.

    Args:
        kind: mean; max of each channel; or conv, a 3-D convolution with the tile as kernel and stride, D to D channels,
            without bias; a short tile is padded with zeros.
        head_dim: D.
        tile_thw: tokens per tile along time, height, width.
        heads: number of convolutions, one for each head of x; None: the heads share one.

    Source: VSA (arXiv 2505.13389), Table 1(e).
    """

    def __init__(self, kind: Pooling, head_dim: int, tile_thw: Grid, heads: int | None = None):
        super().__init__()
        self.kind, self.tile_thw, self.volume = kind, tile_thw, math.prod(tile_thw)
        self.convs: nn.ModuleList | None = None
        self.conv: nn.Linear | None = None
        if kind == "conv":
            convs = [nn.Linear(self.volume * head_dim, head_dim, bias=False) for _ in range(heads or 1)]
            self.conv = convs[0] if heads is None else None
            self.convs = nn.ModuleList(convs) if heads is not None else None

    def start_as_mean(self) -> None:
        """Set the weights of a convolution to the mean over a full tile."""
        for conv in [module for module in self.modules() if isinstance(module, nn.Linear)]:
            eye = torch.eye(conv.out_features, dtype=conv.weight.dtype, device=conv.weight.device)
            with torch.no_grad():
                conv.weight.copy_(eye.repeat(1, self.volume) / self.volume)

    def prepare(self, layout: TileLayout) -> None:
        """Compute the tensors that `forward` derives from a layout."""
        if self.kind == "conv":
            layout.derive(tile_slots, self.tile_thw)

    def forward(self, x: Tensor, layout: TileLayout) -> Tensor:
        """Pooled tiles `[B, N, H, D]`, at least fp32, of tile-major tokens x `[B, L, H, D]`."""
        blocks = layout.tiles[self.tile_thw]
        if self.kind == "mean":
            return block_mean_pool(x, blocks)
        if self.kind == "max":
            x = x if x.dtype == torch.float64 else x.float()
            if blocks.min_size == blocks.max_size:
                return x.unflatten(1, (blocks.num, blocks.max_size)).amax(2)
            rows = x.movedim(1, 0).contiguous()
            return torch.segment_reduce(rows, "max", lengths=blocks.sizes.long()).movedim(0, 1)
        slots = x.new_zeros(x.shape[0], blocks.num * self.volume, *x.shape[2:])
        slots = slots.index_copy(1, layout.derive(tile_slots, self.tile_thw), x)
        # [B, N, H, volume * D]
        tokens = slots.unflatten(1, (blocks.num, self.volume)).transpose(2, 3).flatten(3)
        pooled = self._convolve(tokens)
        return pooled if pooled.dtype == torch.float64 else pooled.float()

    def _convolve(self, tokens: Tensor) -> Tensor:
        if self.convs is None:
            assert self.conv is not None
            return self.conv(tokens)
        return torch.stack([conv(x) for conv, x in zip(self.convs, tokens.unbind(2), strict=True)], dim=2)


def make_pools(
    kind: Pooling, tiles: Mapping[str, Grid], head_dim: int, num_heads: int, sharing: ConvSharing
) -> nn.ModuleDict:
    """Pools of queries, keys and values.

    Args:
        tiles: tile sizes by q, k, v.
        sharing: sharing of convolutions: heads (one each for queries, keys and values, shared by the heads), all (a
            single one) or none (every head has its own three). The paper does not say which.
    """
    if kind == "conv" and sharing == "all":
        if len(set(tiles.values())) > 1:
            raise ValueError(f"conv_sharing=all needs tiles of one size in the coarse stage, got {dict(tiles)}")
        return nn.ModuleDict(dict.fromkeys(tiles, TilePool(kind, head_dim, tiles["q"])))
    heads = num_heads if sharing == "none" else None
    return nn.ModuleDict({name: TilePool(kind, head_dim, tile, heads) for name, tile in tiles.items()})


def pool_modules(pools: nn.ModuleDict) -> dict[str, TilePool]:
    """Pools with parameters by their names in a block: `to_pool_q`, ..., or `to_pool` for a shared one."""
    own: dict[str, Any] = {name: pool for name, pool in pools.items() if list(pool.parameters())}
    if len(own) > len(set(map(id, own.values()))):
        return {"to_pool": own["q"]}
    return {f"to_pool_{name}": pool for name, pool in own.items()}


def tile_slots(layout: TileLayout, tile_thw: Grid) -> Tensor:
    """Slot of each tile-major token of a row of one video, int64 `[L]`: tile * volume + position in a whole tile; for
    `TileLayout.derive`."""
    places = token_places(layout) % torch.tensor(tile_thw)
    _, th, tw = tile_thw
    tile = torch.repeat_interleave(layout.tiles[tile_thw].sizes.long().cpu())
    place = (places[:, 0] * th + places[:, 1]) * tw + places[:, 2]
    return (tile * math.prod(tile_thw) + place).to(layout.device)


def token_places(layout: TileLayout) -> Tensor:
    """Positions int64 `[L, 3]` (time, height, width) of the tile-major tokens of a row of one video, on the CPU."""
    grid = layout.only_video("the place of a token").grid_thw
    return torch.stack(torch.unravel_index(layout.order.cpu(), grid), dim=-1)
