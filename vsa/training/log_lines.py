"""Metrics of steps on their way to the loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from vsa.transfer import PendingCopy

Metrics = Mapping[str, Tensor | float] | Callable[[], Mapping[str, float]]
"""Metrics by name, whose tensors may still be computed, or a function that returns them once they are known."""


class LogLines:
    """Metrics that are not written yet, in the order of their steps.

    To read a metric the host would wait for the device, and afterwards the device for the host. The metrics of a step
    are therefore written while the device works on the next one.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Callable[[], Mapping[str, float]]]] = []

    def add(self, metrics: Metrics, step: int) -> None:
        """Add metrics of a completed optimizer step; copies of tensors begin."""
        if callable(metrics):
            self._waiting.append((step, metrics))
            return
        arriving = {k: PendingCopy.of(value) if isinstance(value, Tensor) else value for k, value in metrics.items()}
        self._waiting.append((step, lambda: {name: _read(value) for name, value in arriving.items()}))

    def write(self, loggers: Sequence[Any]) -> None:
        """Write everything to the loggers, after waiting for what has not arrived."""
        while self._waiting:
            # an error ends the run, which writes the others then
            step, metrics = self._waiting.pop(0)
            values = dict(metrics())
            for logger in loggers:
                logger.log_metrics(values, step)

    def drop(self) -> None:
        """Forget everything: the steps are undone."""
        self._waiting.clear()


def _read(value: PendingCopy | float) -> float:
    return float(value.read() if isinstance(value, PendingCopy) else value)
