"""Runs a function on several ranks: forked processes with the environment that torchrun gives its own."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import lightning.fabric.utilities.rank_zero as rank_zero
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import TCPStore


def run_ranks(world: int, function: Callable[[int], Any], seconds: float = 200) -> list[Any]:
    """What `function(rank)` returned, by rank.

    Args:
        world: number of processes.
        function: run on every rank; its result must pickle.
        seconds: after which all are killed.

    Raises:
        AssertionError: a rank failed or hung; holds its traceback.
    """
    # as torchrun does, the parent holds the store: its port is taken from the start, and it outlives every rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_run, args=(rank, world, store.port, function, pipes[rank][1])) for rank in range(world)
    ]
    for process in processes:
        process.start()
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


def _run(rank: int, world: int, port: int, function: Callable[[int], Any], pipe: Connection) -> None:
    become_rank(rank, world, port)
    try:
        pipe.send((None, function(rank)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))


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
