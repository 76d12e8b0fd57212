"""Choice of the tile for neighborhood attention on a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

from vsa.attention.neighborhood.axis import AxisWindow
from vsa.attention.neighborhood.visits import Visits, count_visits


@lru_cache(maxsize=64)
def best_tile(
    axes: tuple[AxisWindow, ...], *, q_tokens: int = 64, kv_tokens: int = 64, even: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The query tile and the kv tile with which a kernel computes the fewest pairs, for static kv tiles.

    A kernel computes all slots of a short tile, so the cost is the number of visited pairs of tiles: the kv slots that
    the mean query tile visits times the number of query tiles. Ties go to the tiles that visit the fewest tokens, of
    which fewer are masked, then to the most cubic tile, then to the one with the longest rows.

    Args:
        axes: windows of the 1, 2 or 3 axes of a grid.
        q_tokens: slots of a query tile, a multiple of `kv_tokens`. The query tile is that many adjacent kv tiles.
        kv_tokens: slots of a kv tile.
        even: whether kv tiles have exactly `kv_tokens` tokens and sides that are powers of two, as fast kernels need;
            otherwise they may have fewer tokens and any sides up to the length of the axis.

    Returns:
        Sides of the query tile and of the kv tile.
    """
    if min(q_tokens, kv_tokens) < 1 or q_tokens % kv_tokens:
        raise ValueError(f"q_tokens must be a multiple of kv_tokens, got {q_tokens} and {kv_tokens}")
    if even and kv_tokens.bit_count() != 1:
        raise ValueError(f"kv_tokens of even tiles must be a power of two, got {kv_tokens}")

    @cache
    def visits(i: int, q_side: int, kv_side: int) -> Visits:
        return count_visits([[axes[i]]], q_side, kv_side)[0]

    def cost(tiles: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple:
        by_axis = [visits(i, q_side, kv_side) for i, (q_side, kv_side) in enumerate(zip(*tiles, strict=True))]
        return math.prod(v.summed for v in by_axis), math.prod(v.computed for v in by_axis), sum(tiles[0]), tiles

    copies = list(_cuboids([q_tokens] * len(axes), q_tokens // kv_tokens))
    candidates = [
        (tuple(side * n for side, n in zip(kv_tile, copy, strict=True)), kv_tile)
        for kv_tile in (_even_cuboids if even else _cuboids)([axis.size for axis in axes], kv_tokens)
        for copy in copies
        if math.prod(copy) == q_tokens // kv_tokens
    ]
    return min(candidates, key=cost)


def _cuboids(most: Sequence[int], volume: int) -> Iterator[tuple[int, ...]]:
    """Cuboids of at most `volume` tokens with sides up to `most`, without those that could be extended by a whole copy
    along the last side: a tile made of several copies is never worse than one copy."""
    *outer, last = most
    for sides in itertools.product(*(range(1, min(n, volume) + 1) for n in outer)):
        room = volume // math.prod(sides)
        for side in range(min(room // 2 + 1, last), min(room, last) + 1):
            yield (*sides, side)


def _even_cuboids(sizes: Sequence[int], volume: int) -> Iterator[tuple[int, ...]]:
    """Cuboids of `volume` tokens with powers of two as sides, no longer than the axes need unless all are short."""
    most = [1 << (n - 1).bit_length() for n in sizes]
    if math.prod(most) < volume:
        most = [volume] * len(sizes)
    sides = [[1 << i for i in range(min(n, volume).bit_length())] for n in most]
    return (tile for tile in itertools.product(*sides) if math.prod(tile) == volume)
