"""Rows about training on several GPUs: signals, NaN and Inf gradients, dead and frozen ranks. They need Hydra."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch

from scripts.soak import tiny
from scripts.soak.rows import Attempts, Row
from vsa.checkpoints.run_checkpoint import list_checkpoints, read_checkpoint, resolve_checkpoint

TIMEOUT = 20
"""Seconds of waiting for a rank after which the others end."""

POISON = """
import sys
import lightning as L
import torch
import vsa.training.train as training
from vsa.cli import main
from vsa.models.sharding import local

step, rank, value = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
make = training._trainer


class Poison(L.Callback):
    def on_after_backward(self, trainer, module):
        if trainer.global_step == step and trainer.global_rank == rank:
            gradient = next(p.grad for p in module.parameters() if p.grad is not None and local(p.grad).numel())
            local(gradient).view(-1)[0] = value


training._trainer = lambda cfg, module, callbacks, loggers: make(cfg, module, [*callbacks, Poison()], loggers)
main(["train", *sys.argv[4:]])
"""
"""Training in which one element of a gradient of one rank is NaN or Inf."""


def gpu_words(folder: Path, *overrides: str) -> list[str]:
    """Settings of the tiny run, sharded over all GPUs, which starts its processes itself."""
    accelerator = os.environ.get("SOAK_ACCELERATOR", "gpu")
    count = torch.cuda.device_count() if accelerator == "gpu" else 2
    devices = ("trainer=fsdp", f"trainer.accelerator={accelerator}", f"trainer.devices={count}")
    return tiny.words(folder, *devices, *overrides)


def ranks_of(started: tiny.Started, count: int) -> list[int]:
    """Process ids of a run that starts its ranks itself, rank 0 first."""

    def children() -> list[int]:
        text = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
        # loader workers have the command line of their parent, but not its RANK
        pids = [int(pid) for pid in text.split()]
        return [pid for pid in pids if b"LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]

    tiny.wait_for(lambda: len(children()) >= count - 1)
    return [started.pid, *children()]


def signals(folder: Path, tries: int, seed: int) -> Attempts:
    """SIGTERM and SIGINT to the first rank, another one, or all: the run saves, has its status, and can be resumed."""
    rng = random.Random(seed)
    for number in range(tries):
        kind, whom = (signal.SIGTERM, signal.SIGINT)[number % 2], ("first", "last", "all")[number // 2 % 3]
        words, run = gpu_words(folder, f"run=r{number}", "trainer.max_steps=400"), tiny.run_folder(folder, f"r{number}")
        process = tiny.start(words, folder=folder, fresh=True)
        step = rng.randint(1, 40)
        if not tiny.wait_for_step(run, step, seconds=240, of=process):
            process.kill()
            yield f"{kind.name} to the {whom}", f"no step {step}: {process.output()[-300:]}"
            continue
        pids = ranks_of(process, 2)
        for pid in {"first": pids[:1], "last": pids[-1:], "all": pids}[whom]:
            os.kill(pid, kind)
        try:
            status = process.wait(120)
        except TimeoutError as error:
            process.kill()
            status = str(error)
        failure = None if status == 128 + kind else f"status {status}: {process.output()[-300:]}"
        if failure is None and not list_checkpoints(run / "checkpoints"):
            failure = "nothing was saved"
        if failure is None:
            saved = resolve_checkpoint("last", run).step
            words = gpu_words(folder, f"run=r{number}", f"trainer.max_steps={saved + 2}", "ckpt_path=last")
            again = tiny.start(words, folder=folder, fresh=True)
            if again.wait(300) or resolve_checkpoint("last", run).step != saved + 2:
                failure = f"the resume: {again.output()[-300:]}"
        yield f"{kind.name} to the {whom} at step {step}", failure


def poisoned(folder: Path, tries: int, seed: int) -> Attempts:
    """NaN or Inf in one gradient of one rank: no rank takes the step, and the training continues."""
    rng = random.Random(seed)
    script = folder / "poison.py"
    script.write_text(POISON)
    for number in range(tries):
        step, rank, value = rng.randint(2, 8), number % 2, ("nan", "inf")[number // 2 % 2]
        settings = ("callbacks.checkpoint.every_n_steps=1", "callbacks.checkpoint.keep=20", "trainer.max_steps=10")
        words, run = gpu_words(folder, *settings, f"run=r{number}"), tiny.run_folder(folder, f"r{number}")
        # replaces train.py, since the launcher starts the same script for the other ranks
        process = tiny.start([str(step), str(rank), value, *words], folder=folder, fresh=True, script=str(script))
        try:
            status = process.wait(300)
        except TimeoutError as error:
            process.kill()
            status = str(error)
        failure = None if status == 0 else f"status {status}: {process.output()[-300:]}"
        if failure is None:
            before, after = (
                read_checkpoint(run / "checkpoints" / f"step-{at:08d}").tensors("model") for at in (step, step + 1)
            )
            names = [name for name in before if not torch.equal(before[name], after[name])]
            skipped = tiny.metrics(run)[step + 1]["skipped_steps"]
            failure = f"{len(names)} tensors moved, {skipped} steps skipped" if names or skipped != "1" else None
        yield f"{value} in rank {rank} at step {step}", failure


def lost_ranks(folder: Path, tries: int, seed: int) -> Attempts:
    """Kill or freeze a rank: the others end within the timeout."""
    rng = random.Random(seed)
    for number in range(tries):
        kind = (signal.SIGSTOP, signal.SIGKILL)[number % 2]
        timeouts = (f"trainer.strategy.timeout={TIMEOUT}", f"trainer.strategy.first_timeout={6 * TIMEOUT}")
        words = gpu_words(folder, *timeouts, f"run=r{number}", "trainer.max_steps=100000")
        process = tiny.start(words, folder=folder, fresh=True)
        step = rng.randint(1, 40)
        if not tiny.wait_for_step(tiny.run_folder(folder, f"r{number}"), step, seconds=240, of=process):
            process.kill()
            yield kind.name, f"no step {step}: {process.output()[-300:]}"
            continue
        pids = ranks_of(process, 2)
        victim, lost = pids[-1], f"rank {len(pids) - 1}"
        os.kill(victim, kind)
        began = time.monotonic()
        try:
            status, seconds = process.wait(TIMEOUT + 30), time.monotonic() - began
            failure = None if status != 0 else "status 0"
            if failure is None and seconds > TIMEOUT + 10:
                failure = f"it took {seconds:.0f} s"
            if failure is None and lost not in process.output():
                failure = f"no line names {lost}: {process.output()[-300:]}"
        except TimeoutError as error:
            failure = str(error)
        finally:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            process.kill()
        yield f"{kind.name} at step {step}", failure


ROWS = (
    Row(name="signals on several GPUs", tries=6, short_tries=1, run=signals),
    Row(name="NaN and Inf in a gradient on several GPUs", tries=4, short_tries=1, run=poisoned),
    Row(name="killed and frozen ranks on several GPUs", tries=4, short_tries=1, run=lost_ranks),
)
