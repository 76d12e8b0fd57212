"""The current activity of a rank, for the watch."""

from __future__ import annotations

from typing import Any

import lightning as L

from vsa.training.modules.base import DiffusionModule
from vsa.training.watch import Watch


class Steps(L.Callback):
    """Reports every step to the watch, after all other callbacks.

    Args:
        watch: watch of this rank.
    """

    def __init__(self, watch: Watch):
        self._watch = watch

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: DiffusionModule, batch: Any, batch_idx: int) -> None:
        self._watch.begins(f"step {trainer.global_step + 1}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._watch.begins(f"the data of step {trainer.global_step + 1}", stepped=True)
