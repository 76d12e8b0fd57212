"""When a run has to stop by itself so that its last checkpoint is whole."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

DEADLINE = 1 << 10
"""Stands in the place of a signal's number where time is up."""

SCHEDULER = "SLURM_JOB_END_TIME"
"""Where SLURM says when a job will be killed, in seconds since 1970."""

_LEAST_SECONDS, _LEAST_SHARE = 60.0, 0.1
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


class Deadline:
    """Looks at the clock after every step.

    The margin is the longest stretch between two looks (a step and what may stand between two, as clips) and the
    longest save, of those measured so far: the next ones may take as long. It is at least a minute, or a tenth of the
    time where that is less.

    Args:
        seconds: from now.
        name: of what sets it, for the message.
        own: it is the run's own, not that of a scheduler.
        clock: seconds.
    """

    def __init__(self, seconds: float, name: str, *, own: bool = True, clock: Callable[[], float] = time.monotonic):
        self.name, self.own, self._clock = name, own, clock
        self._looked = clock()
        self.end = self._looked + seconds
        self._least = min(_LEAST_SECONDS, _LEAST_SHARE * seconds)
        self._looks, self._stretch, self._save = 0, 0.0, 0.0

    @property
    def margin(self) -> float:
        """Seconds before the end at which to stop."""
        return max(self._least, self._stretch + self._save)

    def near(self) -> bool:
        """Whether to stop now; asked after every step."""
        now = self._clock()
        stretch, self._looked = now - self._looked, now
        # the first one compiles and starts workers: from the second on it counts no more
        self._stretch = stretch if self._looks < 2 else max(self._stretch, stretch)
        self._looks += 1
        return now + self.margin >= self.end

    def saved(self, seconds: float) -> None:
        """Note how long a save took, which is no part of a stretch."""
        self.save_takes(seconds)
        self._looked += seconds

    def save_takes(self, seconds: float) -> None:
        """Note how long a save takes that training did not wait for."""
        self._save = max(self._save, seconds)


def deadline_of(max_time: Any, environment: Mapping[str, str]) -> Deadline | None:
    """The earlier one of a run's own deadline and its scheduler's; None: there is neither.

    Args:
        max_time: `trainer.max_time`.
        environment: of the process.

    Raises:
        ValueError: no time that can be meant.
    """
    ends = [] if max_time is None else [Deadline(_seconds(max_time), f"trainer.max_time={max_time}")]
    if environment.get(SCHEDULER, "").isdecimal():
        left = float(environment[SCHEDULER]) - time.time()
        ends.append(Deadline(left, f"{SCHEDULER}={environment[SCHEDULER]}", own=False))
    return min(ends, key=lambda deadline: deadline.end, default=None)


def _seconds(max_time: Any) -> float:
    """Seconds of what Lightning's trainer takes: DD:HH:MM:SS, a mapping of units, or a timedelta."""
    if hasattr(max_time, "total_seconds"):
        seconds = max_time.total_seconds()
    elif isinstance(max_time, Mapping) and max_time and set(max_time) <= set(_UNITS):
        seconds = sum(_UNITS[unit] * count for unit, count in max_time.items())
    elif isinstance(max_time, str) and re.fullmatch(r"\d+(:\d\d?){3}", max_time):
        seconds = sum(u * int(count) for u, count in zip(_UNITS.values(), max_time.split(":"), strict=True))
    else:
        seconds = 0
    if seconds <= 0:
        raise ValueError(f"trainer.max_time={max_time}: expected days, hours, minutes and seconds, as 00:12:00:00")
    return float(seconds)
