"""A progress bar that is redrawn at time intervals instead of step intervals."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from vsa.settings import Positive, validated
from vsa.training.lightning_compat import close_bars


@validated
class TimedProgressBar(TQDMProgressBar):
    """Lightning's bar, redrawn at the end of the first step that ends `seconds` or more after the last redraw.

    Args:
        seconds: time between two redraws on a terminal.
        log_seconds: time between two redraws if the output is not a terminal, where every redraw adds a line.
    """

    def __init__(self, seconds: Positive = 0.2, log_seconds: Positive = 30.0):
        # the base class calls its hooks at every step; `_due` limits the redraws
        super().__init__(refresh_rate=1)
        self._seconds = seconds if sys.stdout.isatty() else log_seconds
        self._redrawn = -math.inf
        self._done = 0

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._redrawn < self._seconds:
            return False
        self._redrawn = now
        return True

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        if trainer.max_steps < 0:
            # without max_steps the length of the data is not the length of the run
            self.train_progress_bar.total = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done = batch_idx + 1
        if self._due():
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._due():
            super().on_validation_batch_end(*args, **kwargs)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # counts the steps since the last redraw; the base class draws
        self.train_progress_bar.n = self._done
        super().on_train_epoch_end(trainer, pl_module)

    def show_compiling(self, compiling: bool) -> None:
        """Show "Compiling" in front of the bar while the model is being compiled, else the epoch."""
        self.train_progress_bar.set_description("Compiling" if compiling else f"Epoch {self.trainer.current_epoch}")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        close_bars(self, self._done)
