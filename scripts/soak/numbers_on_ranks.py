"""Rows about numerics on two ranks: the replay of a dropped step, loss spikes.

As a script, `numbers_on_ranks.py FAULT SETTINGS...` is one rank of a training with a fault: JSON of the callback's
name and its arguments.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import lightning as L

from scripts.soak.numbers import Outlier, SpoilAt, watched, with_callbacks
from scripts.soak.rows import Attempts, Row
from scripts.soak.tiny import TOY, TWO_RANKS, metrics, run_folder, start_ranks, words
from vsa.cli import main
from vsa.training.replay import replay_step


def train_on_two(folder: Path, callback: type[L.Callback], arguments: tuple[Any, ...], *overrides: str) -> str:
    """Train a tiny run on two ranks that both have the callback; returns an empty string, or what went wrong."""
    settings = words(folder, *TWO_RANKS, *overrides)
    if TOY[0] in overrides:
        settings = [word for word in settings if not word.startswith("data.root=")]
    fault = json.dumps([callback.__name__, *arguments])
    ranks = start_ranks([fault, *settings], folder=folder, script="scripts/soak/numbers_on_ranks.py")
    try:
        status = ranks.wait(240)
    except TimeoutError as error:
        return str(error)
    outputs = [rank.output()[-200:] for rank in ranks.ranks]
    return "" if status == [0, 0] else f"exit status {status}: {outputs}"


class SpoilOne(SpoilAt):
    """`SpoilAt` on one of the ranks."""

    def __init__(self, rank: int, *arguments: Any):
        super().__init__(*arguments)
        self.rank = rank

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)


def replayed(folder: Path, tries: int, seed: int) -> Attempts:
    """A bad latent on one of the ranks: the replay in one process has the losses of both and names the sample."""
    numbers = random.Random(seed)
    for number in range(tries):
        rank, value, step = number % 2, (math.nan, math.inf)[number // 2 % 2], numbers.randrange(0, 8)
        accumulate = numbers.choice((1, 2))
        settings = (f"run=r{number}", f"seed={seed + number}", f"trainer.accumulate_grad_batches={accumulate}")
        last = f"trainer.max_steps={step + 2}"
        failure = train_on_two(folder, SpoilOne, (rank, "latents", step, value), *settings, last) or None
        run = run_folder(folder, f"r{number}")
        if failure is None and metrics(run)[step + 2]["skipped_steps"] != "1":
            failure = f"skipped steps: {metrics(run)[step + 2]['skipped_steps']}"
        if failure is None:
            paths = sorted((run / "nan-dumps").glob("*"))
            results = [replay_step(path, accelerator="cpu") for path in paths]
            # the losses of both ranks, by rank and micro-batch
            summaries = [(r.reproduced, r.step, len(r.losses), "latents of sample" in str(r.first)) for r in results]
            failure = None if summaries == [(True, step, 2 * accumulate, True)] else str(results)
        yield f"{value} on rank {rank} in step {step}, {accumulate} micro-batches, seed {seed + number}", failure


def provoked(folder: Path, tries: int, seed: int) -> Attempts:
    """One batch times 40 on both ranks: one rollback, and a second run is equal."""
    numbers = random.Random(seed)
    for number in range(tries):
        step, failure, losses = numbers.randrange(20, 38), None, []
        for run in (f"s{number}", f"again{number}"):
            settings = (*watched(number, seed, 40)[1:], f"run={run}", *TOY)
            failure = failure or train_on_two(folder, Outlier, (step,), *settings) or None
            if failure is None:
                rows = metrics(run_folder(folder, run))
                losses.append({n: row["train/loss"] for n, row in rows.items()})
        if failure is None:
            worst = max(map(float, losses[0].values()))
            rolled_back = rows[40]["loss_spikes/rollbacks"]
            if rolled_back != "1" or list(losses[0]) != list(range(1, 41)) or worst > 10 or losses[0] != losses[1]:
                failure = f"{rolled_back} rollbacks, largest loss {worst:.3g}, same twice {losses[0] == losses[1]}"
        yield f"seed {seed + number}, step {step}", failure


ROWS = (
    Row(name="replay of a dropped step of two ranks", tries=10, short_tries=0, run=replayed),
    Row(name="loss spikes on two ranks: one batch times 40", tries=5, short_tries=0, run=provoked),
)


if __name__ == "__main__":
    name, *rest = json.loads(sys.argv[1])
    with with_callbacks({"SpoilOne": SpoilOne, "Outlier": Outlier}[name](*rest)):
        main(["train", *sys.argv[2:]])
