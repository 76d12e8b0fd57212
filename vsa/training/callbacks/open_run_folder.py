"""The first write of a run to its folder."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.checkpoints.run_folder import RunFolder
from vsa.checkpoints.run_history import note_start
from vsa.machine import environment
from vsa.training.display import tolerate
from vsa.training.lightning_compat import attach_loggers
from vsa.training.metrics_csv import MetricsCSV
from vsa.training.modules.base import DiffusionModule
from vsa.training.run_state import BACKEND, LEVEL


class OpenRunFolder(L.Callback):
    """Opens the run folder when training starts, and makes it permanent after the first optimizer step.

    By then almost every check has passed; an error before the first step leaves an existing run unchanged.

    Args:
        folder: the run folder.
        config: content of its `config.yaml`.
        overwrite: whether the run in the folder is set aside first.
        loggers: loggers of the run; they create their files here, so that their errors appear at the start.
    """

    def __init__(self, folder: RunFolder, config: str, loggers: list[Any], *, overwrite: bool):
        self._folder, self._config, self._overwrite = folder, config, overwrite
        self._loggers = loggers
        self._first = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self._first = trainer.global_step
        if trainer.is_global_zero:
            resume = None if pl_module.resume is None else pl_module.resume.path
            aside = self._folder.open(self._config, overwrite=self._overwrite, resume=resume)
            if aside is not None:
                rank_zero_info(f"continuing from {resume}: the later checkpoints were moved to {aside}")
            level = pl_module.parallel.level
            here = {**environment(pl_module.device), "processes": trainer.world_size, LEVEL: level}
            here[BACKEND] = pl_module.model.attention_backend
            if changes := note_start(self._folder.path, step=trainer.global_step, environment=here):
                rank_zero_info(
                    f"since the last start: {', '.join(changes)}; numbers may differ from those of one start"
                )
        attach_loggers(trainer, self._loggers)
        for logger in self._loggers:
            if isinstance(logger, MetricsCSV):
                logger.open()
            else:
                getattr(logger, "experiment", None)
                tolerate(logger)

    def on_train_end(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        # a run that had made all of its steps before
        self._folder.keep()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._first:
            for aside in self._folder.keep():
                rank_zero_info(f"the run that was in {self._folder.path} is in {aside} now")
