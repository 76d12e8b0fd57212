"""Ranks that are frozen, dead, stuck or slow: the others end with one line that names it, or name it and go on."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.training.ranks import Ranks, run_ranks, wait_for
from vsa.training.heartbeats import own_heartbeat
from vsa.training.rank_times import CollectiveClock, RankTimes, straggler_line
from vsa.training.run_state import RunStatus
from vsa.training.watch import LOST_STATUS, RankMonitor, Timeouts, _Seen

RANKS = (
    "model.num_layers=1",
    "trainer=fsdp",
    "trainer.accelerator=cpu",
    "trainer.max_steps=100000",
    "trainer.log_every_n_steps=100000",
    "trainer.strategy.first_timeout=600",
)
SOON = "trainer.strategy.timeout=5"


def ended(world: int, function: Callable[[int], object], folder: Path, *, frozen: int | None = None):
    """Status and last lines of ranks that end by themselves, of all but a frozen one.

    Args:
        world: number of ranks.
        function: what each does.
        folder: for what they print.
        frozen: one that does not end.
    """
    with Ranks(world, function, folder) as ranks:
        statuses = ranks.statuses(without=frozen)
        return statuses, [ranks.output(rank) for rank in range(world)]


class Act(L.Callback):
    """Calls a function in an optimizer step counted from 1, or within it, after it was reported as begun."""

    def __init__(self, step: int, act: Callable[[], object], *, within: bool = False):
        self.step, self.act, self.within = step, act, within

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step - 1 and not self.within:
            self.act()

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == self.step - 1 and self.within:
            self.act()


def kill_self(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGSTOP, "has not answered for 5 s"), pytest.param(signal.SIGKILL, "died", marks=pytest.mark.slow)],
    ids=["frozen", "dead"],
)
def test_the_others_end_with_a_line_that_names_a_lost_rank(training, tmp_path, number, words):
    # steps are shorter than the second between heartbeats: one is sent from the third, before the rank is lost
    acts = (Act(3, lambda: time.sleep(2)), Act(4, kill_self(number)))
    status, err = ended(2, lambda rank: training(*RANKS, SOON, callbacks=acts if rank == 1 else ()), tmp_path, frozen=1)
    assert status[0] == LOST_STATUS
    (line,) = [line for line in err[0].splitlines() if line.startswith("error: ")]
    what = rf"error: rank 1 \(pid \d+ on .+, last in (the data of )?step \d\) {words}: the other ranks were stopped, "
    assert re.match(what + "see ", line)
    assert line.endswith(f"; ckpt_path=last continues from {training.folder()}/checkpoints/step-00000002")
    assert "Traceback" not in err[0]
    # where the rank that could still answer stood
    assert " in fit\n" in (training.folder() / "stacks-rank-0.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "within", "place"),
    [("fsdp", False, "the data of step 4"), ("fsdp", True, "step 4"), ("ddp", True, "step 4")],
)
def test_a_rank_whose_main_thread_stands_is_named_although_it_answers(training, tmp_path, trainer, within, place):
    # of three, two can say so: one does
    status, err = ended(
        3,
        lambda rank: training(
            *RANKS,
            SOON,
            f"trainer={trainer}",
            "data.batch_size=3",
            callbacks=(Act(4, lambda: time.sleep(1000), within=within),) if rank == 2 else (),
        ),
        tmp_path,
    )
    assert status == [LOST_STATUS] * 3
    lines = [line for text in err for line in text.splitlines() if line.startswith("error: ")]
    (line,) = lines
    assert line.startswith("error: rank 2 (pid ")
    assert f", last in {place}) has made no progress for 5 s: " in line
    for rank in range(3):
        assert "_run_stage" in (training.folder() / f"stacks-rank-{rank}.txt").read_text()


def test_sigterm_ends_a_rank_that_waits_for_a_frozen_one(training, tmp_path):
    def on_rank(rank: int) -> None:
        acts = {0: kill_self(signal.SIGTERM), 1: kill_self(signal.SIGSTOP)}
        training(*RANKS, callbacks=(Act(4, acts[rank]),))

    status, err = ended(2, on_rank, tmp_path, frozen=1)
    assert status[0] == 143
    (line,) = [line for line in err[0].splitlines() if line.startswith("SIGTERM: rank ")]
    assert "does not answer, so no step can be finished: the last checkpoint is " in line


class SignalBefore(L.Callback):
    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_rank_before_its_first_step_ends_all(training, tmp_path):
    from vsa.training.ending import stopped_by_signals

    def on_rank(rank: int) -> None:
        with stopped_by_signals():
            training(*RANKS, callbacks=(SignalBefore(),))

    status, _ = ended(2, on_rank, tmp_path)
    assert status == [143, 143]


def test_a_rank_with_an_error_of_its_own_tells_it_and_ends_all(training, tmp_path):
    def broken() -> None:
        raise KeyError("mine")

    status, err = ended(2, lambda rank: training(*RANKS, callbacks=(Act(4, broken),) if rank == 1 else ()), tmp_path)
    assert status == [LOST_STATUS, 1]
    assert "KeyError: 'mine'" in err[1]
    assert "rank 1 (pid " in err[0]
    assert "Traceback" not in err[0]


def test_the_first_rank_of_every_machine_says_that_the_store_is_gone(training, tmp_path):
    # as of two agents of torchrun, the first of which is killed
    def on_rank(rank: int) -> None:
        os.environ["LOCAL_RANK"] = "0"
        training(*RANKS, SOON, callbacks=(Act(2, lambda: (tmp_path / "began").touch()),))

    with Ranks(2, on_rank, tmp_path) as ranks:
        assert wait_for(lambda: (tmp_path / "began").exists() or ranks.ended())
        ranks.lose_store()
        assert ranks.statuses() == [LOST_STATUS] * 2
        first, second = ([o for o in ranks.output(rank).splitlines() if o.startswith("error: ")] for rank in (0, 1))
    assert len(first) == 1
    assert first == second
    assert first[0].startswith("error: the store of the ranks is gone: the other ranks were stopped")


def test_two_agents_of_torchrun_meet_and_are_one(training, tmp_path):
    few = ("model.num_layers=1", "trainer.max_steps=2", "optim.eps=0.01")
    training(*few, "run=one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    settings = (*few, "trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=2", "run=two")
    # each is a machine with one rank, which it forks
    agents = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="here",
        rdzv_backend="c10d",
        rdzv_endpoint=meet,
        local_addr="127.0.0.1",
        start_method="fork",
        monitor_interval=0.1,
    )
    status, err = ended(2, lambda _: elastic_launch(agents, lambda: training(*settings) and None)(), tmp_path)
    assert status == [0, 0], err
    one, two = training.tensors("one"), training.tensors("two")
    assert set(one) == set(two)
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-6
    assert len(list((training.folder("two") / "checkpoints" / "step-00000002").glob("model-*-of-00002.*"))) == 2


@pytest.mark.parametrize(
    ("moves", "calls", "line"),
    [
        ((8, 7, 8), (40, 40, 40), "rank 1 (pid "),
        # the step is the same: that in the way has begun fewer collectives
        ((8, 8, 8), (40, 40, 39), "rank 2 (pid "),
        ((8, 7, 8), (40, 40, 39), "rank 1 (pid "),
        ((8, 8, 8), (40, 40, 40), "no rank has made progress for 5 s"),
    ],
)
def test_of_ranks_that_answer_the_last_one_is_named(monkeypatch, moves, calls, line):
    status = RunStatus()
    status.stage, now, told = "steps", time.monotonic(), []
    watch = RankMonitor(Path("nowhere"), status)
    monkeypatch.setattr(watch, "_end", lambda why, *_, **__: told.append(why))
    beats = [replace(own_heartbeat(), moves=m, calls=c, paused=False) for m, c in zip(moves, calls, strict=True)]
    meeting = SimpleNamespace(beats=beats, rank=0, host_rank=None, failure=None, heard_at=now)
    watch._timeouts = Timeouts(step=5, first=5)
    watch._seen = {rank: _Seen(beat=beats[rank], heard=now) for rank in (1, 2)}
    watch._moves, watch._moved = moves, now - 4
    watch._judge_ranks(meeting, now)
    assert told == []
    watch._judge_ranks(meeting, now + 2)
    # the first one ends the process
    assert told[0].startswith(line)


def test_only_steps_have_a_time_limit():
    status = RunStatus()
    watch = RankMonitor(Path("nowhere"), status)
    flags = []
    for stage in ("start", "steps", "end"):
        status.stage = stage
        flags.append(watch._say().paused)
    assert flags == [True, False, True]
    status.stage = "steps"
    # saves, clips, validations
    with status.paused():
        assert watch._say().paused
    assert not watch._say().paused


# which rank keeps the others waiting


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_times_of_each_rank_show_which_one_the_others_wait_for(training, trainer):
    steps = ("trainer.max_steps=3", "trainer.log_every_n_steps=3", f"trainer={trainer}", "run=slow")

    def on_rank(rank: int) -> None:
        class Slow(L.Callback):
            def on_train_batch_start(self, *_):
                time.sleep(rank == 1)

        training(*RANKS[:1], *RANKS[2:3], *steps, callbacks=(Slow(),))

    run_ranks(2, on_rank)
    row = {name: float(value) for name, value in training.metrics("slow")[3].items() if name.startswith("ranks/")}
    assert set(row) == {f"ranks/{what}_seconds_{rank}" for what in ("step", "data") for rank in (0, 1)}
    assert row["ranks/step_seconds_1"] > 1
    # it waited for as long, which is no work of its own
    assert row["ranks/step_seconds_0"] < row["ranks/step_seconds_1"] - 0.25


def test_a_rank_a_fifth_behind_is_named():
    assert straggler_line([1.0, 1.0, 1.19, 1.0], [0.0] * 4) is None
    assert straggler_line([1.0, 1.21, 1.0, 1.1], [0.0, 0.5, 0.0, 0.0]) == (
        "rank 1 is 21% behind the others over 50 steps: 1.21 s a step, the others 1 s; 0.5 s of it for its data"
    )
    assert straggler_line([1.0, 1.0], [0.0, 0.0]) is None


def test_waiting_for_data_is_told_from_work_and_pauses_from_both():
    now = [0.0]
    clock = CollectiveClock()
    times = RankTimes(clock, lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    for _ in range(2):
        for last in (False, True):
            passes(1)
            times.begins()
            passes(4)
            clock.seconds += 3
            if last:
                times.computed()
                # the optimizer
                passes(100)
            times.ends(last)
            # a log line
            passes(1000)
            times.waits()
            # what the ranks agree on
            passes(500)
            clock.seconds += 500
    assert times._steps == [(2.0, 2.0)] * 2


def test_collectives_are_timed_while_asked_for(monkeypatch):
    def reduce(*args, **kwargs):
        time.sleep(0.01)
        return args, kwargs

    monkeypatch.setattr(dist, "all_reduce", reduce)
    with CollectiveClock() as clock:
        assert dist.all_reduce(1, op=2) == ((1,), {"op": 2})
        assert clock.seconds > 0
    assert dist.all_reduce is reduce
