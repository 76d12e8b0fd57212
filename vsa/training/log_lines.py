"""Metrics of steps on their way to the loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from torch import Tensor

from vsa.transfer import PendingCopy

Metrics = Mapping[str, Tensor | float] | Callable[[], Mapping[str, float]]
"""Metrics by name, whose tensors may still be computed, or a function that returns them once they are known."""


class LogLines:
    """Metrics that are not written yet, in the order of their steps.

    To read a metric the host would wait for the device, and afterwards the device for the host. The metrics of a step
    are therefore written while the device works on the next one.

    Args:
        module: module whose trainer has the loggers.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._waiting: list[tuple[int, Callable[[], Mapping[str, float]]]] = []

    def due(self, step: int) -> bool:
        """Whether optimizer step `step` (counted from 1 when complete) has metrics."""
        trainer: Any = self._module.trainer
        return step % trainer.log_every_n_steps == 0 or step == trainer.max_steps

    def add(self, metrics: Metrics, step: int) -> None:
        """Add metrics of a completed optimizer step; copies of tensors begin, and nothing waits until `write`."""
        if callable(metrics):
            self._waiting.append((step, metrics))
            return
        arriving = {k: PendingCopy.of(value) if isinstance(value, Tensor) else value for k, value in metrics.items()}
        self._waiting.append(
            (step, lambda: {k: float(v.read() if isinstance(v, PendingCopy) else v) for k, v in arriving.items()})
        )

    def write(self) -> None:
        """Give the loggers everything, after waiting for what has not arrived."""
        trainer = self._module.trainer
        while self._waiting:
            # an error ends the run, which writes the others then
            step, metrics = self._waiting.pop(0)
            values = dict(metrics())
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(values, step)

    def save(self) -> None:
        """Let the loggers write everything to their files."""
        self.write()
        trainer = self._module.trainer
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.save()

    def drop(self) -> None:
        """Forget everything: the steps are undone."""
        self._waiting.clear()
