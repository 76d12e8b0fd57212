"""Table of tiles for a grid: their number, their fill and the cost of attention to a share of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from vsa.attention.kept_tiles import Budget
from vsa.attention.tiling import Grid, Partition, count_tiles, proposals


class TileRow(NamedTuple):
    """One division of a grid into tiles.

    Args:
        tile_thw: tokens per tile along time, height, width.
        partition: cube or hilbert_run.
        tiles: number of tiles.
        fill: share of the slots of the tiles that hold a token.
        topk: tiles that a query tile keeps.
        pairs: query-key pairs of the fine stage relative to dense attention.
        executed: pairs of slots that a kernel computes relative to dense attention; a short tile costs a whole one.
    """

    tile_thw: Grid
    partition: Partition
    tiles: int
    fill: float
    topk: int
    pairs: float
    executed: float


def tile_rows(grid_thw: Grid, volume: int, sparsity: float, count: int) -> list[TileRow]:
    """Rows of the table: the cube closest to `volume`, runs along a curve, and the best proposals.

    Args:
        grid_thw: tokens of the patchified latents along time, height, width.
        volume: slots of a tile, 64 for (4, 4, 4).
        sparsity: share of tiles that are skipped.
        count: number of proposals.
    """
    usual = min(_cuts(volume), key=lambda tile: (max(tile) - min(tile), -tile[2], -tile[1]))
    tokens = math.prod(grid_thw)
    best = [tile for tile in proposals(grid_thw, volume) if tile != usual][:count]
    cuts: list[tuple[Grid, Partition, int]] = [(tile, "cube", count_tiles(grid_thw, tile)) for tile in (usual, *best)]
    cuts.insert(1, (usual, "hilbert_run", math.ceil(tokens / volume)))
    rows = []
    for tile, partition, tiles in cuts:
        topk = Budget(sparsity=sparsity).tiles(tiles)
        executed = tiles * topk * volume**2 / tokens**2
        rows.append(TileRow(tile, partition, tiles, tokens / (tiles * volume), topk, topk / tiles, executed))
    return rows


def describe_tiles(grid_thw: Grid, volume: int, sparsity: float, count: int) -> Iterator[str]:
    """Lines of the table, in which every row begins with the options of a run."""
    if min(*grid_thw, volume, count) < 1:
        raise ValueError(f"sizes must be at least 1, got grid {list(grid_thw)}, volume={volume}, proposals={count}")
    tokens = math.prod(grid_thw)
    yield f"{tokens} tokens, tiles of at most {volume}, sparsity {sparsity:g}"
    yield f"{'options':<50} {'tiles':>6} {'fill':>6} {'top-k':>6} {'pairs':>7} {'executed':>9}"
    for row in tile_rows(grid_thw, volume, sparsity, count):
        options = f"tile_thw=[{','.join(map(str, row.tile_thw))}]"
        if row.partition != "cube":
            options += f" attention.partition={row.partition}"
        yield (f"{options:<50} {row.tiles:>6} {row.fill:>6.1%} {row.topk:>6} {row.pairs:>7.2%} {row.executed:>9.2%}")


def _cuts(volume: int) -> Iterator[Grid]:
    divisors = [n for n in range(1, volume + 1) if volume % n == 0]
    for t, h in itertools.product(divisors, repeat=2):
        if volume % (t * h) == 0:
            yield t, h, volume // (t * h)
