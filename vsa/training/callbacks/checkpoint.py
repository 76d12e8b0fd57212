"""When checkpoints are written, and how a signal ends a run without losing a step."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.checkpoints.run_checkpoint import (
    Checkpoint,
    list_checkpoints,
    read_checkpoint,
    step_of,
    write_checkpoint,
)
from vsa.files import remove_folder
from vsa.settings import AtLeastOne, Bound, checked
from vsa.training.lightning_compat import stop_without_validation
from vsa.training.modules.base import DiffusionModule
from vsa.training.run_state import RunStatus, parts_of, tensors_of, values_of


@checked
class Checkpointing(L.Callback):
    """Writes a checkpoint every `every_n_steps`, at the end, and when the run is asked to stop.

    SIGINT and SIGTERM finish the optimizer step in hand, save, and end the run with exit status 130 or 143; a second
    SIGINT ends it at once. After the last step all is saved: one process ends at once, several with their clips. Before
    the first step and after the last hook the signals are those of `vsa.training.ending.stopped_by_signals`.

    Args:
        run_dir: checkpoints go to `run_dir/checkpoints`.
        every_n_steps: optimizer steps between checkpoints.
        keep: newest checkpoints kept; at least 2, since the last one may be the one being replaced.
    """

    # after those that change what it saves
    order = 1

    def __init__(self, run_dir: str, every_n_steps: AtLeastOne = 1000, keep: Annotated[int, Bound(">=", 2)] = 2):
        self.folder = Path(run_dir) / "checkpoints"
        self.every_n_steps, self.keep = every_n_steps, keep
        self._status = RunStatus()
        # what this rank got and the others may not know of
        self._pending: int | None = None
        # every step is done and saved
        self._complete = False
        self._alone = True
        self._saved_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self._status = pl_module.status
        if pl_module.resume is not None:
            self._saved_step, self._status.saved = trainer.global_step, pl_module.resume.path
        self._alone = trainer.world_size == 1
        if trainer.received_sigterm:
            # it came while lightning's own handler was in place
            self._pending = signal.SIGTERM
        # not in a thread, where signals cannot be handled; lightning puts back what stood before `fit`
        with suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._pending == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._complete and self._alone:
            # clips and pictures can be made again
            self._status.received = number
            raise SystemExit(128 + number)
        self._pending = number
        what = "ending with the clips in hand" if self._complete else "saving after this step"
        rank_zero_info(f"{signal.Signals(number).name}: {what}")

    def _agree(self, trainer: L.Trainer) -> None:
        """Tell all ranks of a signal that one of them got: all stop at one step with one exit status."""
        self._status.received = self._pending
        if trainer.world_size > 1:
            number = torch.tensor(self._pending or 0, device=trainer.strategy.root_device)
            self._status.received = int(trainer.strategy.reduce(number, reduce_op="max")) or None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % pl_module.accumulate:
            return
        self._agree(trainer)
        stop = self._status.received is not None
        if stop:
            # who asked to stop may not wait for a validation
            stop_without_validation(trainer)
        if stop or trainer.global_step % self.every_n_steps == 0:
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self.save(trainer, pl_module)
        # before the ranks agree: a signal that comes later counts by itself
        self._complete = True
        self._agree(trainer)

    def save(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        """Write the checkpoint of the current step unless it stands already."""
        if trainer.global_step == self._saved_step:
            return
        self._saved_step = trainer.global_step
        with self._status.paused():
            self._write(trainer, pl_module)

    def last_good(self, trainer: L.Trainer, step: int) -> Checkpoint | None:
        """The newest whole checkpoint of at most `step` steps, which rank 0 reads for all; a collective."""
        path = trainer.strategy.broadcast(self._last_good(step) if trainer.is_global_zero else None)
        return None if path is None else read_checkpoint(path, verify=False)

    def _last_good(self, step: int) -> str | None:
        for path in reversed(list_checkpoints(self.folder)):
            if step_of(path) <= step:
                try:
                    return str(read_checkpoint(path).path)
                except (ValueError, OSError) as error:
                    rank_zero_info(f"skipped a damaged checkpoint: {error}")
        return None

    def go_back(self, trainer: L.Trainer, checkpoint: Checkpoint) -> None:
        """The run stands again where a checkpoint of it was written: those after it go."""
        self._saved_step, self._status.saved = checkpoint.step, checkpoint.path
        if trainer.is_global_zero:
            for abandoned in list_checkpoints(self.folder):
                if step_of(abandoned) > checkpoint.step:
                    remove_folder(abandoned)

    def _write(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        parts = parts_of(trainer)
        # collectives, this one and the writing: every rank makes them, whatever the disk says
        state = {**pl_module.record(), **values_of(parts)}
        failure = None
        try:
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.save()
        except OSError as error:
            failure = error
        writes = trainer.is_global_zero and failure is None
        try:
            path = write_checkpoint(self.folder, tensors_of(parts), state, writes=writes)
            if failure is None:
                self._status.saved = path
            if writes:
                for old in list_checkpoints(self.folder)[: -self.keep]:
                    remove_folder(old)
        except OSError as error:
            failure = error
        # a full disk of rank 0 must end the other ranks too, not leave them waiting
        failed = trainer.strategy.reduce_boolean_decision(failure is not None, all=False)
        if failure is not None:
            raise failure
        if failed:
            raise OSError("another rank could not write the checkpoint")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # one that came with the clips
        self._agree(trainer)
        # launchers end all ranks when one exits with a status of its own, but rank 0 may still be drawing
        trainer.strategy.barrier("end")
