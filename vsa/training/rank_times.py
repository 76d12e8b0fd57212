"""Detection of stragglers: the step time of each rank, without the time that it waits for others."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.training.hosts import hosts_of

STRAGGLER_STEPS = 50
STRAGGLER_SHARE = 0.2


class CollectiveClock:
    """Measures the seconds that the main thread spends in collectives, within its context.

    On CUDA, collectives return at once, so that only host time is measured.
    """

    # functions that FSDP2 and the reductions of its copies call, under the names of older and newer torch
    NAMES = (
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    )

    def __init__(self) -> None:
        self.seconds = 0.0
        self._main = threading.get_ident()
        self._within = False
        self._before: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> CollectiveClock:
        for name in self.NAMES:
            if hasattr(dist, name):
                self._before[name] = getattr(dist, name)
                setattr(dist, name, self._timed(self._before[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within or threading.get_ident() != self._main:
                return function(*args, **kwargs)
            start, self._within = time.perf_counter(), True
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._within = False

        return timed


class RankTimes:
    """Step times of this rank, which all ranks exchange at the logging interval.

    Args:
        clock: clock of the collectives.
        now: seconds of training; this clock stops during pauses.
    """

    def __init__(self, clock: CollectiveClock, now: Callable[[], float]):
        self._clock, self._now = clock, now
        self._fetching: float | None = now()
        self._waited_before = clock.seconds
        self._began: float | None = None
        self._waited = 0.0
        self._data = self._own = 0.0
        # (computation, data) seconds of the steps since the last log line
        self._steps: list[tuple[float, float]] = []
        self._last: deque[float] = deque(maxlen=STRAGGLER_STEPS)

    def begins(self) -> None:
        """Record that the micro-batch has arrived."""
        self._began, self._waited = self._now(), self._clock.seconds
        if self._fetching is not None:
            self._data += self._began - self._fetching - (self._waited - self._waited_before)
            self._fetching = None

    def computed(self) -> None:
        """Record the end of forward and backward; what follows takes equally long on all ranks."""
        if self._began is not None:
            self._own += self._now() - self._began - (self._clock.seconds - self._waited)
            self._began = None

    def ends(self, step: bool) -> None:
        """Record the end of a micro-batch, and of a step if `step` is true."""
        self.computed()
        if step:
            self._steps.append((self._own, self._data))
            self._last.append(self._own + self._data)
            self._data = self._own = 0.0

    def waits(self) -> None:
        """Record the start of fetching the next micro-batch."""
        self._fetching, self._waited_before = self._now(), self._clock.seconds

    def metrics(self, trainer: L.Trainer) -> dict[str, float]:
        """Means by rank since the last call; a collective operation, which also reports a straggler."""
        full = len(self._last) == STRAGGLER_STEPS
        own, data = (sum(column) / len(self._steps) for column in zip(*self._steps, strict=True))
        table = torch.zeros(trainer.world_size, 3, dtype=torch.float64, device="cpu")
        row = [own, data, statistics.median(self._last) if full else 0.0]
        table[trainer.global_rank] = table.new_tensor(row)
        dist.all_reduce(table, group=hosts_of(trainer.strategy))
        rows = table.tolist()
        self._steps.clear()
        if full:
            self._last.clear()
            if line := straggler_line([whole for _, _, whole in rows], [data for _, data, _ in rows]):
                rank_zero_info(line)
        metrics = {}
        for rank, (own, data, _) in enumerate(rows):
            metrics |= {f"ranks/step_seconds_{rank}": own, f"ranks/data_seconds_{rank}": data}
        return metrics


def straggler_line(seconds: list[float], data: list[float]) -> str | None:
    """Message about the slowest rank; None if it is not far enough behind the others.

    Args:
        seconds: median step time without waiting for others, by rank.
        data: mean time per step spent waiting for data, by rank.
    """
    rank = max(range(len(seconds)), key=lambda r: seconds[r])
    others = statistics.median(seconds[:rank] + seconds[rank + 1 :])
    if seconds[rank] < (1 + STRAGGLER_SHARE) * others:
        return None
    return (
        f"rank {rank} is {seconds[rank] / others - 1:.0%} behind the others over {STRAGGLER_STEPS} steps: "
        f"{seconds[rank]:.3g} s a step, the others {others:.3g} s; {data[rank]:.3g} s of it for its data"
    )
