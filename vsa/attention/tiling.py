"""Cutting one segment into tiles: which token goes where, and how large each tile is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Grid = tuple[int, int, int]
BlockOrder = Literal["nested", "raster"]

# sizes of the aligned groups of blocks that nested order keeps compact
SUPER_SIZES = (2, 4, 8)
# a layout below this share of filled slots is worth a warning
MIN_FILL = 0.9


@dataclass(frozen=True)
class SegmentTiles:
    """One segment cut into blocks: its tokens in tile-major order, block sizes, groups of blocks."""

    order: Tensor
    sizes: list[int]
    groups: dict[int, list[int]]


def run_tiles(num_tokens: int, size: int, order: Tensor | None = None) -> SegmentTiles:
    """Blocks of `size` consecutive tokens, the last one shorter."""
    sizes = [min(size, num_tokens - start) for start in range(0, num_tokens, size)]
    groups = {g: [min(g, len(sizes) - start) for start in range(0, len(sizes), g)] for g in SUPER_SIZES}
    return SegmentTiles(torch.arange(num_tokens, device="cpu") if order is None else order, sizes, groups)


def cube_tiles(grid: Grid, tile: Grid, block_order: BlockOrder) -> SegmentTiles:
    """Cuboid tiles, raster inside; sizes of the tiles at the far edges are what is left there."""
    axes = [torch.arange(n, device="cpu") // c for n, c in zip(grid, tile, strict=True)]
    t, h, w = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))
    nt, nh, nw = (math.ceil(n / c) for n, c in zip(grid, tile, strict=True))
    if block_order == "raster":
        key = (t * nh + h) * nw + w
    else:
        # groups of 2 x 2 x 2 tiles in raster order; inside a group height runs fastest, then width, then time
        group = (t // 2 * math.ceil(nh / 2) + h // 2) * math.ceil(nw / 2) + w // 2
        key = group * 8 + t % 2 * 4 + w % 2 * 2 + h % 2
    key, order = torch.sort(key, stable=True)
    tiles, sizes = torch.unique_consecutive(key, return_counts=True)
    assert tiles.numel() == nt * nh * nw
    groups = {g: torch.unique_consecutive(tiles // g, return_counts=True)[1].tolist() for g in SUPER_SIZES}
    return SegmentTiles(order, sizes.tolist(), groups)


def slots(grid_thw: Sequence[int], tile_thw: Sequence[int]) -> int:
    """Token slots of the tiles that cover a grid."""
    return math.prod(math.ceil(n / c) * c for n, c in zip(grid_thw, tile_thw, strict=True))


def propose_tile(grid_thw: Sequence[int], volume: int) -> Grid:
    """The tile of a given volume nearest to a cube that fills a grid well, or else the one that fills it best.

    Args:
        grid_thw: tokens along time, height, width.
        volume: tokens per tile.
    """
    divisors = [n for n in range(1, volume + 1) if volume % n == 0]
    tiles = [(t, h, volume // (t * h)) for t in divisors for h in divisors if volume % (t * h) == 0]
    good = math.prod(grid_thw) / MIN_FILL

    def cost(tile: Grid) -> tuple[float, int, int, int]:
        surface = tile[0] * tile[1] + tile[1] * tile[2] + tile[2] * tile[0]
        return max(slots(grid_thw, tile), good), surface, tile[0], tile[1]

    return min(tiles, key=cost)
