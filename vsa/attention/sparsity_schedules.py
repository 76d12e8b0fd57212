"""Schedules that go from all tiles down to an end value: by steps, on a line, along a cosine, by measured loss.

N tiles of a grid.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from vsa.attention.sparsity import SparsitySchedule, exact
from vsa.settings import AtLeastOne, Count, PositiveShare, Share, checked


@checked
class StaircaseSparsity(SparsitySchedule):
    """All tiles for `dense_steps`, then a step down at once and every `interval` steps, to exactly the end value.

    Args:
        dense_steps: steps with all tiles; the first step down is at this one.
        interval: optimizer steps between two steps down.
        tiles: tiles fewer at each step down, the same count on every grid.
        fraction: share of the grid's tiles fewer at each step down. Exactly one of the two is given.
        **end: see `SparsitySchedule`.

    Raises:
        ValueError: a value out of range, both or none of tiles and fraction.

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
            raise ValueError(f"give exactly one of tiles and fraction, got tiles={tiles} and fraction={fraction}")
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
        """Steps down so far."""
        return 0 if step < self._dense_steps else (step - self._dense_steps) // self._interval + 1


@checked
class LinearSparsity(SparsitySchedule):
    """All tiles for `dense_steps`, then down in a straight line that reaches the end value `total_steps` later.

    Args:
        dense_steps: steps with all tiles.
        total_steps: optimizer steps of the way down.
        **end: see `SparsitySchedule`.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        *,
        dense_steps: Count,
        total_steps: AtLeastOne,
        **end: Any,
    ):
        super().__init__(**end)
        self._dense_steps, self._total_steps = dense_steps, total_steps

    def topk(self, step: int, num_tiles: int) -> int:
        done = min(max(step - self._dense_steps, 0), self._total_steps)
        target = self.target_topk(num_tiles)
        return target + math.ceil((num_tiles - target) * self._left(Fraction(done, self._total_steps)))

    def _final_step(self, num_tiles: int) -> int:
        return 0 if self.target_topk(num_tiles) == num_tiles else self._dense_steps + self._total_steps

    def _left(self, progress: Fraction) -> Fraction:
        """Share of the way that is still to go, 1 at progress 0 and 0 at progress 1."""
        return 1 - progress


class CosineSparsity(LinearSparsity):
    """Like `LinearSparsity` along half a cosine: slow at both ends."""

    def _left(self, progress: Fraction) -> Fraction:
        if progress == 1:
            return Fraction(0)
        # rounded, so that 0.7500000000000001 is not a tile more than 0.75
        return Fraction(max(round((1 + math.cos(math.pi * progress)) / 2, 14), 1e-14))


@checked
class MissedMassSparsity(StaircaseSparsity):
    """A staircase that goes down only where a measurement allows it, and never up.

    A measurement is the share of the true attention mass that the selected tiles miss (1 - recall), as the callback
    `Diagnostics` takes it. The steps down are state: they are in `state_dict`.

    Args:
        max_missed: a step down needs a measured share at or below this, in [0, 1].
        **staircase: see `StaircaseSparsity`; `dense_steps` and `interval` are the least.

    Raises:
        ValueError: a value out of range.
    """

    measured = True

    def __init__(self, *, max_missed: Share, **staircase: Any):
        super().__init__(**staircase)
        self._max_missed = max_missed
        self._drop_steps: list[int] = []
        self._measured: list[tuple[int, float]] = []

    def observe(self, step: int, missed_share: float) -> None:
        """Take in a measurement made after `step` optimizer steps; a step down holds from training step `step` on.

        Raises:
            ValueError: a share outside [0, 1], or a step before that of the last measurement.
        """
        if not 0 <= missed_share <= 1:
            raise ValueError(f"missed_share must be in [0, 1], got {missed_share}")
        if self._measured and step <= self._measured[-1][0]:
            raise ValueError(f"measurements go forward: step {step} after step {self._measured[-1][0]}")
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
                f"{type(self).__name__} needs its measurements, the checkpoint has the state of another schedule"
            )
        self._drop_steps = [int(step) for step in state["drop_steps"]]
        self._measured = [(int(step), float(missed)) for step, missed in state["measured"]]

    def _drops(self, step: int) -> int:
        return bisect_right(self._drop_steps, step)
