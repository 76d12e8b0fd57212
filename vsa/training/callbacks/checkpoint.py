"""Checkpoints of a run: when they are written, and how a signal ends a run without losing a step."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.checkpoints.retention import FEWEST, prune_checkpoints
from vsa.checkpoints.run_checkpoint import Checkpoint, list_checkpoints, read_together, step_of, write_parts
from vsa.checkpoints.tensor_parts import Parts, own_parts
from vsa.errors import NO_ROOM
from vsa.files import remove_folder
from vsa.settings import AtLeastOne, Bound, Count, validated
from vsa.signals import Handler, StopNow, Stopped, current_handlers, is_foreign, set_handlers
from vsa.training.background_save import Save, copied
from vsa.training.deadline import DEADLINE
from vsa.training.hosts import largest
from vsa.training.lightning_compat import end_validation, stop_without_validation
from vsa.training.modules.base import DiffusionModule
from vsa.training.run_state import RunStatus, parts_of, tensors_of, values_of

_WRITTEN, _NO_ROOM, _FAILED = range(3)


@validated
class Checkpointing(L.Callback):
    """Writes a checkpoint every `every_n_steps`, at the end, and before a run stops early.

    After a signal of `vsa.signals.ENDING`, or at a deadline, a run finishes its optimizer step, skips or leaves
    validation, saves, and ends with exit status 128 + number; a second SIGINT ends it at once. After the last step
    everything is saved: a run of one process then ends at once, a run of several after sampling its clips. Before the
    first step and after the last hook, `vsa.training.ending.stopped_by_signals` handles the signals.

    Args:
        run_dir: the run folder; checkpoints are written to `run_dir/checkpoints`.
        every_n_steps: optimizer steps between checkpoints.
        keep: number of the newest good checkpoints to keep; at least 2, since the last one may be under replacement.
        requeue: whether a SLURM job is requeued after SIGUSR1, once the checkpoint is saved.
        asynchronous: whether checkpoints are written in a thread while training continues, from a copy in the memory of
            each rank; the next save and the end of the run wait for the thread, and its error ends the run at the next
            step.
        max_missed: number of consecutive saves that may fail for lack of disk space, after one retry each; the next
            failure ends the run, and so does a failure of the last save.
    """

    # after the callbacks that change the state to save
    order = 1

    def __init__(
        self,
        run_dir: str,
        every_n_steps: AtLeastOne = 1000,
        keep: Annotated[int, Bound(">=", FEWEST)] = FEWEST,
        requeue: bool = True,
        asynchronous: bool = False,
        max_missed: Count = 0,
    ):
        self.folder = Path(run_dir) / "checkpoints"
        self.every_n_steps, self.keep = every_n_steps, keep
        self.requeue, self.asynchronous = requeue, asynchronous
        self.max_missed = max_missed
        # the save of this rank; all ranks have one, or none has
        self._save: Save | None = None
        self._tried_again = False
        self._missed = 0
        # set by a callback that goes back to `last_good`
        self.keeps_regular = False
        self._status = RunStatus()
        # signal that this rank received and the others may not know of
        self._pending: int | None = None
        self._interrupts = 0
        self._handlers: Mapping[int, Handler] = {}
        # every step is done and saved
        self._complete = False
        self._alone = True
        self._saved_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self._status = pl_module.status
        if pl_module.resume is not None:
            self._saved_step, self._status.saved = trainer.global_step, pl_module.resume.path
        self._alone = trainer.world_size == 1

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: DiffusionModule, batch: Any, batch_idx: int) -> None:
        if self._status.stage == "start":
            for handler in current_handlers().values():
                if isinstance(handler, StopNow):
                    handler.check()
            self._status.stage = "steps"
            user = (signal.SIGUSR1, signal.SIGUSR2)
            handlers = current_handlers().items()
            self._handlers = {n: handler for n, handler in handlers if n not in user or not is_foreign(handler)}
            set_handlers(dict.fromkeys(self._handlers, self._stop))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise Stopped(number)
        if self._complete and self._alone:
            # clips and pictures can be created again
            self._status.received = number
            raise Stopped(number)
        if self._pending is None:
            self._pending = number
            what = "stopping after the current clips" if self._complete else "saving after this step"
            rank_zero_info(f"{signal.Signals(number).name}: {what}")

    def _agree(self, trainer: L.Trainer) -> bool:
        """Share a received signal between all ranks, so that all stop at one step with one exit status.

        Returns:
            whether the run stops.
        """
        number = max(self._pending or 0, self._status.received or 0)
        if trainer.is_global_zero and self._status.deadline is not None and not self._complete:
            number = max(number, DEADLINE * self._status.deadline.near())
        number = largest(number, trainer)
        self._status.received = number or None
        return number > 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % pl_module.accumulate:
            return
        self.finish(trainer, wait=False)
        stop = self._agree(trainer)
        if not stop and trainer.global_step % self.every_n_steps == 0:
            self.save(trainer, pl_module)
            # a signal that arrived during the save need not wait for another step
            stop = self._agree(trainer)
        if stop:
            # a stop must not wait for a validation
            stop_without_validation(trainer)
            self.save(trainer, pl_module, last=True)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: DiffusionModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._agree(trainer):
            stop_without_validation(trainer)
            end_validation()

    def on_train_end(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self.save(trainer, pl_module, last=True)
        self.finish(trainer, last=True)
        # set before the ranks agree: a later signal is handled by its own process
        self._complete = True
        self._agree(trainer)

    def save(self, trainer: L.Trainer, pl_module: DiffusionModule, *, last: bool = False) -> None:
        """Write the checkpoint of the current step unless it exists; the last one of a run may not fail."""
        if trainer.global_step == self._saved_step:
            return
        start = time.perf_counter()
        with self._status.paused():
            self._write(trainer, pl_module, last=last)
        if self._status.deadline is not None:
            self._status.deadline.saved(time.perf_counter() - start)

    def last_good(self, trainer: L.Trainer, step: int) -> Checkpoint | None:
        """The newest intact checkpoint of at most `step` steps; a collective operation.

        Those that a signal wrote do not count, so that a run without the signal chooses the same one.
        """
        self.finish(trainer)
        steps = range(0, step + 1, self.every_n_steps)
        paths = [str(path) for path in reversed(list_checkpoints(self.folder)) if step_of(path) in steps]
        for path in trainer.strategy.broadcast(paths):
            try:
                return read_together(path)
            except ValueError as error:
                rank_zero_info(f"skipped a damaged checkpoint: {error}")
        return None

    def go_back(self, trainer: L.Trainer, checkpoint: Checkpoint) -> None:
        """Continue from an earlier checkpoint of the run: remove all later ones."""
        self._saved_step, self._status.saved = checkpoint.step, checkpoint.path
        if trainer.is_global_zero:
            for abandoned in list_checkpoints(self.folder):
                if step_of(abandoned) > checkpoint.step:
                    remove_folder(abandoned)

    def _write(self, trainer: L.Trainer, pl_module: DiffusionModule, *, last: bool) -> None:
        parts, together = parts_of(trainer), trainer.world_size > 1
        # collective operations: every rank takes part, even if it cannot write
        state = {**pl_module.record(), **values_of(parts)}
        # metrics are written before the checkpoint; rows that cannot be written are lost
        pl_module.log_lines.save()
        # at most one copy in memory
        self.finish(trainer)
        tensors = own_parts(tensors_of(parts), trainer.global_rank, trainer.world_size)
        if self.asynchronous:
            tensors, state = copied(tensors), deepcopy(state)
        self._saved_step, self._tried_again = state["step"], False
        write = partial(self._write_and_prune, tensors, state, together=together, prunes=trainer.is_global_zero)
        self._save = Save(write, background=self.asynchronous)
        if not self.asynchronous:
            self.finish(trainer, last=last)

    def _write_and_prune(self, tensors: Parts, state: Mapping[str, Any], *, together: bool, prunes: bool) -> Path:
        path = write_parts(self.folder, tensors, state, together=together)
        if prunes:
            prune_checkpoints(self.folder, path, self.keep, self.every_n_steps if self.keeps_regular else None)
        return path

    def finish(self, trainer: L.Trainer, *, wait: bool = True, last: bool = False) -> None:
        """Handle the result of the pending save, if any; a save without disk space is retried once.

        Args:
            trainer: trainer of the run.
            wait: whether to wait for a save in progress, instead of leaving it for a later call.
            last: whether no other save follows.
        """
        while (save := self._save) is not None:
            if not wait and largest(save.is_running, trainer):
                return
            self._save, failure = None, None
            try:
                path = save.result()
            except Exception as error:
                failure = error
            outcome = self._agree_on(trainer, failure)
            if outcome == _WRITTEN:
                self._status.saved, self._missed = path, 0
                if self.asynchronous and self._status.deadline is not None:
                    self._status.deadline.save_takes(save.seconds)
            elif outcome == _FAILED or (self._tried_again and (last or self._missed >= self.max_missed)):
                raise failure or OSError("another rank could not write the checkpoint")
            elif self._tried_again:
                self._missed, self._saved_step = self._missed + 1, -1
                setting = f"callbacks.checkpoint.max_missed={self.max_missed}"
                rank_zero_info(f"{failure}: training continues without it ({self._missed} in a row, {setting})")
            else:
                rank_zero_info(f"{failure}: trying once more")
                if trainer.is_global_zero:
                    # what may be deleted before a new checkpoint is complete
                    with suppress(OSError):
                        prune_checkpoints(self.folder, None, max(FEWEST, self.keep - 1))
                self._save, self._tried_again = save.again(), True

    def _agree_on(self, trainer: L.Trainer, failure: Exception | None) -> int:
        """Outcome of a save over all ranks: the worst one."""
        own = _WRITTEN
        if failure is not None:
            own = _NO_ROOM if isinstance(failure, OSError) and failure.errno in NO_ROOM else _FAILED
        return largest(own, trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # the writer must be done before the run folder is released; the error that ended the run is reported, not its
        # own
        if self._save is not None:
            self._save.join()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # a signal that arrived while clips were sampled
        self._agree(trainer)
        # a launcher ends all ranks when one exits with its own status, but rank 0 may still be drawing
        trainer.strategy.barrier("end")
        self._status.stage = "end"
        set_handlers(self._handlers)
