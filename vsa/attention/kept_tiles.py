"""How many kv tiles a query tile keeps: `Budget` on any grid, `KeptTiles` on one grid.

Every room from the schedule to the kernel passes `KeptTiles` on; docs/design.md draws the way.

N tiles of a grid, B samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from operator import mul
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

Rounding = Literal["up", "down"]
"""Rounding of a share of the tiles to a number of tiles, which is at least one."""


class Budget(NamedTuple):
    """Tiles that a query tile keeps on any grid, as a number or by the share that it skips; exactly one of the two.

    Args:
        topk: number of kv tiles, at least 1.
        sparsity: share of kv tiles skipped, in [0, 1). It counts as the written decimal number: in binary floats
            `ceil((1 - 0.7) * 10)` would be 4.
    """

    topk: int | None = None
    sparsity: float | str | None = None

    def wanted(self, num_tiles: int, rounding: Rounding = "up") -> int:
        """The number on a grid of N tiles: `topk`, or `(1 - sparsity) * N` rounded up or down to at least 1.

        Source: up: VSA's code (its paper gives top-k directly); down: DFSAttn's code.
        """
        if num_tiles < 1:
            raise ValueError(f"num_tiles must be at least 1, got {num_tiles}")
        if self.topk is not None:
            return self.topk
        topk = (1 - self._exact_sparsity) * num_tiles
        return max(1, math.ceil(topk) if rounding == "up" else math.floor(topk))

    def tiles(self, num_tiles: int, rounding: Rounding = "up") -> int:
        """The number on a grid of N tiles, between 1 and N."""
        return min(self.wanted(num_tiles, rounding), num_tiles)

    def check(self, num_tiles: int) -> None:
        """Raise ValueError for a number above N or a share that leaves less than one of N tiles.

        A grid of a single tile, as with dense attention, has nothing to select.
        """
        if self.topk is not None and self.topk > num_tiles > 1:
            raise ValueError(f"topk={self.topk} is above the number of tiles, {num_tiles}")
        if self.sparsity is not None and num_tiles > 1 and (1 - self._exact_sparsity) * num_tiles < 1:
            most = 1 - 1 / num_tiles
            raise ValueError(f"sparsity={self.sparsity} leaves less than one of {num_tiles} tiles, at most {most:.4g}")

    @property
    def _exact_sparsity(self) -> Fraction:
        value = exact("sparsity", self.sparsity or 0)
        if not 0 <= value < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {self.sparsity}")
        return value


@dataclass(frozen=True)
class KeptTiles:
    """Kv tiles that a query tile keeps on one grid, by layer, by denoising progress or step, or by sample.

    Whole numbers are counts; others are expected numbers: means over samples, or of a rule without a fixed count.

    Args:
        layers: number of each layer, outside of the ranges and before the steps; a single one is that of all layers.
        ranges: start and stop (excluded) of a range of denoising progress, and the numbers in it, as `layers`.
        steps: ascending denoising steps with the numbers from each step on; they have priority over the ranges.
        samples: int32 `[layers, B]`, or `[B]` of one layer, where samples differ; `layers` is then the largest.
    """

    layers: tuple[float, ...]
    ranges: tuple[tuple[float, float, tuple[float, ...]], ...] = ()
    steps: tuple[tuple[int, tuple[float, ...]], ...] = ()
    samples: Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(cls, value: KeptTiles | float | Sequence[float]) -> KeptTiles:
        """One number for all layers, or one per layer."""
        if isinstance(value, KeptTiles):
            return value
        return cls(tuple(value) if isinstance(value, Sequence) else (value,))

    def __str__(self) -> str:
        return str(self.layers[0] if len(self.layers) == 1 else list(self.layers))

    @property
    def count(self) -> int:
        """The count of one layer; the largest where samples differ."""
        return cast(int, self.layers[0])

    @property
    def number(self) -> float | list[float]:
        """Plain value for a record: one number if all layers have the same, else one per layer."""
        return self.layers[0] if len(set(self.layers)) == 1 else list(self.layers)

    @property
    def changes(self) -> bool:
        """Whether the numbers change during a denoising."""
        return bool(self.ranges or self.steps)

    def at(self, progress: float, step: int | None = None) -> KeptTiles:
        """The numbers at a denoising step and progress; without a step only the ranges apply."""
        if (i := last_from([start for start, _ in self.steps], step)) is not None:
            return KeptTiles(self.steps[i][1])
        inside = (layers for start, stop, layers in self.ranges if start <= progress < stop)
        return KeptTiles(next(inside, self.layers))

    def at_timesteps(self, timestep: Tensor, num_layers: int) -> KeptTiles:
        """The numbers of training samples, which have no step, without waiting for the device.

        Args:
            timestep: `[B]`, or `[B, 2]` or `[B, L]` of which the highest counts (condition tokens have 0).
            num_layers: number of layers of the model.
        """
        if not self.ranges:
            return KeptTiles(self.layers)
        highest = timestep if timestep.dim() == 1 else timestep.amax(1)
        progress = (1000 - highest.double()) / 1000
        which = torch.full_like(highest, len(self.ranges), dtype=torch.int64)
        for i, (start, stop, _) in enumerate(self.ranges):
            which = which.masked_fill((progress >= start) & (progress < stop), i)
        largest = self.largest()
        # raises for another number of layers
        largest.by_layer(num_layers)
        return replace(largest, samples=_table(self, num_layers, timestep.device)[:, which])

    def largest(self) -> KeptTiles:
        """The largest number of each layer over the samples of a training."""
        return KeptTiles(tuple(map(max, self._by_range)))

    def expected(self, share: Callable[[float, float], float]) -> KeptTiles:
        """Mean over the samples of a training.

        Args:
            share: share of the samples whose denoising progress is between two values.
        """
        if not self.ranges:
            return KeptTiles(self.layers)
        shares = [share(start, stop) for start, stop, _ in self.ranges]
        weights = (*shares, 1 - sum(shares))
        return KeptTiles(tuple(math.fsum(map(mul, weights, numbers)) for numbers in self._by_range))

    def by_layer(self, num_layers: int) -> tuple[float, ...]:
        """One number per layer of a model; ValueError for another number of layers or a number below 1."""
        numbers = self.layers * num_layers if len(self.layers) == 1 else self.layers
        if len(numbers) != num_layers or min(numbers) < 1:
            raise ValueError(f"topk must be at least 1, one int or one per layer ({num_layers}), got {self}")
        return numbers

    def map(self, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> KeptTiles:
        """Other numbers in the same ranges and steps."""
        return KeptTiles(
            change(self.layers),
            ranges=tuple((start, stop, change(layers)) for start, stop, layers in self.ranges),
            steps=tuple((step, change(layers)) for step, layers in self.steps),
        )

    def layer(self, index: int) -> KeptTiles:
        """The count of one layer."""
        number = self.layers[0 if len(self.layers) == 1 else index]
        return KeptTiles((number,), samples=None if self.samples is None else self.samples[index])

    def less(self, tiles: int, *, all_tiles: int | None = None) -> KeptTiles:
        """The count of one layer reduced by a number of tiles, to at least 1; a count of `all_tiles` or more stays."""
        samples, count = self.samples, self.count
        if samples is not None:
            less = (samples - tiles).clamp(min=1)
            samples = less if all_tiles is None else torch.where(samples < all_tiles, less, samples)
        stays = all_tiles is not None and count >= all_tiles
        return KeptTiles((count if stays else max(1, count - tiles),), samples=samples)

    def mean(self, num_tiles: int) -> float:
        """Mean over the layers, of which none keeps more than N tiles."""
        return sum(min(k, num_tiles) for k in self.layers) / len(self.layers)

    @property
    def _by_range(self) -> list[tuple[float, ...]]:
        """For each layer its number in every range, then outside of all of them."""
        rows = [*(layers for _, _, layers in self.ranges), self.layers]
        most = max(map(len, rows))
        return list(zip(*(row * most if len(row) == 1 else row for row in rows), strict=True))


def last_from(starts: Sequence[int], step: int | None) -> int | None:
    """Index of the last of the ascending starts at or before a step; None without such a start or without a step."""
    return None if step is None else max((i for i, start in enumerate(starts) if start <= step), default=None)


def exact(name: str, value: float | str) -> Fraction:
    """The exact decimal number of an option called `name`, as it is written."""
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not number.is_finite():
        raise ValueError(f"{name} must be a finite number, got {value}")
    return Fraction(number)


@lru_cache(maxsize=64)
def _table(topk: KeptTiles, num_layers: int, device: torch.device) -> Tensor:
    """int32 `[layers, ranges + 1]`, cached, because a copy to the device in every step would wait for the device."""
    return torch.tensor(topk._by_range, dtype=torch.int32).expand(num_layers, -1).contiguous().to(device)
