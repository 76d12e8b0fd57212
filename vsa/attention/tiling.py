"""Division of one segment into tiles: the order of the tokens and the size of each tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vsa.attention.hilbert import hilbert_order

Grid = tuple[int, int, int]
BlockOrder = Literal["nested", "raster"]
Partition = Literal["cube", "hilbert_run", "raster_run", "hilbert2d_run", "block3d_run"]

# sizes of the aligned groups of blocks that nested order keeps compact
SUPER_SIZES = (2, 4, 8)
# cubes whose tokens are consecutive in block3d_run
RUN_CUBE: Grid = (4, 4, 4)
# a layout with a smaller share of filled slots gets a warning
MIN_FILL = 0.9


@dataclass(frozen=True)
class SegmentTiles:
    """The tiles of one segment: its tokens in tile-major order, block sizes, groups of blocks."""

    order: Tensor
    sizes: list[int]
    groups: dict[int, list[int]]


def run_order(grid: Grid, partition: Partition) -> Tensor | None:
    """Raster indices of a grid's tokens in the order of a partition's runs; None for the partition into cuboids.

    Args:
        grid: tokens along time, height, width.
        partition: see `TileLayout`.
    """
    if partition == "cube":
        return None
    if partition == "hilbert_run":
        return hilbert_order(grid)
    if partition == "hilbert2d_run":
        frame = hilbert_order((1, *grid[1:]))
        return (torch.arange(grid[0], device="cpu")[:, None] * len(frame) + frame).flatten()
    if partition == "block3d_run":
        return cube_tiles(grid, RUN_CUBE, "raster").order
    return torch.arange(math.prod(grid), device="cpu")


def run_tiles(num_tokens: int, size: int, order: Tensor | None = None) -> SegmentTiles:
    """Blocks of `size` consecutive tokens, the last one shorter."""
    sizes = [min(size, num_tokens - start) for start in range(0, num_tokens, size)]
    groups = {g: [min(g, len(sizes) - start) for start in range(0, len(sizes), g)] for g in SUPER_SIZES}
    return SegmentTiles(torch.arange(num_tokens, device="cpu") if order is None else order, sizes, groups)


def cube_tiles(grid: Grid, tile: Grid, block_order: BlockOrder) -> SegmentTiles:
    """Cuboid tiles with tokens in raster order; tiles at the far edges hold the remaining tokens."""
    axes = [torch.arange(n, device="cpu") // c for n, c in zip(grid, tile, strict=True)]
    t, h, w = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))
    nt, nh, nw = (math.ceil(n / c) for n, c in zip(grid, tile, strict=True))
    if block_order == "raster":
        key = (t * nh + h) * nw + w
    else:
        # groups of 2 x 2 x 2 tiles in raster order; within a group height runs fastest, then width, then time
        group = (t // 2 * math.ceil(nh / 2) + h // 2) * math.ceil(nw / 2) + w // 2
        key = group * 8 + t % 2 * 4 + w % 2 * 2 + h % 2
    key, order = torch.sort(key, stable=True)
    tiles, sizes = torch.unique_consecutive(key, return_counts=True)
    assert tiles.numel() == nt * nh * nw
    groups = {g: torch.unique_consecutive(tiles // g, return_counts=True)[1].tolist() for g in SUPER_SIZES}
    return SegmentTiles(order, sizes.tolist(), groups)


def chain_of(tiles: Iterable[Grid]) -> tuple[Grid, ...]:
    """Distinct tiles from the largest to the smallest; ValueError unless each divides the next larger one."""
    chain = tuple(sorted(set(tiles), key=math.prod, reverse=True))
    for large, small in itertools.pairwise(chain):
        if any(n % c for n, c in zip(large, small, strict=True)):
            raise ValueError(f"tiles must divide each other along every axis, got {large} and {small}")
    return chain


def refuse_no_divisor(name: str, tile: Grid, **larger: Grid) -> None:
    """Raise ValueError if a tile (the option called `name`) does not divide one of the larger ones."""
    for other, sides in larger.items():
        if any(n % c for n, c in zip(sides, tile, strict=True)):
            raise ValueError(f"{name}={list(tile)} must divide {other}={list(sides)} along every axis")


def nested_tiles(
    grid: Grid, chain: Sequence[Grid], partition: Partition, block_order: BlockOrder
) -> tuple[Tensor, dict[Grid, list[int]]]:
    """A token order in which the tiles of every size of a chain are contiguous, and the sizes of these blocks.

    The largest tiles have the order that they would have alone; smaller ones are in raster order inside the next larger
    tile.

    Args:
        grid: tokens along time, height, width.
        chain: tile sizes as returned by `chain_of`.
        partition: see `TileLayout`.
        block_order: order of cube tiles, see `TileLayout`.
    """
    if (order := run_order(grid, partition)) is not None:
        return order, {tile: run_tiles(len(order), math.prod(tile)).sizes for tile in chain}
    whole = cube_tiles(grid, chain[0], block_order)
    order, sizes = whole.order, {chain[0]: whole.sizes}
    for larger, tile in itertools.pairwise(chain):
        outer = torch.repeat_interleave(torch.tensor(sizes[larger], device="cpu"))
        t, h, w = (n // c for n, c in zip(torch.unravel_index(order, grid), tile, strict=True))
        _, nh, nw = (math.ceil(n / c) for n, c in zip(grid, tile, strict=True))
        inner = (t * nh + h) * nw + w
        key, permutation = torch.sort(outer * (int(inner.max()) + 1) + inner, stable=True)
        order, sizes[tile] = order[permutation], torch.unique_consecutive(key, return_counts=True)[1].tolist()
    return order, sizes


def count_tiles(grid_thw: Sequence[int], tile_thw: Sequence[int]) -> int:
    """Number of tiles that cover a grid, short ones at the far edges included."""
    return math.prod(math.ceil(n / c) for n, c in zip(grid_thw, tile_thw, strict=True))


def proposals(grid_thw: Sequence[int], volume: int) -> list[Grid]:
    """Tiles of at most `volume` tokens, best first.

    A kernel computes `volume` slots for every tile, so the cost is the number of tiles. Tiles that fill at least
    `MIN_FILL` of their slots come first, the most cubic one in front; the others follow by the number of tiles.

    Args:
        grid_thw: tokens along time, height, width.
        volume: maximum number of tokens of a tile.
    """
    ts, hs, ws = (range(1, min(n, volume) + 1) for n in grid_thw)
    tiles = [(t, h, w) for t, h, w in itertools.product(ts, hs, ws) if t * h * w <= volume]
    good = math.prod(grid_thw) / (MIN_FILL * volume)

    def cost(tile: Grid) -> tuple[float, int, int, int]:
        surface = tile[0] * tile[1] + tile[1] * tile[2] + tile[2] * tile[0]
        return max(count_tiles(grid_thw, tile), good), surface, tile[0], tile[1]

    return sorted(tiles, key=cost)


def propose_tile(grid_thw: Sequence[int], volume: int) -> Grid:
    """The first of the `proposals`."""
    return proposals(grid_thw, volume)[0]
