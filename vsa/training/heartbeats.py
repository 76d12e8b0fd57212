"""Heartbeats of the ranks of a run, exchanged outside its collectives, with their progress."""

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
from torch.distributed import distributed_c10d


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Heartbeat of one rank.

    Args:
        count: running number of the beat, so that no two are equal.
        moves: number of steps begun and ended; in a stalled run, the rank with the fewest is the last one.
        calls: number of collectives begun; of ranks in one step, that with the fewest keeps the others waiting.
        doing: current activity, such as "step 12".
        paused: whether the rank is in a phase without time limit.
        pid: process id.
        host: host name, for messages.
        place: host and process namespace; ranks in the same place can inspect each other's processes.
        signal: signal that the rank received; 0: none.
        left: reason why the rank left the run.
        verdict: reason for which the rank ends the run.
        status: exit status of all ranks in that case.
        culprit: the lost rank, if one is lost.
    """

    count: int = 0
    moves: int = 0
    calls: int = 0
    doing: str = "the start"
    paused: bool = True
    pid: int
    host: str
    place: str
    signal: int = 0
    left: Literal["", "done", "stopped", "failed"] = ""
    verdict: str = ""
    status: int = 0
    culprit: int | None = None


def own_heartbeat() -> Heartbeat:
    """The first beat of this process."""
    host, pid = socket.gethostname(), os.getpid()
    place = f"{host} {pid}"
    with suppress(OSError):
        # containers have separate process namespaces; without /proc no process can be inspected
        place = f"{host} {os.readlink('/proc/self/ns/pid')}"
    return Heartbeat(pid=pid, host=host, place=place)


def collectives_begun() -> int:
    """Number of collectives that this rank has begun, in all of its process groups together."""
    begun = 0
    for group in list[Any](distributed_c10d._world.pg_map):
        # not every backend counts
        with suppress(RuntimeError):
            begun += group._get_sequence_number_for_group()
    return begun


class HeartbeatExchange:
    """The ranks of a run, each of which sends a heartbeat every `interval` seconds.

    Beats use the store of the process group over a separate connection, so they continue while a rank waits in a
    collective. All ranks must construct it at the same time.

    Args:
        say: function that returns the beat of this rank.
        interval: seconds between beats.
        patience: seconds within which every rank must have joined.
    """

    def __init__(self, say: Callable[[], Heartbeat], *, interval: float, patience: float):
        self.rank, self.world, self._say, self._interval = dist.get_rank(), dist.get_world_size(), say, interval
        # rank 0 hosts the store, unless the launcher does
        self.host_rank = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()
        store.set_timeout(timedelta(seconds=patience))
        # a process may train several times, so each time has its own keys
        number = store.add(f"vsa/fits/{self.rank}", 1)
        self._store = dist.PrefixStore(f"vsa/beats/{number}", store)
        self._keys = [str(rank) for rank in range(self.world)]
        self._stop, self._now = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)
        self.beats: list[Heartbeat] = []
        self.heard_at = time.monotonic()
        self.failure: str | None = None

    def open(self) -> None:
        """Wait for the first beat of every rank, then continue in a thread."""
        self._exchange(0)
        self._thread.start()

    def _exchange(self, count: int) -> None:
        self._say_own(count)
        self.beats = [Heartbeat(**json.loads(text)) for text in self._store.multi_get(self._keys)]
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
                # the process that hosts the store has ended
                self.failure = str(error).partition("\n")[0]
                return

    def tell(self) -> None:
        """Send the next beat immediately."""
        self._now.set()

    def close(self) -> None:
        """Send a last beat, even if a signal arrived before the first exchange."""
        self._stop.set()
        self._now.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._interval)
        elif not self.beats:
            with suppress(RuntimeError):
                self._say_own(0)


def state_of_process(pid: int) -> str | None:
    """State letter of a process on this host, T: stopped; None: it does not exist or has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return None if state in "ZX" else state
