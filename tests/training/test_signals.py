"""Signals and deadlines at any moment: what is saved then, what is said, and with which status a run ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
from torch.utils.data import DataLoader

import vsa.training.train as run_module
from tests.limits import HANGS
from tests.training.test_ending import told  # noqa: F401 (a fixture)
from tests.training.test_resume import SignalAt
from vsa.signals import ENDING, current_handlers, leave_signals_to_parent
from vsa.training.callbacks.checkpoint import Checkpointing
from vsa.training.deadline import SCHEDULER, Deadline, deadline_of
from vsa.training.ending import stopped_by_signals

ROOT = Path(__file__).parents[2]
SMALL = ("model.num_layers=1", "trainer.max_steps=6", "callbacks.checkpoint.every_n_steps=1000")


def stopped(training, *overrides: str, callbacks: tuple[L.Callback, ...]) -> int | str | None:
    before = current_handlers()
    with pytest.raises(SystemExit) as stop:
        training(*SMALL, *overrides, callbacks=callbacks)
    assert current_handlers() == before
    return stop.value.code


# before anything is loaded


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_while_modules_are_loaded_ends_the_process_with_one_line(tmp_path, number):
    # in place of the first large module
    (tmp_path / "typer.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(60)\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 128 + number
    assert err == f"{number.name}: stopped, there was nothing to save\n"


def test_a_signal_that_is_ignored_at_the_start_stays_ignored():
    # nohup ignores SIGHUP, and a shell without job control ignores SIGINT for what it starts with &
    code = (
        "import os, signal\n"
        "from vsa.signals import ENDING, end_at_once, handled_by\n"
        "for number in ENDING: signal.signal(number, signal.SIG_IGN)\n"
        "with handled_by(end_at_once):\n"
        "    for number in ENDING: os.kill(os.getpid(), number)\n"
        "assert {signal.getsignal(number) for number in ENDING} == {signal.SIG_IGN}\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "with handled_by(end_at_once): os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 128 + signal.SIGTERM


# in a step, a validation, a save


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_every_signal_finishes_the_step_and_saves(training, told, number):  # noqa: F811
    assert stopped(training, callbacks=(SignalAt(1, number),)) == 128 + number
    assert training.last().step == 2
    assert f"{number.name}: saving after this step" in told
    assert f"{number.name}: saved {training.last().path}, continue with ckpt_path=last" in told


class SignalInValidation(L.Callback):
    """Sends this process a signal in the second batch of every validation."""

    def __init__(self, number: int):
        self.number = number
        self.batches = 0

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.batches += 1
        if batch_idx == 1:
            os.kill(os.getpid(), self.number)


def test_signal_aborts_validation_and_logs_nothing_of_it(training):
    settings = ("trainer.val_check_interval=2", "data.val_fraction=0.4", "trainer.max_steps=4")
    training(*SMALL, *settings, "run=straight")
    callback = SignalInValidation(signal.SIGTERM)
    assert stopped(training, *settings, callbacks=(callback,)) == 143
    # of at least three
    assert callback.batches == 2
    assert training.last().step == 2
    assert not training.metrics()[2].get("val/loss")
    training(*SMALL, *settings, "ckpt_path=last")
    assert training.losses() == training.losses("straight")
    # the averaged weights, with which a validation runs, were put away
    tensors = training.tensors("straight")
    assert all((value == tensors[name]).all() for name, value in training.tensors().items())
    assert training.metrics()[4]["val/loss"] == training.metrics("straight")[4]["val/loss"]


def test_a_signal_while_a_loader_starts_is_what_ends_the_run(training, told, monkeypatch):  # noqa: F811
    start = DataLoader.__iter__

    def signal_and_start(loader):
        os.kill(os.getpid(), signal.SIGTERM)
        return start(loader)

    monkeypatch.setattr(DataLoader, "__iter__", signal_and_start)
    with pytest.raises(SystemExit) as stop, stopped_by_signals():
        training(*SMALL)
    assert stop.value.code == 143
    assert "SIGTERM: stopped, there was nothing to save" in told


class SignalWhereExceptionsAreDropped(L.Callback):
    """Sends this process a signal in a finalizer, before the first step."""

    def setup(self, trainer, pl_module, stage):
        class Finalized:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)

        Finalized()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_is_not_lost_where_exceptions_are_dropped(training, told):  # noqa: F811
    with pytest.raises(SystemExit) as stop, stopped_by_signals():
        training(*SMALL, callbacks=(SignalWhereExceptionsAreDropped(),))
    assert stop.value.code == 130
    assert told.count("SIGINT: stopped, there was nothing to save") == 1
    assert not (training.folder() / "checkpoints").exists()


@pytest.mark.parametrize("starts", [1, 2], ids=["training", "validation"])
def test_an_error_while_a_loader_starts_is_what_ends_the_run(training, monkeypatch, starts):
    start, loaders = DataLoader.__iter__, []

    def fails(loader):
        loaders.append(loader)
        if len(loaders) == starts:
            raise ValueError("no memory for another worker")
        return start(loader)

    monkeypatch.setattr(DataLoader, "__iter__", fails)
    with pytest.raises(ValueError, match="no memory for another worker"):
        training(*SMALL, "trainer.val_check_interval=2", "data.val_fraction=0.4")


def test_a_signal_in_a_save_waits_for_no_other_step(training, monkeypatch):
    write = Checkpointing._write

    def write_and_signal(callback, trainer, module, **options):
        write(callback, trainer, module, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpointing, "_write", write_and_signal)
    assert stopped(training, "callbacks.checkpoint.every_n_steps=2", callbacks=()) == 143
    assert training.last().step == 2


@pytest.mark.parametrize(
    ("numbers", "status"),
    [((signal.SIGTERM, signal.SIGTERM), 143), ((signal.SIGUSR1, signal.SIGTERM), 138)],
    ids=["twice the same", "two kinds"],
)
def test_the_first_of_two_signals_decides(training, numbers, status):
    assert stopped(training, callbacks=tuple(SignalAt(1, number) for number in numbers)) == status
    assert training.last().step == 2


# the queue of a cluster


@pytest.fixture
def scontrol(tmp_path, monkeypatch) -> Path:
    """What a stand-in for SLURM's command was called with."""
    calls, program = tmp_path / "calls", tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return calls


def test_sigusr1_gives_a_job_back_to_the_queue_and_the_same_command_goes_on(training, scontrol, told, monkeypatch):  # noqa: F811
    assert stopped(training, callbacks=(SignalAt(1, signal.SIGUSR1),)) == 138
    assert scontrol.read_text() == "requeue 17\n"
    assert "job 17 is queued again" in told
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    training(*SMALL, "overwrite=true")
    assert sorted(training.losses()) == [1, 2, 3, 4, 5, 6]
    assert training.last().step == 6
    assert scontrol.read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("number", "setting"), [(signal.SIGTERM, "true"), (signal.SIGUSR1, "false")], ids=["another signal", "turned off"]
)
def test_nothing_else_asks_the_queue(training, scontrol, number, setting):
    assert stopped(training, f"callbacks.checkpoint.requeue={setting}", callbacks=(SignalAt(0, number),)) > 128
    assert not scontrol.exists()


def test_a_launcher_that_queues_jobs_by_itself_keeps_its_signal(training, monkeypatch):
    numbers = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: numbers.append(number))
    try:
        training(*SMALL, "trainer.max_steps=2", callbacks=(SignalAt(0, signal.SIGUSR2),))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert numbers == [signal.SIGUSR2]
    assert training.last().step == 2


def test_a_queue_that_refuses_costs_a_line(training, scontrol, told):  # noqa: F811
    (scontrol.parent / "scontrol").write_text("#!/bin/sh\necho no such job >&2\nexit 1\n")
    assert stopped(training, callbacks=(SignalAt(0, signal.SIGUSR1),)) == 138
    assert "warning: scontrol requeue 17 failed: no such job" in told


# deadlines


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_deadline_margin_covers_the_longest_step_and_save():
    clock = Clock()
    deadline = Deadline(1000, "x", clock=clock)
    looks = []
    for seconds in (300, 10, 20, 10):
        clock.now += seconds
        looks.append((deadline.near(), deadline.margin))
    # the first step counts until there is a second; a minute is the least
    assert looks == [(False, 300), (False, 60), (False, 60), (False, 60)]
    clock.now += 70
    deadline.saved(70)
    assert deadline.margin == 20 + 70
    clock.now = 100 + 1000 - 90.5
    # a stretch as long as this one may follow
    assert deadline.near()
    short = Deadline(10, "x", clock=clock)
    assert short.margin == 1
    clock.now += 8.9 / 2
    assert not short.near()
    clock.now += 8.9 / 2
    assert short.near()


def test_the_earlier_deadline_counts(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert deadline_of(None, {}) is None
    for text, environment, name in (
        ("00:00:10:00", {SCHEDULER: "1500"}, f"{SCHEDULER}=1500"),
        ("00:00:05:00", {SCHEDULER: "1500"}, "trainer.max_time=00:00:05:00"),
        (None, {SCHEDULER: "1500"}, f"{SCHEDULER}=1500"),
        ({"minutes": 5}, {}, "trainer.max_time={'minutes': 5}"),
    ):
        deadline = deadline_of(text, environment)
        assert deadline is not None
        assert (deadline.name, deadline.own) == (name, name.startswith("trainer"))
    for bad in ("5", "00:00:00:00", {"weeks": 1}, {}):
        with pytest.raises(ValueError, match=r"trainer\.max_time=.*: expected days, hours, minutes and seconds"):
            deadline_of(bad, {})


@pytest.mark.parametrize(("own", "status"), [(True, None), (False, 124)], ids=["of the run", "of the scheduler"])
def test_a_deadline_ends_a_run_with_a_checkpoint(training, told, monkeypatch, own, status):  # noqa: F811
    clock = Clock()

    class Second(L.Callback):
        def on_train_batch_start(self, *_):
            clock.now += 1

    # 5 s, of which half a second is kept, and the second that a step takes
    monkeypatch.setattr(run_module, "deadline_of", lambda *_: Deadline(5, "MINE", own=own, clock=clock))
    if status is None:
        training(*SMALL, callbacks=(Second(),))
    else:
        assert stopped(training, callbacks=(Second(),)) == status
    assert training.last().step == 4
    assert f"MINE: saved {training.last().path}, continue with ckpt_path=last" in told
    # control
    training(*SMALL, "run=other", callbacks=())
    assert training.last("other").step == 6


def test_max_time_is_not_left_to_lightning(training):
    trainer = training(*SMALL, "trainer.max_steps=1", "trainer.max_time=00:01:00:00")
    assert trainer is not None
    assert not [callback for callback in trainer.callbacks if type(callback).__name__ == "Timer"]


# workers of loaders


def test_what_is_sent_to_a_whole_group_leaves_workers_alive():
    receiver, sender = multiprocessing.Pipe()

    def work() -> None:
        leave_signals_to_parent()
        sender.send("ready")
        time.sleep(60)

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    assert receiver.poll(30)
    for number in ENDING:
        # from another process than its parent
        subprocess.run(["/bin/sh", "-c", f"kill -{int(number)} {worker.pid}"], check=True)
    worker.join(0.3)
    assert worker.is_alive()
    worker.terminate()
    worker.join(HANGS)
    assert worker.exitcode == 0
