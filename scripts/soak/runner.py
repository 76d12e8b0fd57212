"""Runner of rows: each runs in its own process and empty folder, and all processes that it leaves behind are ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

from scripts.soak.rows import Outcome, Row, counted

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row and its outcome."""

    row: Row
    outcome: Outcome
    seconds: float

    @property
    def lost(self) -> int:
        return self.outcome.tried - self.outcome.survived


@dataclass(frozen=True, kw_only=True)
class _Running:
    row: Row
    tries: int
    process: ForkProcess
    pipe: Connection
    began: float


def run_rows(
    rows: Sequence[Row], folder: Path, *, short: bool = False, seed: int = 0, jobs: int = 1
) -> Generator[Result]:
    """Run rows and yield each result as its row ends; closing the generator ends the running rows.

    Args:
        rows: rows to run, in this order.
        folder: gets one folder per row, `00`, `01` and so on, with the output of the row in `row.log`.
        short: run `short_tries` instead of `tries`, at least one.
        seed: seed of every row.
        jobs: number of parallel rows.
    """
    waiting = list(enumerate(rows))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, row = waiting.pop(0)
                own = folder / f"{number:02d}"
                own.mkdir()
                running.append(_start(row, own, max(1, row.short_tries) if short else row.tries, seed))
            ends = [one.began + one.row.seconds for one in running]
            # with a timeout, because processes that a dead row left behind keep its pipe open
            wait([one.pipe for one in running], timeout=min(1.0, max(0.0, min(ends) - time.monotonic())))
            for one in [one for one in running if _has_ended(one)]:
                result = _finished(one)
                running.remove(one)
                yield result
    finally:
        for one in running:
            _end(one.process)


def _start(row: Row, folder: Path, tries: int, seed: int) -> _Running:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(row, folder, tries, seed, sender))
    process.start()
    sender.close()
    return _Running(row=row, tries=tries, process=process, pipe=receiver, began=time.monotonic())


def _has_ended(one: _Running) -> bool:
    return one.pipe.poll() or not one.process.is_alive() or time.monotonic() > one.began + one.row.seconds


def _finished(one: _Running) -> Result:
    outcome = None
    with suppress(EOFError):
        outcome = one.pipe.recv() if one.pipe.poll() else None
    status = None if one.process.is_alive() else one.process.exitcode
    why = f"not finished in {one.row.seconds:g} s" if status is None else f"the process of the row has status {status}"
    seconds = time.monotonic() - one.began
    _end(one.process)
    # the survived tries of an unfinished row are unknown
    outcome = outcome or Outcome(tried=one.tries, survived=0, failures=(why,))
    return Result(row=one.row, outcome=outcome, seconds=seconds)


def _run(row: Row, folder: Path, tries: int, seed: int, pipe: Connection) -> None:
    # a new session, so that Ctrl-C of a terminal reaches only the runner, which ends the rows
    os.setsid()
    # orphaned processes become children of the row, so that they can be found
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(folder / "row.log", "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    torch.set_num_threads(1)
    os.chdir(folder)
    try:
        outcome = counted(row.run(folder, tries, seed))
    except BaseException as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        outcome = Outcome(tried=tries, survived=0, failures=(" ".join(failure.split()),))
    pipe.send(outcome)


def _end(process: ForkProcess) -> None:
    """Kill the process of a row and all of its descendants."""
    assert process.pid is not None
    # stopped first, so that it starts no further processes; orphans are its children
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)
    for _ in range(100):
        below = _descendants(process.pid)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not below:
            break
        time.sleep(0.02)
    process.kill()
    process.join()


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            # processes that a dead row left behind have another parent, but its session; zombies wait for their parent
            above, own = pid if int(session) == pid else int(parent), int(path.parent.name)
            if state != "Z" and own != pid:
                children.setdefault(above, []).append(own)
    below, unseen = [], [pid]
    while unseen:
        pids = children.get(unseen.pop(), [])
        below += pids
        unseen += pids
    return below
