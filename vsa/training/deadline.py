"""Deadline of a run, which stops early enough to complete its last checkpoint."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

DEADLINE = 1 << 10
"""Replaces the number of a signal when the time is up."""

SCHEDULER = "SLURM_JOB_END_TIME"
"""Environment variable in which SLURM gives the end time of a job, in seconds since the epoch."""

_LEAST_SECONDS, _LEAST_SHARE = 60.0, 0.1
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


class Deadline:
    """Compares the time with the deadline after every step.

    The margin is the longest interval between two checks (a step, with sampling or validation if any) plus the longest
    save, of those measured so far. It is at least a minute, or a tenth of the total time if that is shorter.

    Args:
        seconds: time from now to the deadline.
        name: name of its setting, for the message.
        own: whether the run sets the deadline itself, and not a scheduler.
        clock: current time in seconds.
    """

    def __init__(self, seconds: float, name: str, *, own: bool = True, clock: Callable[[], float] = time.monotonic):
        self.name, self.own, self._clock = name, own, clock
        self._looked = clock()
        self.end = self._looked + seconds
        self._least = min(_LEAST_SECONDS, _LEAST_SHARE * seconds)
        self._looks, self._stretch, self._save = 0, 0.0, 0.0

    @property
    def margin(self) -> float:
        """Seconds before the deadline at which to stop."""
        return max(self._least, self._stretch + self._save)

    def near(self) -> bool:
        """Whether to stop now; called after every step."""
        now = self._clock()
        stretch, self._looked = now - self._looked, now
        # the first interval includes compilation and the start of workers, so the second one replaces it
        self._stretch = stretch if self._looks < 2 else max(self._stretch, stretch)
        self._looks += 1
        return now + self.margin >= self.end

    def saved(self, seconds: float) -> None:
        """Record the duration of a save that training waited for, which the interval excludes."""
        self.save_takes(seconds)
        self._looked += seconds

    def save_takes(self, seconds: float) -> None:
        """Record the duration of a save that training did not wait for."""
        self._save = max(self._save, seconds)


def deadline_of(max_time: Any, environment: Mapping[str, str]) -> Deadline | None:
    """The earlier of a run's own deadline and its scheduler's; None without either.

    Args:
        max_time: `trainer.max_time`.
        environment: environment variables of the process.
    """
    ends = [] if max_time is None else [Deadline(_seconds(max_time), f"trainer.max_time={max_time}")]
    if environment.get(SCHEDULER, "").isdecimal():
        remaining_seconds = float(environment[SCHEDULER]) - time.time()
        ends.append(Deadline(remaining_seconds, f"{SCHEDULER}={environment[SCHEDULER]}", own=False))
    return min(ends, key=lambda deadline: deadline.end, default=None)


def _seconds(max_time: Any) -> float:
    """Seconds of a time in a format of Lightning's trainer: DD:HH:MM:SS, a mapping of units, or a timedelta."""
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
