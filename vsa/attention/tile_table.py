"""Which tiles suit a grid: how many there are, how full they are, what selecting a share of them costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vsa.attention.sparsity import resolve_topk
from vsa.attention.tiling import Grid, Partition, count_tiles, proposals


class TileRow(NamedTuple):
    """A way to cut a grid.

    Args:
        tile_thw: tokens of a tile along time, height, width.
        partition: cube or hilbert_run.
        tiles: how many there are.
        fill: share of their slots that hold a token.
        topk: tiles that a query tile keeps.
        pairs: query-key pairs that the fine stage needs over those of dense attention.
        executed: pairs of slots that a kernel computes over those of dense attention; a short tile costs a whole one.
    """

    tile_thw: Grid
    partition: Partition
    tiles: int
    fill: float
    topk: int
    pairs: float
    executed: float


def tile_rows(grid_thw: Grid, volume: int, sparsity: float, count: int) -> list[TileRow]:
    """Rows of a table: the cube nearest to `volume`, runs along a curve, and the best proposals.

    Args:
        grid_thw: tokens of the patchified latents along time, height, width.
        volume: slots of a tile, 64 for (4, 4, 4).
        sparsity: share of tiles that are skipped.
        count: how many proposals.
    """
    usual = min(_cuts(volume), key=lambda tile: (max(tile) - min(tile), -tile[2], -tile[1]))
    tokens = math.prod(grid_thw)
    best = [tile for tile in proposals(grid_thw, volume) if tile != usual][:count]
    cuts: list[tuple[Grid, Partition, int]] = [(tile, "cube", count_tiles(grid_thw, tile)) for tile in (usual, *best)]
    cuts.insert(1, (usual, "hilbert_run", math.ceil(tokens / volume)))
    rows = []
    for tile, partition, tiles in cuts:
        topk = resolve_topk(sparsity, tiles)
        executed = tiles * topk * volume**2 / tokens**2
        rows.append(TileRow(tile, partition, tiles, tokens / (tiles * volume), topk, topk / tiles, executed))
    return rows


def describe_tiles(grid_thw: Grid, volume: int, sparsity: float, count: int) -> Iterator[str]:
    """Lines of the table, options of a run first.

    Raises:
        ValueError: sizes below 1, or a sparsity outside [0, 1).
    """
    if min(*grid_thw, volume, count) < 1:
        raise ValueError(f"sizes must be at least 1, got grid {list(grid_thw)}, volume={volume}, proposals={count}")
    tokens = math.prod(grid_thw)
    yield f"{tokens} tokens, tiles of at most {volume}, sparsity {sparsity:g}"
    yield f"{'options':<50} {'tiles':>6} {'fill':>6} {'top-k':>6} {'pairs':>7} {'executed':>9}"
    for row in tile_rows(grid_thw, volume, sparsity, count):
        options = "tile_thw=" + _listed(row.tile_thw)
        if row.partition != "cube":
            options += f" attention.partition={row.partition}"
        yield (f"{options:<50} {row.tiles:>6} {row.fill:>6.1%} {row.topk:>6} {row.pairs:>7.2%} {row.executed:>9.2%}")


def _cuts(volume: int) -> Iterator[Grid]:
    divisors = [n for n in range(1, volume + 1) if volume % n == 0]
    for t, h in itertools.product(divisors, repeat=2):
        if volume % (t * h) == 0:
            yield t, h, volume // (t * h)


def _listed(sides: Sequence[int]) -> str:
    return f"[{','.join(map(str, sides))}]"
