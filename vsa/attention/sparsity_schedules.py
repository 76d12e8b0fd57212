"""Annealed sparsity schedules, from all tiles to an end value: staircase, linear, cosine, and by missed mass.

N tiles of a grid.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from vsa.attention.kept_tiles import exact
from vsa.attention.sparsity import SparsitySchedule
from vsa.settings import AtLeastOne, Count, PositiveShare, Share, validated


@validated
class StaircaseSparsity(SparsitySchedule):
    """Staircase: all tiles for `dense_steps`, then fewer tiles at once and every `interval` steps, to the end value.

    Args:
        dense_steps: optimizer steps with all tiles; the first decrease is at this step.
        interval: optimizer steps between two decreases.
        tiles: number of tiles of each decrease, the same on every grid.
        fraction: share of the grid's tiles of each decrease. Exactly one of tiles and fraction is required.
        **end: see `SparsitySchedule`.

    Source: VSA, section 2.3 and appendix C.5 (50 steps dense, then 10 tiles every 50 steps down to 32).
    """

    def __init__(
        self,
        *,
        dense_steps: Count,
        interval: AtLeastOne,
        tiles: AtLeastOne | None = None,
        fraction: PositiveShare | None = None,
        **end: Any,
    ):
        super().__init__(**end)
        if (tiles is None) == (fraction is None):
            raise ValueError(f"expected exactly one of tiles and fraction, got tiles={tiles} and fraction={fraction}")
        self._tiles, self._fraction = tiles, exact("fraction", fraction or 0)
        self._dense_steps, self._interval = dense_steps, interval

    def topk(self, step: int, num_tiles: int) -> int:
        lowered = num_tiles - self._drops(step) * self._per_drop(num_tiles)
        return max(self.target_topk(num_tiles), math.ceil(lowered))

    def _final_step(self, num_tiles: int) -> int | None:
        drops = math.ceil((num_tiles - self.target_topk(num_tiles)) / self._per_drop(num_tiles))
        return 0 if drops == 0 else self._dense_steps + (drops - 1) * self._interval

    def _per_drop(self, num_tiles: int) -> Fraction:
        return Fraction(self._tiles) if self._tiles is not None else self._fraction * num_tiles

    def _drops(self, step: int) -> int:
        """Number of decreases up to a step."""
        return 0 if step < self._dense_steps else (step - self._dense_steps) // self._interval + 1


@validated
class LinearSparsity(SparsitySchedule):
    """Linear annealing: all tiles for `dense_steps`, then a linear decrease to the end value over `total_steps`.

    Args:
        dense_steps: optimizer steps with all tiles.
        total_steps: optimizer steps of the decrease.
        **end: see `SparsitySchedule`.
    """

    def __init__(self, *, dense_steps: Count, total_steps: AtLeastOne, **end: Any):
        super().__init__(**end)
        self._dense_steps, self._total_steps = dense_steps, total_steps

    def topk(self, step: int, num_tiles: int) -> int:
        elapsed_steps = min(max(step - self._dense_steps, 0), self._total_steps)
        target = self.target_topk(num_tiles)
        return target + math.ceil((num_tiles - target) * self._left(Fraction(elapsed_steps, self._total_steps)))

    def _final_step(self, num_tiles: int) -> int:
        return 0 if self.target_topk(num_tiles) == num_tiles else self._dense_steps + self._total_steps

    def _left(self, progress: Fraction) -> Fraction:
        """Remaining share of the decrease, 1 at progress 0 and 0 at progress 1."""
        return 1 - progress


class CosineSparsity(LinearSparsity):
    """Cosine annealing: like `LinearSparsity`, but along half a cosine, which is slow at both ends."""

    def _left(self, progress: Fraction) -> Fraction:
        if progress == 1:
            return Fraction(0)
        # rounded, so that 0.7500000000000001 does not give one tile more than 0.75
        return Fraction(max(round((1 + math.cos(math.pi * progress)) / 2, 14), 1e-14))


@validated
class MissedMassSparsity(StaircaseSparsity):
    """Staircase that decreases only where a measurement allows it, and never increases.

    A measurement is the share of the true attention mass that the selected tiles miss (1 - recall), measured by the
    callback `Diagnostics`. The decreases are state and part of `state_dict`.

    Args:
        max_missed: largest measured share, in [0, 1], at which the number of tiles may decrease.
        **staircase: see `StaircaseSparsity`; `dense_steps` and `interval` are lower bounds.
    """

    measured = True

    def __init__(self, *, max_missed: Share, **staircase: Any):
        super().__init__(**staircase)
        self._max_missed = max_missed
        self._drop_steps: list[int] = []
        self._measured: list[tuple[int, float]] = []

    def observe(self, step: int, missed_share: float) -> None:
        """Process a measurement made after `step` optimizer steps; a decrease applies from training step `step` on."""
        if not 0 <= missed_share <= 1:
            raise ValueError(f"missed_share must be in [0, 1], got {missed_share}")
        if self._measured and step <= self._measured[-1][0]:
            raise ValueError(f"measurements must have ascending steps, got {step} after {self._measured[-1][0]}")
        self._measured.append((step, missed_share))
        due = self._drop_steps[-1] + self._interval if self._drop_steps else self._dense_steps
        if step >= due and missed_share <= self._max_missed:
            self._drop_steps.append(step)

    def _final_step(self, num_tiles: int) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"drop_steps": list(self._drop_steps), "measured": [list(pair) for pair in self._measured]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"drop_steps", "measured"}:
            raise ValueError(
                f"{type(self).__name__} needs its measurements, but the checkpoint holds the state of another schedule"
            )
        self._drop_steps = [int(step) for step in state["drop_steps"]]
        self._measured = [(int(step), float(missed)) for step, missed in state["measured"]]

    def _drops(self, step: int) -> int:
        return bisect_right(self._drop_steps, step)
