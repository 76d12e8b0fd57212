"""A validation that a signal, a time limit, an error or a kill interrupted."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.training.lightning_compat import validate_now, validates_at_start
from vsa.training.metrics_csv import MetricsCSV
from vsa.training.modules.base import DiffusionModule


class MissedValidation(L.Callback):
    """Validates first in a resumed run whose checkpoint was to be validated and is not.

    A checkpoint is saved before the validation of its step, so the validation may be missing in `metrics.csv`. The
    validation is a function of weights and step, so its metrics are those of a run without interruption.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        if pl_module.resume is None or not validates_at_start(trainer, last=pl_module.validates_last):
            return
        step = trainer.global_step
        is_logged = any(isinstance(logger, MetricsCSV) and logger.has_validation(step) for logger in trainer.loggers)
        # only rank 0 reads the file
        if not trainer.strategy.broadcast(is_logged):
            rank_zero_info(f"validating step {step} first: its validation is missing")
            validate_now(trainer)
