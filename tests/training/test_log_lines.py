"""Metrics are written during the step after their own, so that no host waits for its device."""

from __future__ import annotations

import warnings
from datetime import timedelta
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist

import vsa.training.hosts as hosts_module
from tests.training.ranks import run_ranks
from vsa.training.callbacks.last_lines import LastLines
from vsa.training.hosts import connect_hosts, largest
from vsa.training.log_lines import LogLines
from vsa.training.metrics_csv import MetricsCSV

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
            pl_module.write_log()
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


def test_lines_are_written_in_order_and_once():
    lines, logger, shown = LogLines(), Lines(), []
    lines.add({"a": torch.tensor(1.5), "b": 2}, 1)
    lines.add(lambda: (shown.append(1), {"c": 3.0})[1], 1)
    lines.add({"a": 4.0}, 2)
    assert (logger.lines, shown) == ([], [])
    lines.write([logger])
    assert logger.lines == [(1, {"a": 1.5, "b": 2}), (1, {"c": 3.0}), (2, {"a": 4.0})]
    lines.write([logger])
    assert (len(logger.lines), shown) == (3, [1])
    lines.add({"a": 5.0}, 3)
    lines.drop()
    lines.write([logger])
    assert len(logger.lines) == 3


def test_an_error_in_one_line_loses_no_other():
    def fail():
        raise FloatingPointError("too many")

    lines, logger = LogLines(), Lines()
    lines.add({"a": 1.0}, 1)
    lines.add(fail, 1)
    lines.add({"b": 2.0}, 1)
    with pytest.raises(FloatingPointError):
        lines.write([logger])
    lines.write([logger])
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
        monkeypatch.setattr(LastLines, "on_exception", lambda *_: None)
    with pytest.raises(RuntimeError, match="it fails"):
        training("callbacks.checkpoint=null", callbacks=(Fails(4),))
    rows = training.metrics()
    assert list(rows) == ([1, 2, 3] if writes else [1, 2])
    assert all(row["train/loss"] and row["skipped_steps"] and row["throughput/step_seconds"] for row in rows.values())


def test_hosts_agree_without_the_default_group(monkeypatch):
    def agree(rank: int) -> list[int]:
        dist.init_process_group("gloo")
        group = connect_hosts(timedelta(seconds=60))
        with monkeypatch.context() as patch:
            reduce = dist.all_reduce
            patch.setattr(dist, "all_reduce", lambda *a, group, **k: (used.append(group), reduce(*a, group=group, **k)))
            used = []
            trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(hosts=group))
            values = [largest(value, trainer) for value in (rank, 7 - rank, rank == 1)]
        assert used == [group] * 3
        return values

    assert run_ranks(2, agree) == [[1, 7, 1]] * 2
    # one process asks nobody
    assert largest(5, SimpleNamespace(world_size=1)) == 5


def test_hosts_that_cannot_connect_are_told_what_to_set(monkeypatch):
    def fail(**_):
        raise RuntimeError("no interface\nlong trace")

    monkeypatch.setattr(hosts_module.dist, "new_group", fail)
    with pytest.raises(ConnectionError, match=r"cannot connect \(no interface\): GLOO_SOCKET_IFNAME names"):
        connect_hosts(timedelta(seconds=1))


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
