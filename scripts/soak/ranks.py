"""Rows about frozen, dead and slow ranks, and about the equality of training on any number of ranks.

`python -m scripts.soak.ranks` prints a table of the differences between numbers of ranks.
"""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from scripts.soak import tiny
from scripts.soak.resume import settings_of
from scripts.soak.rows import Attempts, Row
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.training.watch import LOST_STATUS

TIMEOUT = 6.0
"""Timeout in seconds; the other ranks have ten more seconds to write their stacks and to end."""

ENDLESS = (
    *tiny.TWO_RANKS,
    "trainer.max_steps=100000",
    "callbacks.checkpoint.every_n_steps=10",
    f"trainer.strategy.timeout={TIMEOUT}",
    "trainer.strategy.first_timeout=120",
)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wrong(run: Path, lost: int, output: str, status: int | None, seconds: float) -> str | None:
    """Failure of a rank to end correctly after its partner was lost, None if it did."""
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    if status != LOST_STATUS:
        return f"status {status} after {seconds:.1f} s: {output[-300:]}"
    if len(lines) != 1 or not re.match(rf"error: rank {lost} \(pid \d+ on ", lines[0]) or "Traceback" in output:
        return f"it said {lines}: {output[-300:]}"
    if not (run / f"stacks-rank-{1 - lost}.txt").read_text():
        return "no stacks"
    # the ranks may notice it half a heartbeat apart
    return None if seconds < TIMEOUT + 10 else f"{seconds:.1f} s"


def _lost(folder: Path, name: str, number: int, lost: int, rng: random.Random) -> str | None:
    """Freeze or kill one of two ranks that run without a launcher."""
    run = tiny.run_folder(folder, name)
    job = tiny.start_ranks(settings_of(folder, *ENDLESS, f"run={name}"), folder=folder)
    try:
        if not tiny.wait_for_step(run, rng.randint(3, 20), seconds=120):
            return f"no steps: {job.ranks[0].output()[-300:]}"
        time.sleep(rng.uniform(0, 0.1))
        began = time.monotonic()
        job.ranks[lost].send_signal(number)
        other = job.ranks[1 - lost]
        status = other.wait(TIMEOUT + 30)
        return _wrong(run, lost, other.output(), status, time.monotonic() - began)
    except TimeoutError as error:
        return str(error)
    finally:
        job.kill()


def _lost_of_launcher(
    folder: Path, name: str, number: int, lost: int, start: Callable[..., tiny.Started], expected: int
) -> str | None:
    """Freeze or kill one of two ranks of a launcher; no process of the run may be left."""
    run = tiny.run_folder(folder, name)
    process = start(settings_of(folder, *ENDLESS, f"run={name}"), folder=folder)
    try:
        if not tiny.wait_for_step(run, 3, seconds=240):
            return f"no steps: {process.output()[-300:]}"
        family = _children_of(process.pid)
        # torchrun has both ranks as children, otherwise rank 0 is the launcher
        ranks = family if len(family) > 1 else [process.pid, *family]
        began = time.monotonic()
        os.kill(ranks[lost], number)
        if ranks[lost] != process.pid:
            # torchrun waits for half a minute before it kills a frozen rank
            status = process.wait(TIMEOUT + 60)
            if status != expected:
                return f"status {status}: {process.output()[-300:]}"
        other_pids = [pid for pid in ranks if pid != ranks[lost]]
        if not tiny.wait_for(lambda: not any(map(_alive, other_pids)), seconds=TIMEOUT + 20):
            return f"a rank is left after {time.monotonic() - began:.1f} s"
        # torchrun may notice it first and end the other rank by SIGTERM
        prefixes = (f"error: rank {lost} (pid ", f"SIGTERM: rank {lost} (pid ")
        lines = [line for line in process.output().splitlines() if line.startswith(prefixes)]
        return None if len(lines) == 1 else f"it said {lines}: {process.output()[-300:]}"
    finally:
        for pid in {process.pid, *_children_of(process.pid)} if _alive(process.pid) else set[int]():
            os.kill(pid, signal.SIGKILL)
        process.wait()


def frozen(folder: Path, tries: int, seed: int) -> Attempts:
    """SIGSTOP to one of two ranks, in the last try with the launcher."""
    rng = random.Random(seed)
    for number in range(tries):
        name, lost = f"frozen{number}", number % 2
        if number == 4:
            failure = _lost_of_launcher(folder, name, signal.SIGSTOP, 1, tiny.start_fresh, LOST_STATUS)
        else:
            failure = _lost(folder, name, signal.SIGSTOP, lost, rng)
        yield f"rank {lost}", failure


def dead(folder: Path, tries: int, seed: int) -> Attempts:
    """SIGKILL to one of two ranks: four times without a launcher, twice with it, once with torchrun."""
    rng = random.Random(seed)
    for number in range(tries):
        name, lost = f"dead{number}", number % 2
        if number < 4:
            failure = _lost(folder, name, signal.SIGKILL, lost, rng)
        elif number < 6:
            failure = _lost_of_launcher(folder, name, signal.SIGKILL, lost, tiny.start_fresh, LOST_STATUS)
        else:
            # torchrun has its own status
            failure = _lost_of_launcher(folder, name, signal.SIGKILL, 1, tiny.start_torchrun, 1)
        yield f"rank {lost}, try {number}", failure


def waiting(folder: Path, tries: int, seed: int) -> Attempts:
    """Send SIGTERM to a rank that waits for a frozen one."""
    rng = random.Random(seed)
    for number in range(tries):
        name, lost = f"waiting{number}", number % 2
        run, words = tiny.run_folder(folder, name), settings_of(folder, *ENDLESS, f"run=waiting{number}")
        words = [*(word for word in words if "strategy.timeout" not in word), "trainer.strategy.timeout=1000"]
        job = tiny.start_ranks(words, folder=folder)
        try:
            tiny.wait_for_step(run, rng.randint(3, 20), seconds=120)
            job.ranks[lost].send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0, 3))
            other = job.ranks[1 - lost]
            other.send_signal(signal.SIGTERM)
            status = other.wait(30)
            lines = [line for line in other.output().splitlines() if line.startswith(f"SIGTERM: rank {lost} (pid ")]
            failure = None if status == 143 and len(lines) == 1 else f"status {status}: {other.output()[-300:]}"
        except TimeoutError as error:
            failure = str(error)
        finally:
            job.kill()
        yield f"rank {1 - lost} waits", failure


def slow(folder: Path, tries: int, seed: int) -> Attempts:
    """Stop one of two ranks half of the time: it is named within 60 steps; without stops, no rank is named."""
    for number in range(tries):
        name, one = f"slow{number}", (None, 1, 0)[number % 3]
        words = settings_of(folder, *tiny.TWO_RANKS, f"run={name}", "trainer.max_steps=110")
        job = tiny.start_ranks(words, folder=folder)
        tiny.wait_for_step(tiny.run_folder(folder, name), 1, seconds=120)
        while job.ranks[0].poll() is None:
            for signalled, seconds in ((signal.SIGSTOP, 0.06), (signal.SIGCONT, 0.03)):
                if one is not None:
                    job.ranks[one].send_signal(signalled)
                time.sleep(seconds)
        statuses = job.wait(60)
        slow_ranks = re.findall(r"rank (\d+) is \d+% behind the others over 50 steps", job.ranks[0].output())
        expected = [] if one is None else [str(one)] * 2
        failure = None if slow_ranks == expected and not any(statuses) else f"statuses {statuses}, named {slow_ranks}"
        yield "nobody is slow" if one is None else f"rank {one} is slow", failure


# equality of every task on any number of processes

# the large eps prevents Adam from amplifying the rounding of gradients near zero to whole steps
COMMON = ("optim.eps=0.01", "trainer.max_steps=6", "callbacks.checkpoint.every_n_steps=6", "name=parity")
DENSE = (*COMMON, "attention=full", "start=dense", "run=dense")
TASKS: dict[str, tuple[str, ...]] = {
    "pretrain": ("trainer.val_check_interval=3",),
    "finetune": ("task=finetune", "start=dense", "task.objective.velocity=0.5", "trainer.val_check_interval=3"),
    "distill": (
        *("task=distill", "start=dense", "task.generator_every=2", "task.objective.guidance=2.5"),
        *("optim.betas=[0.0,0.99]", "task.fake_score_optim.eps=0.01", "callbacks.ema.decay=0.5"),
    ),
}
STRATEGIES, WORLDS = ("ddp", "fsdp"), (1, 2, 4)
TOLERANCE = 2e-6
"""Tolerance of weights, averages and moments of size 1 to 10 after six steps, due to the order of fp32 sums."""


def _trained(folder: Path, words: Sequence[str], world: int) -> str | None:
    job = tiny.start_ranks(words, folder=folder, world=world) if world else None
    statuses = job.wait(300) if job is not None else [tiny.start(words, folder=folder).wait(300)]
    return f"statuses {statuses}" if any(statuses) else None


def difference(one: Path, other: Path) -> float:
    """Largest difference of weights, averages and moments of all networks, and largest relative one of losses."""
    a, b = resolve_checkpoint("last", one), resolve_checkpoint("last", other)
    largest = 0.0
    for group in a.groups:
        ours, theirs = a.tensors(group), b.tensors(group)
        assert set(ours) == set(theirs)
        for name, value in ours.items():
            largest = max(largest, float((value - theirs[name]).abs().max()))
    rows, others = tiny.metrics(one), tiny.metrics(other)
    assert set(rows) == set(others)
    for step, row in rows.items():
        for name in ("train/loss", "val/loss", "fake_score/loss"):
            if row.get(name):
                largest = max(largest, abs(float(row[name]) / float(others[step][name]) - 1))
    return largest


def parity(folder: Path, cells: Sequence[tuple[str, str, int]]) -> dict[tuple[str, str, int], float | str]:
    """The difference to one process without a strategy, or the failure, by task, strategy and number of ranks."""
    differences: dict[tuple[str, str, int], float | str] = {}
    dense = tiny.run_folder(folder, "dense", name="parity")
    for task in dict.fromkeys(task for task, _, _ in cells):
        if task != "pretrain" and not dense.exists():
            assert _trained(folder, settings_of(folder, *DENSE, "optim.eps=1e-8"), 0) is None
        begins = () if task == "pretrain" else (f"init_from={dense}",)
        common = (*COMMON, *TASKS[task], *begins)
        alone = tiny.run_folder(folder, task, name="parity")
        assert _trained(folder, settings_of(folder, *common, f"run={task}"), 0) is None
        for cell in (cell for cell in cells if cell[0] == task):
            _, strategy, world = cell
            name = f"{task}-{strategy}-{world}"
            spread = (f"trainer={strategy}", f"trainer.devices={world}", f"run={name}")
            failure = _trained(folder, settings_of(folder, *common, *spread), world)
            differences[cell] = failure or difference(alone, tiny.run_folder(folder, name, name="parity"))
        # control: other batches must differ by more than rounding
        other = settings_of(folder, *common, "data.seed=1", f"run={task}-other")
        assert _trained(folder, other, 0) is None
        assert difference(alone, tiny.run_folder(folder, f"{task}-other", name="parity")) > 100 * TOLERANCE
    return differences


CELLS = tuple((task, strategy, world) for task in TASKS for strategy in STRATEGIES for world in WORLDS)


def parity_row(folder: Path, tries: int, seed: int) -> Attempts:
    """All tasks with all strategies and numbers of ranks."""
    for (task, strategy, world), gap in parity(folder, CELLS[:tries]).items():
        alike = isinstance(gap, float) and gap < TOLERANCE
        yield f"{task}, {strategy}, {world} ranks", None if alike else f"it differs by {gap}"


def table(differences: dict[tuple[str, str, int], float | str]) -> str:
    """Format the differences as a Markdown table."""
    lines = ["| task | strategy | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in WORLDS) + " |"]
    lines.append("|---|---|" + "---|" * len(WORLDS))
    for task in TASKS:
        for strategy in STRATEGIES:
            cells = [differences[task, strategy, world] for world in WORLDS]
            texts = [cell if isinstance(cell, str) else f"{cell:.1e}" if cell else "0" for cell in cells]
            lines.append(f"| {task} | `{strategy}` | " + " | ".join(texts) + " |")
    return "\n".join(lines)


ROWS: tuple[Row, ...] = (
    Row(name="a frozen rank (SIGSTOP): the other ends in time and names it", tries=5, short_tries=0, run=frozen),
    Row(name="a dead rank (SIGKILL): the other ends in time and names it", tries=7, short_tries=1, run=dead),
    Row(name="SIGTERM to a rank that waits for a frozen one", tries=4, short_tries=0, run=waiting),
    Row(name="a slow rank is named, none in a run that is left alone", tries=3, short_tries=0, run=slow),
    Row(
        name="pretraining, finetuning and distilling on 1, 2 and 4 ranks are one process",
        tries=len(CELLS),
        short_tries=0,
        run=parity_row,
    ),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        print(table(parity(Path(temporary), CELLS)))
