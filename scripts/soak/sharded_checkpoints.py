"""Rows about checkpoints that several ranks write together."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from scripts.soak.checkpoint_runs import after_kill, damage
from scripts.soak.rows import Attempts, Row
from vsa.checkpoints.retention import prune_checkpoints
from vsa.checkpoints.run_checkpoint import list_checkpoints, write_checkpoint

RANKS = 2


def _start(function: Callable[[Path], None], folder: Path) -> list[ForkProcess]:
    """Run a function on ranks that are child processes."""
    # the server of the store is a thread of this process, which outlives all ranks
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_run, args=(function, folder, rank, store.port)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
        # keeps the store alive as long as the rank
        rank.store = store  # type: ignore[attr-defined]
    return ranks


def _run(function: Callable[[Path], None], folder: Path, rank: int, port: int) -> None:
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=RANKS)
    function(folder)
    # no rank ends while another one still communicates
    dist.barrier()


def _tensors(rows: int, count: int) -> dict[str, dict[str, torch.Tensor]]:
    """Sharded tensors with a number of rows that is not divisible by the number of ranks."""
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    return {
        group: {
            f"w{i}": distribute_tensor(torch.randn(rows, 3, generator=generator), mesh, [Shard(0)])
            for i in range(count)
        }
        for group in ("model", "ema")
    }


def _save_twice(folder: Path) -> None:
    tensors = _tensors(101, 3)
    for step in (1, 2):
        write_checkpoint(folder, tensors, {"step": step}, together=True)
        dist.barrier()


def written_by_ranks(folder: Path) -> Path:
    """Write two checkpoints on two ranks; returns the newer one."""
    for rank in _start(_save_twice, folder):
        rank.join()
        assert rank.exitcode == 0
    return folder / "step-00000002"


def _save_for_ever(folder: Path) -> None:
    tensors = _tensors(83_333, 6)
    for step in range(1, 10_000):
        checkpoint = write_checkpoint(folder, tensors, {"step": step}, together=True)
        if dist.get_rank() == 0:
            prune_checkpoints(folder, checkpoint, 2)
        # the ranks of a run synchronise in the same way
        dist.barrier()


def kills(folder: Path, tries: int, seed: int) -> Attempts:
    """kill -9 of one of two ranks that save 12 MB together in a loop, at random moments of a save."""
    draw = random.Random(seed)
    inside = 0
    for number in range(tries):
        place = folder / str(number)
        place.mkdir()
        ranks = _start(_save_for_ever, place)
        while len(list_checkpoints(place)) < 1 or not list(place.glob(".writing-*")):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.04))
        lost = draw.randrange(RANKS)
        for rank in (ranks[lost], ranks[1 - lost]):
            assert rank.pid is not None
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            rank.join()
            # lets the other rank continue for the time until a run would end it
            time.sleep(0.3)
        in_save, failure = after_kill(place)
        inside += in_save
        yield f"kill {number} of rank {lost}", failure
    return (f"{inside} of {tries} left the folder of a save",)


FILES = tuple(
    f"{group}-0000{rank + 1}-of-0000{RANKS}.safetensors" for group in ("model", "ema") for rank in range(RANKS)
)

SHARDED: tuple[Row, ...] = (
    Row(
        name="checkpoint of two ranks: bit flips and cuts of their files",
        tries=300,
        short_tries=8,
        run=damage(FILES, cuts=True, make=written_by_ranks),
    ),
    Row(name="checkpoint of two ranks: kill -9 of one inside a save", tries=60, short_tries=2, run=kills),
)
