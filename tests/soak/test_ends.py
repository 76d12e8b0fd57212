"""Rows about signals, and about frozen, dead and slow ranks: what is saved, said and left, and what a resume does."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.limits import HANGS
from tests.soak.test_resume import FSDP, finish, steps_of, world_of
from tests.tiny_runs import ROOT, TINY_OVERRIDES, TinyTraining, one_thread, training  # noqa: F401
from tests.training.ranks import Ranks, wait_for
from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.signals import ENDING
from vsa.training.ending import stopped_by_signals
from vsa.training.watch import LOST_STATUS

TIMEOUT = 6.0
"""Of the ranks, in seconds; the others have ten more to write their stacks and to end."""

LONG = ("trainer.max_steps=100000", "data.val_batches=4")
VALIDATES = ("trainer.val_check_interval=1", "data.val_fraction=0.5", "data.val_batches=8")
RARELY, EACH = "callbacks.checkpoint.every_n_steps=100000", "callbacks.checkpoint.every_n_steps=1"
SOON = (f"trainer.strategy.timeout={TIMEOUT}", "trainer.strategy.first_timeout=120")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], dict[int, str]]:
    """`straight(settings)`: the losses of 60 steps that nothing interrupts, trained once."""
    losses: dict[tuple[str, ...], dict[int, str]] = {}

    def of(settings: tuple[str, ...]) -> dict[int, str]:
        key = tuple(each for each in settings if each in (*VALIDATES, FSDP))
        if key not in losses:
            folder = tmp_path_factory.mktemp("straight")
            runs = TinyTraining(folder, pytest.MonkeyPatch())
            finish(runs, (*LONG, *key, RARELY, "trainer.max_steps=60"), folder / "printed")
            losses[key] = runs.losses()
        return losses[key]

    return of


def goes_on(runs: TinyTraining, settings: tuple[str, ...], straight: dict[int, str]) -> None:
    """Resume for three steps: the losses are those of the run that nothing interrupted."""
    last = runs.last().step + 3
    finish(runs, (*settings, f"trainer.max_steps={last}", "ckpt_path=last"), runs.output / "printed")
    assert {step: loss for step, loss in runs.losses().items() if loss} == {s: straight[s] for s in range(1, last + 1)}


# signals

MOMENTS: dict[str, tuple[str, ...]] = {
    "in set-up": (RARELY,),
    "in a step": (RARELY,),
    "in validations": (RARELY, *VALIDATES),
    "in saves": (EACH,),
    "to one of two ranks": (FSDP, RARELY),
    "with two workers": (RARELY, "data.num_workers=2"),
    "twice": ("callbacks.checkpoint.every_n_steps=5",),
    "to one of two ranks in set-up": (FSDP, RARELY),
}
SIGNALS = tuple(itertools.product(MOMENTS, ENDING))


@pytest.mark.soak("signals of five kinds at eight moments, on one and two ranks", attempts=len(SIGNALS), short=0)
def test_signals(training: TinyTraining, straight, attempt: int, tmp_path: Path):  # noqa: F811
    moment, number = SIGNALS[attempt % len(SIGNALS)]
    draw, settings, in_set_up = random.Random(attempt), (*LONG, *MOMENTS[moment]), "set-up" in moment

    def train(rank: int) -> None:
        with stopped_by_signals():
            training(*settings)

    with Ranks(world_of(settings), train, tmp_path / "printed") as ranks:
        step = draw.randint(1, 12)
        began = training.folder().is_dir if in_set_up else lambda: steps_of(training) >= step
        assert wait_for(lambda: began() or ranks.ended())
        time.sleep(draw.uniform(0, 0.1))
        for _ in range(1 + (moment == "twice")):
            ranks.send(number, draw.randrange(world_of(settings)))
            time.sleep(0.01)
        statuses, output = ranks.statuses(), ranks.output()
    assert statuses[0] == 128 + number, output[-2000:]
    # one that has not met the signalled rank may only notice that it is gone
    assert set(statuses[1:]) <= ({0, statuses[0], LOST_STATUS} if in_set_up else {0})
    saved, name = list_checkpoints(training.folder() / "checkpoints"), signal.Signals(number).name
    says = [line for line in output.splitlines() if line.startswith(f"{name}: ") and "saving after" not in line]
    # a second Ctrl-C ends a run at once
    if moment != "twice" or name != "SIGINT":
        assert ["saved " in line or "nothing to save" in line for line in says] == [True], output[-2000:]
        assert saved or in_set_up
    assert not re.search('File ".*/vsa/', output), output[-2000:]
    if saved:
        goes_on(training, settings, straight(settings))


@contextmanager
def program(words: Sequence[str], folder: Path, *start: str) -> Iterator[subprocess.Popen[bytes]]:
    """`train.py` as a program of its own, started by `start` instead of Python; what it leaves is killed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, str(ROOT / "train.py"), *words]
    with open(folder / "printed", "wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        for pid in [process.pid, *children_of(process.pid)] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.soak("signals while modules are loaded", attempts=10, short=0)
def test_signals_while_modules_are_loaded(training: TinyTraining, attempt: int, tmp_path: Path):  # noqa: F811
    number, name = ENDING[attempt % 5], ENDING[attempt % 5].name
    words = (*TINY_OVERRIDES, *LONG, RARELY, f"output_dir={training.output}")
    with program([*words], tmp_path) as process:
        # the first statement sets the handlers, half a second after the start of Python at most
        time.sleep(random.Random(attempt).uniform(1, 4))
        process.send_signal(number)
        assert process.wait(HANGS) == 128 + number
    output = (tmp_path / "printed").read_text()
    assert [line for line in output.splitlines() if line.startswith(f"{name}: ") and "saving after" not in line]
    assert "Traceback" not in output


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAUNCHED = (*TINY_OVERRIDES, *LONG, FSDP, *SOON, "trainer.devices=2")


@pytest.mark.soak("signals to the launchers of two ranks", attempts=4, short=0)
def test_signals_to_launchers(training: TinyTraining, straight, attempt: int, tmp_path: Path):  # noqa: F811
    """torchrun passes signals on, and has a status of its own."""
    by_torchrun, number = bool(attempt % 2), (signal.SIGTERM, signal.SIGINT)[attempt // 2 % 2]
    words = (*LAUNCHED, RARELY, f"output_dir={training.output}")
    with program(words, tmp_path, *TORCHRUN[: 4 * by_torchrun]) as process:
        assert wait_for(lambda: steps_of(training) >= 3 or process.poll() is not None)
        process.send_signal(number)
        assert process.wait(HANGS) == (1 if by_torchrun else 128 + number)
    assert (tmp_path / "printed").read_text().count(f"{number.name}: saved ") == 1
    settings = (*LONG, FSDP, RARELY)
    goes_on(training, settings, straight(settings))


# ranks that are frozen, dead or slow

BUSY: tuple[tuple[str, ...], ...] = ((), VALIDATES, (EACH,), ("data.num_workers=1",))
LOST = tuple(itertools.product((signal.SIGKILL, signal.SIGSTOP), BUSY, (0, 1)))


@pytest.mark.soak(
    "a dead or frozen rank: the other ends in time and names it, the run continues", attempts=len(LOST), short=0
)
def test_lost_ranks(training: TinyTraining, straight, attempt: int, tmp_path: Path):  # noqa: F811
    """In steps, where validations or saves are most of the time, and with workers."""
    number, busy, lost = LOST[attempt % len(LOST)]
    draw, settings = random.Random(attempt), (*LONG, FSDP, "callbacks.checkpoint.every_n_steps=3", *busy)
    with Ranks(2, lambda _: training(*settings, *SOON), tmp_path / "printed") as ranks:
        step = draw.randint(4, 20)
        assert wait_for(lambda: steps_of(training) >= step or ranks.ended()), ranks.output()
        time.sleep(draw.uniform(0, 0.1))
        began = time.monotonic()
        ranks.send(number, lost)
        status = ranks.statuses(TIMEOUT + 30, without=lost)[1 - lost]
        seconds, output = time.monotonic() - began, ranks.output(1 - lost)
    assert status == LOST_STATUS, output[-2000:]
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output[-3000:]
    (line,) = lines
    assert re.match(rf"error: rank {lost} \(pid \d+ on ", line)
    assert "Traceback" not in output
    assert (training.folder() / f"stacks-rank-{1 - lost}.txt").read_text()
    # half a heartbeat may lie between what two ranks notice
    assert seconds < TIMEOUT + 10
    goes_on(training, settings, straight(settings))


LAUNCHED_LOST = ((signal.SIGKILL, 1, False), (signal.SIGSTOP, 1, False), (signal.SIGKILL, 1, True))
LAUNCHED_LOST += ((signal.SIGKILL, 0, False),)


@pytest.mark.soak("a dead or frozen rank of a launcher: no process is left", attempts=4, short=0)
def test_lost_ranks_of_launchers(training: TinyTraining, attempt: int, tmp_path: Path):  # noqa: F811
    number, lost, by_torchrun = LAUNCHED_LOST[attempt % 4]
    words = (*LAUNCHED, f"output_dir={training.output}")
    with program(words, tmp_path, *TORCHRUN[: 4 * by_torchrun]) as process:
        assert wait_for(lambda: steps_of(training) >= 3 or process.poll() is not None)
        # rank 0 is its own launcher where there is no torchrun
        ranks = [*([] if by_torchrun else [process.pid]), *children_of(process.pid)]
        os.kill(ranks[lost], number)
        if ranks[lost] != process.pid:
            # torchrun waits for half a minute before it kills a frozen one
            assert process.wait(TIMEOUT + 60) == (1 if by_torchrun else LOST_STATUS)
        assert wait_for(lambda: not any(alive(pid) for pid in ranks if pid != ranks[lost]), TIMEOUT + 20)
        output = (tmp_path / "printed").read_text()
    # torchrun may notice it first and end the other by SIGTERM
    prefixes = (f"error: rank {lost} (pid ", f"SIGTERM: rank {lost} (pid ")
    assert len([line for line in output.splitlines() if line.startswith(prefixes)]) == 1, output[-2000:]


@pytest.mark.soak("a lost rank or agent of two torchruns that meet: the other ends", attempts=4, short=0)
def test_two_agents_of_torchrun(training: TinyTraining, attempt: int, tmp_path: Path):  # noqa: F811
    """Two machines as one has them: each agent starts a rank, they meet at a port; one is lost, or its rank."""
    lost, of_agent = attempt % 2, attempt // 2 % 2 == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (
        *LAUNCHED[:-1],
        "trainer.num_nodes=2",
        "callbacks.checkpoint.every_n_steps=3",
        f"output_dir={training.output}",
    )
    meet = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    meet = (*meet, "--rdzv-id=here", "--local-addr=127.0.0.1", f"--log-dir={tmp_path}/logs", "--tee=3")
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        agents = [stack.enter_context(program(words, at, "-m", "torch.distributed.run", *meet)) for at in folders]
        assert wait_for(lambda: steps_of(training) >= 4 or any(agent.poll() is not None for agent in agents))
        assert [agent.poll() for agent in agents] == [None, None], [(at / "printed").read_text() for at in folders]
        (rank,) = children_of(agents[lost].pid)
        os.kill(agents[lost].pid if of_agent else rank, signal.SIGKILL)
        if of_agent:
            # a rank without its agent trains on, unless the store went with that one; nothing is lost with it alone
            step = steps_of(training)
            assert wait_for(lambda: steps_of(training) >= step + 4 or agents[1 - lost].poll() is not None)
            for other in children_of(agents[1 - lost].pid) if agents[1 - lost].poll() is None else ():
                os.kill(other, signal.SIGKILL)
        assert agents[1 - lost].wait(TIMEOUT + 90) == 1
        assert wait_for(lambda: not alive(rank))


@pytest.mark.soak("SIGTERM to a rank that waits for a frozen one", attempts=4, short=0)
def test_sigterm_to_a_rank_that_waits(training: TinyTraining, attempt: int, tmp_path: Path):  # noqa: F811
    draw, lost = random.Random(attempt), attempt % 2
    with Ranks(2, lambda _: training(*LONG, FSDP, RARELY), tmp_path / "printed") as ranks:
        step = draw.randint(3, 20)
        assert wait_for(lambda: steps_of(training) >= step or ranks.ended())
        ranks.send(signal.SIGSTOP, lost)
        time.sleep(draw.uniform(0, 3))
        ranks.send(signal.SIGTERM, 1 - lost)
        assert ranks.statuses(without=lost)[1 - lost] == 143
        lines = ranks.output(1 - lost).splitlines()
    assert len([line for line in lines if line.startswith(f"SIGTERM: rank {lost} (pid ")]) == 1


@pytest.mark.soak("a slow rank is named, none in a run that is left alone", attempts=9, short=0)
def test_slow_ranks(training: TinyTraining, attempt: int, tmp_path: Path):  # noqa: F811
    """One of two ranks is stopped for half of the time, or in every third attempt none."""
    slow = (None, 1, 0)[attempt % 3]
    with Ranks(2, lambda _: training(FSDP, RARELY, "trainer.max_steps=110"), tmp_path / "printed") as ranks:
        assert wait_for(lambda: steps_of(training) >= 1 or ranks.ended())
        while not ranks.ended():
            for number, seconds in ((signal.SIGSTOP, 0.06), (signal.SIGCONT, 0.03)):
                if slow is not None:
                    ranks.send(number, slow)
                time.sleep(seconds)
        assert ranks.statuses() == [0, 0]
        named = re.findall(r"rank (\d+) is \d+% behind the others over 50 steps", ranks.output())
    assert named == ([] if slow is None else [str(slow)] * 2)


# on GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.soak("signals, killed and frozen ranks on several GPUs", attempts=8, short=1)
def test_signals_and_lost_ranks_on_gpus(training: TinyTraining, attempt: int, tmp_path: Path):  # noqa: F811
    """To the last rank: all save, or end in time and name it; forks use GPUs if this process has not."""
    number = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSTOP)[attempt % 4]
    world, draw = torch.cuda.device_count(), random.Random(attempt)
    settings = ("trainer=fsdp", "trainer.accelerator=gpu", f"data.batch_size={2 * world}", *LONG, *SOON)
    # kernels of the first validation may have to be compiled
    settings = (*settings, f"trainer.strategy.timeout={2 * TIMEOUT}")
    with Ranks(world, lambda _: training(*settings), tmp_path / "printed") as ranks:
        step = draw.randint(3, 40)
        assert wait_for(lambda: steps_of(training) >= step or ranks.ended()), ranks.output()
        ranks.send(number, world - 1)
        frozen = world - 1 if number == signal.SIGSTOP else None
        statuses = ranks.statuses(2 * TIMEOUT + 10, without=frozen)
        said = [ranks.output(rank) for rank in range(world - 1)]
    if number in (signal.SIGTERM, signal.SIGINT):
        assert statuses == [128 + number] + [0] * (world - 1), said[0][-2000:]
        assert training.last().step >= step
    else:
        assert set(statuses[: world - 1]) == {LOST_STATUS}, said[0][-2000:]
        assert any(re.search(rf"^error: rank {world - 1} \(pid ", text, re.MULTILINE) for text in said)
