"""Runs a function on several ranks: forked processes with the environment that torchrun gives its own."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import lightning.fabric.utilities.rank_zero as rank_zero
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import TCPStore

from tests.limits import HANGS

Ports = SimpleQueue[int]

# a forked process gets a new thread pool on first use, for which the threads of several GPUs would race (torch 2.11)
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def run_ranks(world: int, function: Callable[[int], Any], seconds: float = HANGS) -> list[Any]:
    """What `function(rank)` returned, by rank.

    Args:
        world: number of processes.
        function: run on every rank; its result must pickle.
        seconds: after which all are killed.

    Raises:
        AssertionError: a rank failed or hung; holds its traceback.
    """
    context = multiprocessing.get_context("fork")
    pipes, ports = [context.Pipe(duplex=False) for _ in range(world)], context.SimpleQueue()
    processes = [
        context.Process(target=_run, args=(rank, world, ports, function, pipes[rank][1])) for rank in range(world)
    ]
    for process in processes:
        process.start()
    store = store_of(world, ports)
    end = time.monotonic() + seconds
    try:
        results = []
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(max(0.0, end - time.monotonic())), f"rank {rank} did not end in {seconds} s"
            failure, result = receiver.recv()
            assert failure is None, f"rank {rank}: {failure}"
            results.append(result)
        return results
    finally:
        for process in processes:
            process.join(max(0.1, min(5.0, end - time.monotonic())))
            process.kill()
            process.join()
        # it has served the ranks until here
        del store


def _run(rank: int, world: int, ports: Ports, function: Callable[[int], Any], pipe: Connection) -> None:
    become_rank(rank, world, ports.get())
    try:
        pipe.send((None, function(rank)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))


def store_of(world: int, ports: Ports) -> TCPStore:
    """The store of ranks that are forked already, of whom each gets its port.

    As torchrun does, the parent holds it: its port is taken from the start, and it outlives every rank. A rank that is
    forked while the thread of the store answers another would wait forever for a lock that this thread had.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(world):
        ports.put(store.port)
    return store


def become_rank(rank: int, world: int, port: int) -> None:
    """Give this process what torchrun gives a rank of its own.

    Args:
        rank: of this process.
        world: number of ranks.
        port: of a store here.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
    }
    # set from the environment when the module is imported, which was before the fork
    rank_zero.rank_zero_only.rank = rank_zero_only.rank = rank


class Ranks:
    """Ranks that run a function until they are told, killed or done; the end of a block kills those that are left.

    Args:
        world: number of processes; a single one is no rank of anything.
        function: run on every rank.
        folder: for what each prints, `output-RANK`.
    """

    def __init__(self, world: int, function: Callable[[int], object], folder: Path):
        self._folder, self._world, self._function = folder, world, function
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("fork")
        self._ports: Ports = context.SimpleQueue()
        self.processes = [context.Process(target=self._run, args=(rank,)) for rank in range(world)]
        for process in self.processes:
            process.start()
        self._store = store_of(world, self._ports)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _run(self, rank: int) -> None:
        # PR_SET_PDEATHSIG: no rank outlives a parent that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        with open(self._file(rank), "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        # those of the parent write to its own streams, or a second time to these
        for name, handlers in (("", 0), ("lightning", 0), ("lightning.pytorch", 1), ("lightning.fabric", 1)):
            logging.getLogger(name).handlers = [logging.StreamHandler(sys.stderr)] * handlers
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._world > 1:
            become_rank(rank, self._world, self._ports.get())
        self._function(rank)

    def lose_store(self) -> None:
        """End the store of the ranks, as with the agent that holds it."""
        del self._store

    def _file(self, rank: int) -> Path:
        return self._folder / f"output-{rank}"

    def output(self, rank: int = 0) -> str:
        """What a rank has printed."""
        return self._file(rank).read_text(errors="replace") if self._file(rank).exists() else ""

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all of them."""
        for rank in ranks or range(self._world):
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, number)  # type: ignore[arg-type]

    def ended(self) -> bool:
        """Whether any rank has ended."""
        return any(process.exitcode is not None for process in self.processes)

    def statuses(self, seconds: float = HANGS, *, without: int | None = None) -> list[int | None]:
        """The status of each rank, None where it still runs after `seconds`; `without` is not waited for."""
        end = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            if rank != without:
                process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]


def wait_for(condition: Callable[[], object], seconds: float = HANGS) -> bool:
    """Wait until a condition holds; False after `seconds` without it."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
