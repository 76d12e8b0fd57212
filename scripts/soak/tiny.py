"""A tiny run on random latents: a model of two layers and width 12 on 64 tokens, 24 steps, a checkpoint every 3 steps.

`start` forks this process after its imports (one second per run); with `fresh=True` it runs `python train.py`, which
also takes the time of the imports. `start_ranks` starts several ranks with the environment of torchrun.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path

import lightning.fabric.utilities.rank_zero as rank_zero
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import TCPStore

from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.data.codecs import HaarCodec
from vsa.data.shard_writer import ShardWriter
from vsa.data.text import HashedNgramEncoder
from vsa.training.hydra_guard import composed
from vsa.training.train import train

# imports of a run, which forks inherit
import vsa.training.launch  # noqa: F401  isort: skip

ROOT = Path(__file__).parents[2]
STEPS, EVERY, SAMPLES, BATCH = 24, 3, 40, 4
LATENT_SHAPE = (16, 4, 8, 8)
SETTINGS = (
    "data=folder",
    f"data.batch_size={BATCH}",
    "data.num_workers=0",
    "data.val_fraction=0.1",
    "data.val_batches=1",
    "model.num_layers=2",
    "model.num_attention_heads=1",
    "model.attention_head_dim=12",
    "model.ffn_dim=24",
    "model.freq_dim=16",
    "tile_thw=[2,2,2]",
    "sparsity.sparsity=0.5",
    "optim.lr=0.01",
    "optim.schedule.warmup_steps=2",
    "callbacks.progress=null",
    "callbacks.samples=null",
    f"callbacks.checkpoint.every_n_steps={EVERY}",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=1000",
    "trainer.enable_progress_bar=false",
)
"""Settings of the tiny run; `words` adds its folders."""

TOY = ("data=toy_online", "data.toy.size=[8,64,64]", "data.toy.count=48", "tile_thw=[1,2,2]")
"""Further settings of a run of 32 tokens on clips that it renders itself, without `data.root`."""

TWO_RANKS = ("trainer=fsdp", "trainer.devices=2")
"""Further settings of a run of `start_ranks`, or of a run that starts its second process itself (`fresh=True`)."""

TIMES = ("time", "second", "tflops", "mfu", "wait", "memory")
"""Parts of the names of metrics that differ between equal runs."""


def write_shards(folder: Path, *, count: int = SAMPLES, per_shard: int = 10, seed: int = 0) -> Path:
    """Write random latents (16 x 4 x 8 x 8: 64 tokens in 8 tiles) as shards; returns the folder."""
    generator = torch.Generator().manual_seed(seed)
    codec, text = HaarCodec(channels=LATENT_SHAPE[0]), HashedNgramEncoder()
    with ShardWriter(folder, codec=codec, text_encoder=text, samples_per_shard=per_shard) as writer:
        for n in range(count):
            latents = torch.randn(*LATENT_SHAPE, generator=generator)
            writer.add(f"random-{n:04d}", latents, [f"random latents number {n}"], {})
    return folder


def words(folder: Path, *overrides: str) -> list[str]:
    """Settings of the run `folder/outputs/pretrain/default` on `folder/shards`, which are written if missing."""
    shards = folder / "shards"
    if not any(override.startswith("data.root=") for override in overrides) and not shards.exists():
        write_shards(shards)
    keys = {override.partition("=")[0] for override in overrides}
    own = (*SETTINGS, f"data.root={shards}", f"output_dir={folder / 'outputs'}")
    return [*(word for word in own if word.partition("=")[0] not in keys), *overrides]


def train_here(settings: Sequence[str]) -> None:
    """Train in this process."""
    train(composed(*settings))


def run_folder(folder: Path, run: str = "default", *, name: str = "pretrain") -> Path:
    """Run folder of `words(folder, ...)`."""
    return folder / "outputs" / name / run


@dataclass(frozen=True, kw_only=True)
class Started:
    """A training process, with the methods of `subprocess.Popen` and its output.

    Args:
        process: the forked or started process.
        log: file of its stdout and stderr.
    """

    process: subprocess.Popen[bytes] | ForkProcess
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or the negative number of the signal that killed the process; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def wait(self, timeout: float = 120) -> int:
        """Wait for the exit status; raises TimeoutError if the process still runs after `timeout` seconds."""
        if isinstance(self.process, subprocess.Popen):
            try:
                return self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
        else:
            self.process.join(timeout)
            status = self.process.exitcode
        if status is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process, and wait."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def output(self) -> str:
        """Output until now."""
        return self.log.read_text(errors="replace")

    def error_lines(self) -> list[str]:
        """Lines of the output that start with `error: `."""
        return [line for line in self.output().splitlines() if line.startswith("error: ")]


def start(
    arguments: Sequence[str],
    *,
    folder: Path,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    script: str = "train.py",
) -> Started:
    """Start `python train.py ARGUMENTS` in `folder`.

    Args:
        arguments: settings from `words`, or flags and settings of Hydra.
        folder: working directory; the output goes to a new file `log-N` in it.
        fresh: start a new interpreter instead of a fork of this process.
        env: further environment variables.
        script: train.py, or a command of `vsa` ("sample") with its arguments.
    """
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    log.touch()
    command = [*([str(ROOT / script)] if script.endswith(".py") else ["-m", "vsa.cli", script]), *arguments]
    if fresh:
        path = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")))
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Started(process=process, log=log)
    context = multiprocessing.get_context("fork")
    forked = context.Process(target=_run_command, args=(command, folder, log, dict(env or {})))
    forked.start()
    return Started(process=forked, log=log)


start_fresh = partial(start, fresh=True)


def _run_command(command: list[str], folder: Path, log: Path, env: dict[str, str]) -> None:
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    for name in ("lightning.pytorch", "lightning.fabric"):
        # inherited handlers are bound to the streams of the parent
        logging.getLogger(name).handlers = [logging.StreamHandler(sys.stderr)]
    # the handlers that a shell would leave, independent of those of the parent
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    os.environ |= env
    # the modules read these from the environment on import
    rank_zero.rank_zero_only.rank = rank_zero_only.rank = int(env.get("RANK", "0"))
    torch.set_num_threads(1)
    os.chdir(folder)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Processes of one training, rank 0 first, and their rendezvous store, which must outlive them."""

    ranks: tuple[Started, ...]
    store: TCPStore | None

    def wait(self, timeout: float = 120) -> list[int]:
        """Wait for the exit status of each rank; after `timeout` seconds, kill the others and raise TimeoutError."""
        end = time.monotonic() + timeout
        try:
            return [rank.wait(max(0.01, end - time.monotonic())) for rank in self.ranks]
        finally:
            self.kill()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


def start_ranks(
    arguments: Sequence[str],
    *,
    folder: Path,
    world: int = 2,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    script: str = "train.py",
) -> Ranks:
    """Start `world` gloo ranks of one run like torchrun, without its agent; for settings with `TWO_RANKS`."""
    # the parent holds the store, as in torchrun: its port is reserved from the start, and it outlives all ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(world):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "soak",
        }
        ranks.append(start(arguments, folder=folder, fresh=fresh, env={**own, **(env or {})}, script=script))
    return Ranks(ranks=tuple(ranks), store=store)


def start_torchrun(arguments: Sequence[str], *, folder: Path, world: int = 2) -> Started:
    """Start torchrun, which starts its ranks in separate sessions."""
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")))
    flags = ["--standalone", "--nproc-per-node", str(world)]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *flags, str(ROOT / "train.py"), *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Started(process=process, log=log)


def metrics(run: Path) -> dict[int, dict[str, str]]:
    """Rows of metrics.csv by step, without columns of speed, time and memory."""
    with open(run / "metrics.csv", newline="") as file:
        return {
            int(row["step"]): {k: v for k, v in row.items() if not any(part in k.lower() for part in TIMES)}
            for row in csv.DictReader(file)
        }


def digest_of_run(run: Path) -> str:
    """SHA-256 of the weights, averages, moments, step and metrics of a run, which equal runs share."""
    checkpoint = resolve_checkpoint("last", run)
    digest = hashlib.sha256(f"step {checkpoint.step}".encode())
    for group in sorted(checkpoint.groups):
        for key, tensor in sorted(checkpoint.tensors(group).items()):
            digest.update(f"{group}/{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for step, row in sorted(metrics(run).items()):
        digest.update(repr((step, sorted(row.items()))).encode())
    return digest.hexdigest()


def wait_for(condition: Callable[[], bool], *, seconds: float = 60, every: float = 0.005) -> bool:
    """Wait until `condition()` is true; returns False after a timeout of `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every)
    return True


def wait_for_step(run: Path, step: int, *, seconds: float = 60, of: Started | None = None) -> bool:
    """Wait until metrics.csv of a run has a step; returns False after a timeout, or if the process `of` has ended."""

    def reached() -> bool:
        try:
            rows = metrics(run)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(rows) and max(rows) >= step

    wait_for(lambda: reached() or (of is not None and of.poll() is not None), seconds=seconds)
    return reached()
