"""Metrics are written during the step after their own, so that no host waits for its device."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch

import vsa.training.run_state as run_state
import vsa.transfer as transfer
from vsa.training.callbacks.flush_metrics import FlushMetrics
from vsa.training.log_lines import LogLines
from vsa.training.metrics_csv import MetricsCSV
from vsa.training.run_state import RunStatus
from vsa.transfer import DeviceTimestamp

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Lines:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step):
        self.lines.append((step, metrics))


class Logged(L.Callback):
    """The newest step of the metrics at the end of every step, and optionally lines that are written at once."""

    def __init__(self, at_once: bool = False):
        self.at_once, self.steps = at_once, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.at_once:
            pl_module.log_lines.write()
        (logger,) = (each for each in trainer.loggers if isinstance(each, MetricsCSV))
        self.steps.append(0 if logger._open is None else int(logger._open["step"]))


class Fails(L.Callback):
    """Fails in an optimizer step, counted from 1."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step - 1:
            raise RuntimeError("it fails")


def plain(training, run: str) -> dict[int, dict[str, str]]:
    rows = training.metrics(run).items()
    return {step: {k: v for k, v in row.items() if not k.startswith("throughput/")} for step, row in rows}


def log_lines() -> tuple[LogLines, Lines]:
    logger = Lines()
    return LogLines(SimpleNamespace(trainer=SimpleNamespace(loggers=[logger], is_global_zero=True))), logger


def test_lines_are_written_in_order_and_once():
    (lines, logger), shown = log_lines(), []
    lines.add({"a": torch.tensor(1.5), "b": 2}, 1)
    lines.add(lambda: (shown.append(1), {"c": 3.0})[1], 1)
    lines.add({"a": 4.0}, 2)
    assert (logger.lines, shown) == ([], [])
    lines.write()
    assert logger.lines == [(1, {"a": 1.5, "b": 2}), (1, {"c": 3.0}), (2, {"a": 4.0})]
    lines.write()
    assert (len(logger.lines), shown) == (3, [1])
    lines.add({"a": 5.0}, 3)
    lines.drop()
    lines.write()
    assert len(logger.lines) == 3


def test_an_error_in_one_line_loses_no_other():
    def fail():
        raise FloatingPointError("too many")

    lines, logger = log_lines()
    lines.add({"a": 1.0}, 1)
    lines.add(fail, 1)
    lines.add({"b": 2.0}, 1)
    with pytest.raises(FloatingPointError):
        lines.write()
    lines.write()
    assert logger.lines == [(1, {"a": 1.0}), (1, {"b": 2.0})]


def test_a_line_is_written_in_the_next_step_and_is_the_same(training):
    settings = ("trainer.max_steps=5", "trainer.val_check_interval=3", "callbacks.checkpoint.every_n_steps=4")
    late, at_once = Logged(), Logged(at_once=True)
    training(*settings, "run=late", callbacks=(late,))
    training(*settings, "run=at_once", callbacks=(at_once,))
    # the checkpoint of step 4 writes its own line
    assert late.steps == [0, 1, 2, 0, 0]
    assert at_once.steps == [1, 2, 3, 0, 5]
    assert list(plain(training, "late")) == [1, 2, 3, 4, 5]
    assert plain(training, "late") == plain(training, "at_once")
    # every line has its own times
    assert all(float(row["throughput/step_seconds"]) > 0 for row in training.metrics("late").values())


@pytest.mark.parametrize("writes", [True, False], ids=["written", "control"])
def test_a_run_that_fails_writes_its_last_line(training, monkeypatch, writes):
    if not writes:
        monkeypatch.setattr(FlushMetrics, "on_exception", lambda *_: None)
    with pytest.raises(RuntimeError, match="it fails"):
        training("callbacks.checkpoint=null", callbacks=(Fails(4),))
    rows = training.metrics()
    assert list(rows) == ([1, 2, 3] if writes else [1, 2])
    assert all(row["train/loss"] and row["skipped_steps"] and row["throughput/step_seconds"] for row in rows.values())


def test_the_last_lines_of_one_rank_ask_no_other():
    for world in (1, 2):
        dumps: list[int] = []
        clipper = SimpleNamespace(on_drop=dumps.append)
        # reads the norm of a step that was dropped
        lines = SimpleNamespace(write=lambda it=clipper: it.on_drop and it.on_drop(3))
        module = SimpleNamespace(clippers={"model": clipper}, log_lines=lines)
        FlushMetrics().on_exception(SimpleNamespace(world_size=world), module, RuntimeError())
        assert dumps == ([3] if world == 1 else [])


class Pauses(L.Callback):
    """Lets an hour pass after every step, within a pause or not, and keeps what the file holds after a validation."""

    def __init__(self, clock: list[float], within: bool):
        self.clock, self.within, self.files = clock, within, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.files.append((Path(trainer.default_root_dir) / "metrics.csv").read_text())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with pl_module.status.paused() if self.within else nullcontext():
            self.clock[0] += 3600


@pytest.mark.parametrize("within", [True, False], ids=["pauses", "control"])
def test_times_of_steps_are_without_pauses(training, monkeypatch, within):
    clock = [0.0]
    for module in (transfer, run_state):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0] + time.perf_counter())
    callback = Pauses(clock, within)
    trainer = training("trainer.val_check_interval=2", "callbacks.checkpoint=null", callbacks=(callback,))
    seconds = [float(row["throughput/step_seconds"]) for row in training.metrics().values()]
    assert len(seconds) == 4
    assert all(second < 1800 for second in seconds) == within, seconds
    # a kill after a validation does not lose it
    step_2 = callback.files[2].splitlines()
    assert step_2[-1].startswith("2,")
    assert (
        dict(zip(step_2[0].split(","), step_2[-1].split(","), strict=True))["val/loss"]
        == training.metrics()[2]["val/loss"]
    )
    # the bar ends with the last loss, which no redraw reads from a device
    shown = trainer.progress_bar_metrics["loss"]
    assert shown == pytest.approx(float(training.metrics()[4]["train/loss"]), rel=1e-6)


@needs_gpu
def test_a_pause_begins_when_the_gpu_is_idle():
    status, device = RunStatus(), torch.device("cuda")
    first = DeviceTimestamp(device)
    # about a quarter of a second
    torch.cuda._sleep(500_000_000)
    with status.paused():
        torch.cuda.synchronize()
    assert DeviceTimestamp(device).seconds_since(first) - status.paused_seconds > 0.1


class Synchronisations(L.Callback):
    """Where the host waits for the GPU in the steps from `first` to `last`, counted from 1."""

    def __init__(self, first: int, last: int, reads: bool = False):
        self.first, self.last, self.reads = first, last, reads
        self.places: set[str] = set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 == self.first:
            self._caught = warnings.catch_warnings(record=True)
            self._all = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.reads:
            float(pl_module.step_losses[0])
        if trainer.global_step == self.last:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            waits = (w for w in self._all if "called a synchronizing" in str(w.message))
            self.places = {f"{w.filename}:{w.lineno} {w.message}" for w in waits}


@needs_gpu
@pytest.mark.parametrize("reads", [False, True], ids=["training", "control"])
def test_steps_that_log_do_not_wait_for_the_gpu(training, reads):
    callback = Synchronisations(3, 6, reads)
    # the bar is drawn after every step
    training(
        "trainer.max_steps=8",
        "trainer.accelerator=gpu",
        "data.num_workers=1",
        "callbacks.checkpoint=null",
        "trainer.enable_progress_bar=true",
        "callbacks.progress={_target_:vsa.training.callbacks.progress.TimedProgressBar,log_seconds:1e-9}",
        callbacks=(callback,),
    )
    assert (callback.places == set()) != reads, callback.places
