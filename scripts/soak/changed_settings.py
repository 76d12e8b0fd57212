"""Row about settings that change when a run is resumed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from scripts.soak.checkpoint_runs import train, trained
from scripts.soak.rows import Attempts, Row

CHANGES = (
    ("optim.schedule.total_steps=40", "optim.schedule.total_steps", "40"),
    ("optim.schedule.warmup_steps=5", "optim.schedule.warmup_steps", "5"),
    ("sparsity.total_steps=10", "sparsity.total_steps", "10"),
    ("sparsity.dense_steps=3", "sparsity.dense_steps", "3"),
    ("sparsity.topk=3", "sparsity.topk", "3"),
    ("sparsity=cosine", "sparsity", "CosineSparsity"),
    ("sparsity=constant", "sparsity", "ConstantSparsity"),
    ("optim.lr=0.02", "optim.lr", "0.02"),
    ("optim.betas=[0.8,0.9]", "optim.betas", "[0.8, 0.9]"),
    ("optim=adamw_wsd", "optim.schedule", "WSD"),
    ("task.grad_clip=2", "task.grad_clip", "2"),
    ("task.latent_scale=shared", "task.latent_scale", "shared"),
    ("task.objective.logit_mean=1", "task.objective.logit_mean", "1"),
    ("callbacks.ema.decay=0.5", "callbacks.ema.decay", "0.5"),
    ("callbacks.ema=null", "callbacks.ema", "null"),
    ("data.caption_dropout=0.5", "data.caption_dropout", "0.5"),
    ("data.batch_size=2", "data.batch_size", "2"),
    ("data.val_fraction=0.2", "data.val_fraction", "0.2"),
    ("model.ffn_dim=36", "model.ffn_dim", "36"),
    ("attention=full", "attention", "FullAttention"),
    ("tile_thw=[2,2,2]", "tile_thw", "[2, 2, 2]"),
    ("seed=1", "seed", "1"),
)

FREE = (
    "trainer.max_steps=8",
    "trainer.log_every_n_steps=2",
    "trainer.val_check_interval=3",
    "trainer.accumulate_grad_batches=2",
    "data.num_workers=1",
    "callbacks.checkpoint.every_n_steps=5",
    "task.max_skipped=3",
    "logger.csv=null",
)


def settings(folder: Path, tries: int, seed: int) -> Attempts:
    """Resume with a changed setting: an error names its key and both values, but free settings may change."""
    checkpoint = trained(folder)
    whole = shutil.copytree(checkpoint.parent.parent, folder / "whole")
    draw = random.Random(seed)
    cases = [(change, key, value) for change, key, value in CHANGES] + [(change, "", "") for change in FREE]
    draw.shuffle(cases)

    for change, key, value in cases[:tries]:
        before = {path: path.read_bytes() for path in sorted(whole.rglob("*")) if path.is_file()}
        shutil.rmtree(checkpoint.parent.parent)
        shutil.copytree(whole, checkpoint.parent.parent)
        message = train(folder, "run=source", "ckpt_path=last", "trainer.max_steps=7", change)
        if not key:
            yield change, message or None
            continue
        same = all((checkpoint.parent.parent / p.relative_to(whole)).read_bytes() == b for p, b in before.items())
        good = f"{key}=" in message and f"the settings have {value}" in message and "\n" not in message and same
        yield change, None if good else f"{message[:200] or 'trained on'}, untouched {same}"


SETTINGS = Row(name="resume: a setting is changed", tries=len(CHANGES) + len(FREE), short_tries=2, run=settings)
