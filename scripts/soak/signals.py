"""Rows about signals of all kinds at all moments: the current step is saved, and a resume is bitwise equal."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.soak import tiny
from scripts.soak.resume import begin
from scripts.soak.rows import Attempts, Row
from vsa.checkpoints.run_checkpoint import list_checkpoints, resolve_checkpoint
from vsa.signals import ENDING
from vsa.training.watch import LOST_STATUS

STEPS = 400
"""Steps of the uninterrupted run; the signals are sent in its first tenth."""

VALIDATES = ("trainer.val_check_interval=1", "data.val_fraction=0.5", "data.val_batches=8")
EVERY = "callbacks.checkpoint.every_n_steps={}"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The moment of a signal, and the process that receives it.

    Args:
        name: name of the moment.
        signalled: function of (folder, words, number, rng) that starts a run and sends signals of a kind to it; returns
            the exit status and the output.
        settings: settings of the run.
        steps: whether the run has completed a step by then.
        status: expected exit status as a function of the signal number.
    """

    name: str
    signalled: Callable[[Path, Sequence[str], int, random.Random], tuple[int, str]]
    settings: tuple[str, ...] = ()
    steps: bool = True
    status: Callable[[int], int] = lambda number: 128 + number


def _run_of(words: Sequence[str], folder: Path) -> Path:
    (name,) = (word.removeprefix("run=") for word in words if word.startswith("run="))
    return tiny.run_folder(folder, name)


def _ended(process: tiny.Started) -> tuple[int, str]:
    try:
        return process.wait(90), process.output()
    except TimeoutError as error:
        process.kill()
        return -1, str(error)


def _while_loading(folder: Path, words: Sequence[str], number: int, rng: random.Random) -> tuple[int, str]:
    process = tiny.start(words, folder=folder, fresh=True)
    # the handlers are set by the first statement, after the start of the interpreter
    time.sleep(rng.uniform(0.5, 3))
    process.send_signal(number)
    return _ended(process)


def _in_set_up(folder: Path, words: Sequence[str], number: int, rng: random.Random) -> tuple[int, str]:
    process = tiny.start(words, folder=folder)
    tiny.wait_for(lambda: bool(process.output()))
    time.sleep(rng.uniform(0, 0.05))
    process.send_signal(number)
    return _ended(process)


def _after_a_step(times: int = 1, delay: float = 0.1) -> Callable[..., tuple[int, str]]:
    def signalled(folder: Path, words: Sequence[str], number: int, rng: random.Random) -> tuple[int, str]:
        process = tiny.start(words, folder=folder)
        tiny.wait_for_step(_run_of(words, folder), rng.randint(1, 12))
        time.sleep(rng.uniform(0, delay))
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.01)
        return _ended(process)

    return signalled


def _to_one_rank(step: int) -> Callable[..., tuple[int, str]]:
    def signalled(folder: Path, words: Sequence[str], number: int, rng: random.Random) -> tuple[int, str]:
        job = tiny.start_ranks(words, folder=folder)
        one = rng.choice(job.ranks)
        tiny.wait_for(lambda: "Starting with 2 processes" in job.ranks[0].output())
        if step:
            tiny.wait_for_step(_run_of(words, folder), step)
        time.sleep(rng.uniform(0, 0.1))
        one.send_signal(number)
        try:
            statuses = job.wait(90)
        except TimeoutError as error:
            return -1, str(error)
        # rank 0 reports for all ranks
        output = job.ranks[0].output()
        # a rank that has not yet connected to the signalled one may only notice that it is gone
        alike = statuses[1] in ((0,) if step else (0, statuses[0], LOST_STATUS))
        return (statuses[0], output) if alike else (-1, f"{output} (statuses {statuses})")

    return signalled


def _by_launcher(start: Callable[..., tiny.Started]) -> Callable[..., tuple[int, str]]:
    def signalled(folder: Path, words: Sequence[str], number: int, rng: random.Random) -> tuple[int, str]:
        process = start(words, folder=folder)
        tiny.wait_for_step(_run_of(words, folder), 3, seconds=180)
        process.send_signal(number)
        return _ended(process)

    return signalled


MOMENTS = (
    Moment(name="while modules are loaded", signalled=_while_loading, steps=False),
    Moment(name="in set-up", signalled=_in_set_up, steps=False),
    Moment(name="in a step", signalled=_after_a_step(), settings=(EVERY.format(1000),)),
    Moment(name="in validations", signalled=_after_a_step(), settings=(EVERY.format(1000), *VALIDATES)),
    Moment(name="in saves", signalled=_after_a_step(), settings=(EVERY.format(1),)),
    Moment(name="to one of two ranks", signalled=_to_one_rank(4), settings=(*tiny.TWO_RANKS, EVERY.format(1000))),
    Moment(name="with two workers", signalled=_after_a_step(), settings=(EVERY.format(1000), "data.num_workers=2")),
    Moment(name="twice", signalled=_after_a_step(times=2), settings=(EVERY.format(5),)),
    Moment(
        name="to one of two ranks that set up",
        signalled=_to_one_rank(0),
        settings=(*tiny.TWO_RANKS, EVERY.format(1000)),
        steps=False,
    ),
)
"""Moments, used in turn with the kinds of signals: the two counts are coprime, so all pairs occur."""

LAUNCHED = (
    Moment(name="to the launcher of two ranks", signalled=_by_launcher(tiny.start_fresh), settings=tiny.TWO_RANKS),
    # torchrun passes SIGTERM and SIGINT on, and ends with its own status
    Moment(
        name="to torchrun",
        signalled=_by_launcher(tiny.start_torchrun),
        settings=tiny.TWO_RANKS,
        status=lambda number: 1,
    ),
)


def _wrong(folder: Path, moment: Moment, number: int, words: Sequence[str], status: int, output: str) -> str | None:
    """Failure of a run to end correctly, None if it did."""
    run, name = _run_of(words, folder), signal.Signals(number).name
    if status != moment.status(number):
        return f"status {status}, expected {moment.status(number)}: {output[-300:]}"
    saved = list_checkpoints(run / "checkpoints")
    says = [line for line in output.splitlines() if line.startswith(f"{name}: ") and "saving after" not in line]
    expected = "saved " if saved else "stopped, there was nothing to save"
    # a second Ctrl-C ends a run immediately
    at_once = moment.name == "twice" and name == "SIGINT"
    # torchrun prints its own traceback
    if re.search('File ".*/vsa/', output) or (not at_once and (len(says) != 1 or expected not in says[0])):
        return f"it said {says}: {output[-300:]}"
    if moment.steps and not saved:
        return "no checkpoint"
    return None


def _goes_on(folder: Path, words: Sequence[str], straight: Path) -> str | None:
    """Failure of a resumed run to have the losses of the uninterrupted one for three steps, None if it has."""
    run = _run_of(words, folder)
    last = resolve_checkpoint("last", run).step + 3
    ends = [word for word in words if not word.startswith("trainer.max_steps=")]
    ends += [f"trainer.max_steps={last}", "ckpt_path=last"]
    statuses = begin(folder, ends).wait(120)
    if any(statuses):
        return f"statuses {statuses} when it went on"
    losses, expected = (
        {step: row["train/loss"] for step, row in tiny.metrics(each).items() if step <= last and row["train/loss"]}
        for each in (run, straight)
    )
    return None if losses == expected else f"other losses: {losses} instead of {expected}"


def _straight(folder: Path, moment: Moment) -> Path:
    """The uninterrupted run, trained once for each set of samples and number of ranks."""
    ranks = tiny.TWO_RANKS if tiny.TWO_RANKS[0] in moment.settings else ()
    held_out = VALIDATES if VALIDATES[0] in moment.settings else ()
    name = f"straight{len(ranks)}{len(held_out)}"
    run = tiny.run_folder(folder, name)
    if not run.exists():
        words = tiny.words(folder, *ranks, *held_out, f"run={name}", "trainer.max_steps=60", EVERY.format(1000))
        begin(folder, words).wait(300)
    return run


def _row(moments: Sequence[Moment], kinds: Sequence[signal.Signals]) -> Callable[[Path, int, int], Attempts]:
    def run(folder: Path, tries: int, seed: int) -> Attempts:
        rng = random.Random(seed)
        for index in range(tries):
            moment, number = moments[index % len(moments)], kinds[index % len(kinds)]
            settings = [f"run=signal{index}", f"trainer.max_steps={STEPS}"]
            words = tiny.words(folder, *moment.settings, *settings)
            status, output = moment.signalled(folder, words, number, rng)
            failure = _wrong(folder, moment, number, words, status, output)
            if failure is None and list_checkpoints(_run_of(words, folder) / "checkpoints"):
                failure = _goes_on(folder, words, _straight(folder, moment))
            yield f"{number.name} {moment.name}", failure

    return run


ROWS: tuple[Row, ...] = (
    Row(
        name="signals of five kinds at nine moments, on one and two ranks",
        tries=26,
        # the tests of signals cover it
        short_tries=0,
        run=_row(MOMENTS, ENDING),
    ),
    Row(
        name="signals to the launchers of two ranks",
        tries=4,
        short_tries=0,
        run=_row(LAUNCHED, (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT)),
    ),
)
