"""What the ranks of a run tell each other beside their collectives: that they are alive, and how far."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What one rank says, again and again.

    Args:
        count: of beats, so that no two are equal.
        moves: steps begun and ended; the least is the last of a run that stands.
        doing: "step 12".
        paused: it is busy with what has no time limit.
        pid: of its process.
        host: where that runs, for people.
        place: where that runs; of one place, one can look at the other's process.
        signal: that it received; 0: none.
        left: how it left the run.
        verdict: why it ends the run.
        culprit: rank that is lost then.
    """

    count: int = 0
    moves: int = 0
    doing: str = "the start"
    paused: bool = True
    pid: int
    host: str
    place: str
    signal: int = 0
    left: Literal["", "done", "stopped", "failed"] = ""
    verdict: str = ""
    culprit: int | None = None


def own_beat() -> Beat:
    """The first beat of this process."""
    host, pid = socket.gethostname(), os.getpid()
    place = f"{host} {pid}"
    with suppress(OSError):
        # a container has processes of its own; without /proc none can be looked at
        place = f"{host} {os.readlink('/proc/self/ns/pid')}"
    return Beat(pid=pid, host=host, place=place)


class Meeting:
    """The ranks of a run, each of which says a beat every `interval` seconds.

    It goes through the store by which the ranks met, over a connection of its own: where a rank waits in a collective
    its beat goes on. Made by all ranks at once.

    Args:
        say: gives the beat of this rank.
        interval: seconds.
        patience: seconds in which every rank must have come.
    """

    def __init__(self, say: Callable[[], Beat], *, interval: float, patience: float):
        self.rank, self.world, self._say, self._interval = dist.get_rank(), dist.get_world_size(), say, interval
        # rank 0 holds the store, unless what started the ranks does
        self.host_rank = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()
        store.set_timeout(timedelta(seconds=patience))
        # a process may train several times
        number = store.add(f"vsa/fits/{self.rank}", 1)
        self._store = dist.PrefixStore(f"vsa/beats/{number}", store)
        self._keys = [str(rank) for rank in range(self.world)]
        self._stop, self._now = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)
        self.beats: list[Beat] = []
        self.heard_at = time.monotonic()
        self.failure: str | None = None

    def open(self) -> None:
        """Wait for the first beat of every rank, and go on by itself."""
        self._exchange(0)
        self._thread.start()

    def _exchange(self, count: int) -> None:
        self._say_own(count)
        self.beats = [Beat(**json.loads(text)) for text in self._store.multi_get(self._keys)]
        self.heard_at = time.monotonic()

    def _say_own(self, count: int) -> None:
        self._store.set(str(self.rank), json.dumps(asdict(replace(self._say(), count=count))))

    def _run(self) -> None:
        count = 0
        while not self._stop.is_set():
            self._now.wait(self._interval)
            self._now.clear()
            count += 1
            try:
                self._exchange(count)
            except RuntimeError as error:
                # who holds the store has ended
                self.failure = str(error).partition("\n")[0]
                return

    def tell(self) -> None:
        """Say the next beat at once."""
        self._now.set()

    def close(self) -> None:
        """Say a last beat, also where a signal has come before the first ones were heard."""
        self._stop.set()
        self._now.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._interval)
        elif not self.beats:
            with suppress(RuntimeError):
                self._say_own(0)


def state_of_process(pid: int) -> str | None:
    """Letter of the state of a process here, T: it was stopped; None: there is none or it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return None if state in "ZX" else state
