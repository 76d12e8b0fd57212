"""All that we do to Lightning beside its public interface: an upgrade of it can break this file only."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import lightning as L
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.distributed.device_mesh import DeviceMesh


def set_step(trainer: L.Trainer, step: int) -> None:
    """Let `fit` go on after `step` optimizer steps; public resuming reads a pickled checkpoint."""
    loop = trainer.fit_loop.epoch_loop
    optimizer_steps = loop.automatic_optimization.optim_progress.optimizer.step.total
    optimizer_steps.ready = optimizer_steps.completed = step
    batches: Any = loop.batch_progress.total
    batches.ready = batches.started = batches.processed = batches.completed = step * trainer.accumulate_grad_batches
    loop._batches_that_stepped = step


def set_manual_step(trainer: L.Trainer, step: int) -> None:
    """The number of steps of a module that steps its own optimizers, otherwise one for each call of either."""
    total: Any = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    total.ready = total.completed = step


def restart_data(trainer: L.Trainer) -> None:
    """Let the next pass over the training data ask the data module for its loader anew."""
    trainer.fit_loop._combined_loader = None


def set_accumulation(trainer: L.Trainer, micro_batches: int) -> None:
    """Micro-batches of a step; the constructor refuses them for a module that steps its own optimizers."""
    trainer.accumulate_grad_batches = micro_batches


def around_micro_batches(trainer: L.Trainer, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Let `around` call what trains on a micro-batch: forward, backward and, with the last one of a step, the update.

    It may raise StopIteration, which ends the pass over the data; inside a module that steps its own optimizers nothing
    can, as the loop there swallows it.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    for inner in (loop.automatic_optimization, loop.manual_optimization):
        run = inner.run
        inner.run = lambda *args, run=run: around(partial(run, *args))


def validate_before_stopping(trainer: L.Trainer) -> None:
    """Validate after this step, the last one; by itself `fit` would do so at its interval only."""
    trainer.should_stop = True


def keep_signals(trainer: L.Trainer) -> None:
    """Leave the handlers of signals as they are: Lightning's own one of SIGTERM waits for the other ranks."""
    trainer._signal_connector.register_signal_handlers = lambda: None


def end_validation() -> NoReturn:
    """Leave a validation after the batch before; all ranks must, at the same batch."""
    # its loop ends where its batches do
    raise StopIteration


def stop_without_validation(trainer: L.Trainer) -> None:
    """End `fit` after this step; by itself it would validate before that."""
    trainer.should_stop = True
    trainer.limit_val_batches = 0


def attach_loggers(trainer: L.Trainer, loggers: list[Any]) -> None:
    """Use these loggers from now on; given to the constructor, some would make their files before all is checked."""
    trainer.loggers = loggers


def use_profiler(trainer: L.Trainer, profiler: Profiler) -> None:
    """Let the hooks and loops of this trainer report to a profiler; a callback cannot give it to the constructor."""
    trainer.profiler = profiler  # type: ignore[attr-defined]


def close_bars(bar: TQDMProgressBar, done: int) -> None:
    """Close the bars of a run that failed after `done` batches: left open they are drawn again after the message."""
    if bar._train_progress_bar is not None:
        bar._train_progress_bar.n = done
    for each in (bar._val_progress_bar, bar._train_progress_bar):
        if each is not None:
            each.close()


def stop_watching() -> None:
    """Let this process end on its own terms: of one whose child failed Lightning's watch makes a killed one."""
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            # it ends where no child is left
            thread._child_processes = []


class MeshStrategy(ModelParallelStrategy):
    """The strategy of modules that shard their networks, over a mesh that a subclass makes."""

    def make_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, which are connected by now."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        # in place of the base class's, which would make a mesh of its own
        self._setup_distributed()
        self._device_mesh = self.make_mesh()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def started(self) -> list[subprocess.Popen[bytes]]:
        """The processes that this one has started as ranks."""
        return self._launcher.procs if isinstance(self._launcher, _SubprocessScriptLauncher) else []

    def on_exception(self, exception: BaseException) -> None:
        """End the processes this one started: they fail for the same reason or wait for this one for ever."""
        stop_watching()
        for process in self.started:
            process.kill()
