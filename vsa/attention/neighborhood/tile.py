"""Which tile suits neighborhood attention on a grid."""

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
    """The query tile and the kv tile with which a kernel computes the fewest pairs, static kv tiles.

    A kernel pays all its slots for a short tile, so what counts is the number of visited pairs of tiles: the kv slots
    that the mean query tile visits times the query tiles there are. Among equals visited tiles with the fewest tokens
    are taken, of which fewer are masked, then the nearest to a cube, then the one with the longest rows.

    Args:
        axes: of a grid, 1, 2 or 3.
        q_tokens: slots of a query tile, a multiple of `kv_tokens`. The query tile is so many kv tiles side by side.
        kv_tokens: slots of a kv tile.
        even: kv tiles have `kv_tokens` tokens and sides that are powers of two, which fast kernels want; otherwise
            they may have fewer tokens and any sides, none longer than its axis.

    Returns:
        sides of the query tile and of the kv tile.

    Raises:
        ValueError: q_tokens that is no multiple of kv_tokens, or kv_tokens that is no power of two for even tiles.
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
    """Cuboids of at most `volume` tokens with sides up to `most`, but for those of which a whole copy could be added at
    the last side: a tile that is made of others is never the worse one."""
    *outer, last = most
    for sides in itertools.product(*(range(1, min(n, volume) + 1) for n in outer)):
        room = volume // math.prod(sides)
        for side in range(min(room // 2 + 1, last), min(room, last) + 1):
            yield (*sides, side)


def _even_cuboids(sizes: Sequence[int], volume: int) -> Iterator[tuple[int, ...]]:
    """Cuboids of `volume` tokens with sides that are powers of two, no longer than axes need unless all are small."""
    most = [1 << (n - 1).bit_length() for n in sizes]
    if math.prod(most) < volume:
        most = [volume] * len(sizes)
    sides = [[1 << i for i in range(min(n, volume).bit_length())] for n in most]
    return (tile for tile in itertools.product(*sides) if math.prod(tile) == volume)
