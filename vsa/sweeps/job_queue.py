"""Process queue: one process at a time on every slot of the machine, all of which end with the queue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from types import FrameType
from typing import Literal

from vsa.signals import handled_by
from vsa.streams import LOADING

Status = Literal["waiting", "running", "finished", "failed", "refused", "stopped"]

_TICK = 0.1


@dataclass(frozen=True, eq=False)
class Slot:
    """A place for one process.

    Args:
        name: name of the device, for messages.
        environment: environment variables that select the device, and its threads unless the user has set them.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Job:
    """A process to run.

    Args:
        name: name of the job.
        command: the command with its arguments.
        log: file for the output of the process, appended to that of earlier starts.
        settings: overrides in its command.

    Attributes:
        status: present state.
        reason: reason of a failure, in one line.
        seconds: duration.
        device: name of its slot.
    """

    name: str
    command: Sequence[str]
    log: Path
    settings: Sequence[str] = ()
    status: Status = "waiting"
    reason: str | None = None
    seconds: float | None = None
    device: str | None = None


class _Running:
    """A job with its process."""

    def __init__(self, job: Job, slot: Slot):
        self.job, self.slot = job, slot
        # threads that the user has set stand: they know what else runs on the machine
        threads = {key: value for key, value in os.environ.items() if key == "OMP_NUM_THREADS"}
        self.began = time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "ab") as log:
            self._from = log.tell()
            # a separate process group, so that only the queue forwards signals of the terminal, and each arrives once
            self.process = Popen(
                job.command,
                # a sweep sets HYDRA_FULL_ERROR=1 for itself, its runs report errors in one line
                env={**os.environ, "HYDRA_FULL_ERROR": "0", **slot.environment, **threads},
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                process_group=0,
            )
        job.status, job.device, job.reason = "running", slot.name, None

    def signal(self, number: int) -> None:
        """Send SIGKILL to the whole group; other signals go to the leader, which forwards them to its ranks."""
        if self.process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def ended(self, asked: bool) -> bool:
        """Whether the process has ended; if so, its outcome is stored in the job."""
        code = self.process.poll()
        if code is None:
            return False
        # kill child processes that it left behind
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.job.seconds = time.monotonic() - self.began
        if code == 0:
            self.job.status = "finished"
        elif asked:
            self.job.status = "stopped"
        else:
            self.job.status = "failed"
            self.job.reason = self._reason(code)
        return True

    def _reason(self, code: int) -> str:
        if code < 0 or code > 128:
            return f"ended by {signal.Signals(-code if code < 0 else code - 128).name}"
        with open(self.job.log, "rb") as log:
            log.seek(self._from)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if line not in ("", LOADING)]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or [f"exit status {code}"])[-1]


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that end a sweep, in the order of their arrival."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    with handled_by(note):
        yield received


def run_jobs(
    jobs: Sequence[Job],
    slots: Sequence[Slot],
    *,
    changed: Callable[[Job], None],
    tick: Callable[[], None],
    grace: float,
) -> int | None:
    """Run all jobs, each on the first free slot; a failed job does not stop the others.

    After a signal, no further job starts, and the signal is forwarded to the running jobs. Those that have not ended
    after `grace` seconds are killed; a second SIGINT kills all of them at once.

    Args:
        jobs: jobs in the order of starting; their status is updated.
        slots: slots, each of which runs one job at a time.
        changed: function called with every job whose status has changed.
        tick: function called several times per second.
        grace: time in seconds for running jobs to end after a signal.

    Returns:
        the signal that ended the queue early; None: every job was started and has ended.
    """
    waiting, running, free = list(jobs), [], list(slots)
    deadline = None
    with _signals() as received:
        try:
            while running or (waiting and not received):
                while waiting and free and not received:
                    job = waiting.pop(0)
                    running.append(_Running(job, free.pop(0)))
                    changed(job)
                if received and deadline is None:
                    deadline = time.monotonic() + grace
                    for one in running:
                        one.signal(received[0])
                if deadline is not None and (time.monotonic() > deadline or received[1:].count(signal.SIGINT)):
                    for one in running:
                        one.signal(signal.SIGKILL)
                for one in [one for one in running if one.ended(asked=bool(received))]:
                    running.remove(one)
                    # prefer the first slots
                    free = [slot for slot in slots if slot in (*free, one.slot)]
                    changed(one.job)
                tick()
                time.sleep(_TICK)
        finally:
            # only after an exception of the queue itself
            for one in running:
                one.signal(signal.SIGKILL)
                one.process.wait()
    return received[0] if received else None
