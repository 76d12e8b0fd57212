"""How many tiles a query tile keeps, as a pure function of the optimizer step.

Sparsity is the share of kv tiles skipped per query tile.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Protocol


def resolve_topk(sparsity: float | str, num_tiles: int) -> int:
    """Tiles kept at a sparsity: `clamp(ceil((1 - sparsity) * num_tiles), 1, num_tiles)`.

    The sparsity is taken as the decimal number it is written as: in binary floats `(1 - 0.7) * 10` ceils to 4.

    Args:
        sparsity: share of tiles skipped, in [0, 1).
        num_tiles: kv tiles there are.

    Raises:
        ValueError: sparsity outside [0, 1) or not a number, num_tiles below 1.

    Source: VSA's code (methods 1.1); the paper gives top-k directly.
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles must be at least 1, got {num_tiles}")
    kept = math.ceil((1 - _exact(sparsity)) * num_tiles)
    return max(1, min(kept, num_tiles))


def _exact(sparsity: float | str) -> Fraction:
    try:
        value = Decimal(str(sparsity))
    except InvalidOperation:
        raise ValueError(f"sparsity must be a number, got {sparsity!r}") from None
    if not (value.is_finite() and 0 <= value < 1):
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity}")
    return Fraction(value)


class SparsitySchedule(Protocol):
    """Top-k of each optimizer step."""

    def topk(self, step: int, num_tiles: int) -> int:
        """Tiles a query tile keeps at a step, between 1 and num_tiles.

        Args:
            step: optimizer step, from 0.
            num_tiles: video tiles of a sample.
        """
        ...

    def check(self, num_tiles: int) -> None:
        """Refuse a grid too small for what the schedule asks for.

        Raises:
            ValueError: the top-k is above num_tiles.
        """
        ...


class ConstantSparsity:
    """The same top-k or the same sparsity at every step; sparsity 0 is dense.

    Args:
        topk: tiles kept, at least 1; smaller grids than the one checked keep all of theirs.
        sparsity: share of tiles skipped, in [0, 1). Exactly one of the two is given.

    Raises:
        ValueError: both or none given, or a value out of range.
    """

    def __init__(self, topk: int | None = None, sparsity: float | str | None = None):
        if (topk is None) == (sparsity is None):
            raise ValueError(f"give exactly one of topk and sparsity, got topk={topk} and sparsity={sparsity}")
        if topk is not None and topk < 1:
            raise ValueError(f"topk must be at least 1, got {topk}")
        if sparsity is not None:
            _exact(sparsity)
        self._topk, self._sparsity = topk, sparsity

    def topk(self, step: int, num_tiles: int) -> int:
        if self._sparsity is not None:
            return resolve_topk(self._sparsity, num_tiles)
        assert self._topk is not None
        return min(self._topk, num_tiles)

    def check(self, num_tiles: int) -> None:
        # a grid in one tile, dense attention among them, has nothing to select
        if self._topk is not None and self._topk > num_tiles > 1:
            raise ValueError(f"topk={self._topk} is above the number of tiles, {num_tiles}")
