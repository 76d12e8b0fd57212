"""All uses of Lightning's private interface: only this file can break with a new version of Lightning."""

from __future__ import annotations

import subprocess
import threading
from typing import Any, NoReturn

import lightning as L
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _call_callback_hooks
from torch.distributed.device_mesh import DeviceMesh


def set_step(trainer: L.Trainer, step: int) -> None:
    """Set the number of completed optimizer steps, which Lightning counts by the calls of every optimizer."""
    total: Any = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    total.ready = total.completed = step


def continue_after(trainer: L.Trainer, step: int) -> None:
    """Set `fit` to continue after `step` optimizer steps; the public way to resume reads a pickled checkpoint."""
    set_step(trainer, step)
    loop = trainer.fit_loop.epoch_loop
    batches: Any = loop.batch_progress.total
    batches.ready = batches.started = batches.processed = batches.completed = step * trainer.accumulate_grad_batches
    loop._batches_that_stepped = step


def ends_step(trainer: L.Trainer) -> bool:
    """Whether the current micro-batch is the last one of its optimizer step, or of the data."""
    return not trainer.fit_loop._should_accumulate()


def call_callbacks(trainer: L.Trainer, hook: str, *arguments: Any) -> None:
    """Call a hook of all callbacks at its place in a step that the module makes itself."""
    _call_callback_hooks(trainer, hook, *arguments)


def restart_data(trainer: L.Trainer) -> None:
    """Make the next epoch request a new loader from the data module."""
    trainer.fit_loop._combined_loader = None


def validate_before_stopping(trainer: L.Trainer) -> None:
    """Validate after the current step, the last one; by default `fit` validates at its interval only."""
    trainer.should_stop = True


def validates_at_start(trainer: L.Trainer, *, last: bool) -> bool:
    """Whether `fit` validates after the step that it continues from.

    Args:
        trainer: trainer of the run.
        last: whether the run validates after its last step, whatever its interval.
    """
    # `val_check_batch` is not set where no steps are left
    loop, interval = trainer.fit_loop.epoch_loop, trainer.val_check_interval
    batches = trainer.global_step * trainer.accumulate_grad_batches
    due = (last and trainer.global_step == trainer.max_steps) or (isinstance(interval, int) and batches % interval == 0)
    return bool(loop._should_check_val_epoch() and batches > 0 and due)


def fit_without_steps(trainer: L.Trainer) -> None:
    """Let `fit` call the hooks around the training of a run that has made all of its steps, which it would skip."""
    loop: Any = trainer.fit_loop
    loop.__class__ = type("WithoutSteps", (type(loop),), {"skip": False})


def validate_now(trainer: L.Trainer) -> None:
    """Validate between two steps of `fit`."""
    connector = trainer._logger_connector
    first = connector._first_loop_iter
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True
    connector._first_loop_iter = first


def keep_signals(trainer: L.Trainer) -> None:
    """Keep the current signal handlers: Lightning's handler of SIGTERM would wait for the other ranks.

    With several ranks, rank 0 would also tell the others before every micro-batch whether that handler has received a
    signal, and all hosts would wait until their GPUs are idle.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def tear_down_unread_data(trainer: L.Trainer) -> None:
    """Let `fit` end with the error or signal that interrupted the start of a loader.

    Lightning's teardown asks such a loader for its length, which is an error of its own and hides the first one.
    """
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        _tear_down_unread(loop)


def _tear_down_unread(loop: Any) -> None:
    whole = loop.teardown

    def teardown() -> None:
        fetcher = loop._data_fetcher
        if fetcher is not None and fetcher._combined_loader is not None and fetcher._combined_loader._iterator is None:
            loop._data_fetcher = None
        whole()

    loop.teardown = teardown


def end_validation() -> NoReturn:
    """End a validation after the previous batch; all ranks must call it at the same batch."""
    # the validation loop ends where its batches end
    raise StopIteration


def stop_without_validation(trainer: L.Trainer) -> None:
    """End `fit` after the current step, without the validation that Lightning would run first."""
    trainer.should_stop = True
    trainer.limit_val_batches = 0


def attach_loggers(trainer: L.Trainer, loggers: list[Any]) -> None:
    """Attach loggers after construction: in the constructor, some would create files before all checks have passed."""
    trainer.loggers = loggers


def use_profiler(trainer: L.Trainer, profiler: Profiler) -> None:
    """Set the profiler of a trainer after construction, from a callback."""
    trainer.profiler = profiler  # type: ignore[attr-defined]


def close_bars(bar: TQDMProgressBar, done: int) -> None:
    """Close the bars of a run that failed after `done` batches; open bars would be redrawn below the message."""
    if bar._train_progress_bar is not None:
        bar._train_progress_bar.n = done
    for each in (bar._val_progress_bar, bar._train_progress_bar):
        if each is not None:
            each.close()


def stop_watching() -> None:
    """Stop Lightning's observer of child processes, which would kill this process when a child fails."""
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            # its thread ends once the list of children is empty
            thread._child_processes = []


class MeshStrategy(ModelParallelStrategy):
    """Strategy of modules that shard their networks, over a mesh that a subclass creates."""

    def make_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, after the process group is initialised."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        # replaces the setup of the base class, which would create its own mesh
        self._setup_distributed()
        self._device_mesh = self.make_mesh()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def started(self) -> list[subprocess.Popen[bytes]]:
        """The processes that this one started as ranks."""
        return self._launcher.procs if isinstance(self._launcher, _SubprocessScriptLauncher) else []

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one started: they fail for the same reason or wait for this one forever."""
        stop_watching()
        for process in self.started:
            process.kill()
