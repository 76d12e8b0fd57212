"""The current activity of a rank, for the watch, and the time of its steps."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import lightning as L

from vsa.training.modules.base import DiffusionModule
from vsa.training.watch import RankMonitor


class Steps(L.Callback):
    """Reports every step to the watch, after all other callbacks.

    Args:
        watch: watch of this rank.
    """

    def __init__(self, watch: RankMonitor):
        self._watch = watch
        self._began = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: DiffusionModule, batch: Any, batch_idx: int) -> None:
        self._watch.begins(f"step {trainer.global_step + 1}")
        if not self._began:
            self._began = perf_counter() - pl_module.status.paused_seconds

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.status.trained_seconds = perf_counter() - pl_module.status.paused_seconds - self._began
        self._watch.begins(f"the data of step {trainer.global_step + 1}", stepped=True)
