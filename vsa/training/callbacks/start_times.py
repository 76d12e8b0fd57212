"""Time from the start of the process to the end of the first optimizer step, by part."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.machine import process_start
from vsa.training.callbacks.progress import TimedProgressBar


class StartTimes(L.Callback):
    """Prints one line after the first optimizer step: the seconds since the process began, by part.

    The parts are imports (with the settings), data (checks, rendering, indexes), weights (building, loading and
    sharding the networks), the first batch (loaders, a resumed state) and the step itself, with the shares of
    `torch.compile` and of Triton compilation. During `torch.compile` the progress bar says "Compiling".
    """

    def __init__(self) -> None:
        self._began = process_start()
        self._parts: dict[str, float] = {}
        self._last = self._began
        self._first = 0
        self._waits = True
        self._compiling = _CompileTimes(self._show)
        self._bar: Any = None
        self._mark("imports")

    def _mark(self, part: str) -> None:
        now = time.time()
        self._parts[part] = now - self._last
        self._last = now

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._waits:
            self._mark("data")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._waits:
            self._mark("weights")
            self._bar = trainer.progress_bar_callback
            self._compiling.listen()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if "first batch" not in self._parts:
            self._mark("first batch")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._waits or trainer.global_step == self._first:
            return
        self._mark("step")
        self._close()
        rank_zero_info(start_line(self._parts, self._compiling.seconds))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        self._waits = False
        self._compiling.stop()

    def _show(self, compiling: bool) -> None:
        if isinstance(self._bar, TimedProgressBar):
            self._bar.show_compiling(compiling)


class _CompileTimes:
    """Measures the seconds of `torch.compile` and of Triton compilation, between `listen` and `stop`.

    Args:
        show: function called with True when `torch.compile` begins and with False when it ends.

    Attributes:
        seconds: seconds by compiler.
    """

    def __init__(self, show: Any) -> None:
        self.seconds = {"torch.compile": 0.0, "Triton kernels": 0.0}
        self._show, self._since = show, 0.0
        self._handler: Any = None
        self._triton: Any = None

    def listen(self) -> None:
        # if these modules are not loaded nothing compiles, and importing them takes seconds
        if "torch._dynamo" in sys.modules:
            from torch._dynamo.callback import callback_handler

            self._handler = callback_handler
            self._handler.register_start_callback(self._starts)
            self._handler.register_end_callback(self._ends)
        if "triton" in sys.modules:
            from triton import knobs

            # another listener is not replaced
            if knobs.compilation.listener is None:
                self._triton = knobs.compilation
                self._triton.listener = self._kernel

    def stop(self) -> None:
        if self._handler is not None:
            self._handler.remove_start_callback(self._starts)
            self._handler.remove_end_callback(self._ends)
            self._handler = None
        if self._triton is not None:
            self._triton.listener = None
            self._triton = None

    def _starts(self, _: Any) -> None:
        self._since = time.perf_counter()
        self._show(True)

    def _ends(self, _: Any) -> None:
        self.seconds["torch.compile"] += time.perf_counter() - self._since
        self._show(False)

    def _kernel(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        # times are in microseconds
        self.seconds["Triton kernels"] += times.total / 1e6


def start_line(parts: dict[str, float], compiling: dict[str, float]) -> str:
    """The line that reports the start of a run.

    Args:
        parts: seconds by part, in order; the last one is the first step.
        compiling: seconds within the first step, by compiler.
    """
    words = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    compiled = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in compiling.items() if seconds >= 0.05)
    return (
        f"first step done {sum(parts.values()):.1f} s after the process began: {words}"
        f"{f' (of it {compiled})' if compiled else ''}"
    )
