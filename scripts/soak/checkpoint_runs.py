"""A tiny run in this process, its checkpoints, damage to them, and the counting of tries."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from hydra import compose, initialize_config_dir

from scripts.soak.rows import Attempts
from vsa.checkpoints.run_checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint
from vsa.config import config_folder

TINY = (
    "model.num_layers=2",
    "model.num_attention_heads=1",
    "model.attention_head_dim=12",
    "model.ffn_dim=24",
    "model.freq_dim=16",
    "data=toy_online",
    "data.toy.size=[8,64,64]",
    "data.toy.count=24",
    "data.batch_size=4",
    "data.val_fraction=0.1",
    "tile_thw=[1,2,2]",
    "sparsity=linear",
    "sparsity.topk=4",
    "sparsity.dense_steps=1",
    "sparsity.total_steps=20",
    "optim=adamw_cosine",
    "optim.lr=0.01",
    "optim.schedule.warmup_steps=2",
    "optim.schedule.total_steps=20",
    "callbacks.progress=null",
    "callbacks.samples=null",
    "callbacks.checkpoint.every_n_steps=2",
    "callbacks.checkpoint.keep=4",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=1000",
    "trainer.enable_progress_bar=false",
)
"""Settings of a run with 32 tokens and a tenth of a second per step."""


def train(folder: Path, *overrides: str) -> str:
    """Train the tiny run `folder/pretrain/RUN` in this process; returns the message of a refusal, or ""."""
    from vsa.training.train import train as run

    # options with a default in Python are not in a config file
    replaced = {word.partition("=")[0] for word in overrides}
    tiny = [word for word in TINY if word.partition(".")[0] not in replaced]
    words = [f"++{word}" if "." in word.partition("=")[0] else word for word in (*tiny, *overrides)]
    groups = {word.partition("=")[0]: word for word in words}
    with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
        cfg = compose("train", overrides=[f"output_dir={folder}", *groups.values()])
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            run(cfg)
        except ValueError as refused:
            return str(refused)
    return ""


def trained(folder: Path) -> Path:
    """Train a run with checkpoints at the steps 2, 4 and 6; returns the newest one."""
    if refused := train(folder, "run=source", "trainer.max_steps=6"):
        raise RuntimeError(refused)
    return folder / "pretrain" / "source" / "checkpoints" / "step-00000006"


def is_good(checkpoint: Path) -> bool:
    try:
        read_checkpoint(checkpoint)
    except ValueError:
        return False
    return True


def fallback_failure(checkpoint: Path) -> str | None:
    """None if a damaged newest checkpoint is reported in one line and the previous checkpoint is used."""
    older = list_checkpoints(checkpoint.parent)[-2]
    try:
        read_checkpoint(checkpoint)
    except ValueError as refused:
        message = str(refused)
    except Exception as error:
        return f"a traceback of {type(error).__name__}"
    else:
        return "taken as good"
    if "\n" in message or checkpoint.name not in message:
        return f"not told in one line with its name: {message[:100]!r}"
    fallback = latest_checkpoint(checkpoint.parent, lambda _: None).path
    return None if fallback == older else f"{fallback.name} was taken, not {older.name}"


def damage(
    names: tuple[str, ...], cuts: bool, make: Callable[[Path], Path] = trained
) -> Callable[[Path, int, int], Attempts]:
    """A row that flips bits of (and truncates) files of the newest checkpoint at random places.

    Args:
        names: names of the files.
        cuts: whether every third try truncates a file.
        make: writes at least two checkpoints and returns the newest.
    """

    def run(folder: Path, tries: int, seed: int) -> Attempts:
        draw, checkpoint = random.Random(seed), make(folder)
        good = {name: (checkpoint / name).read_bytes() for name in names}
        for number in range(tries):
            name = draw.choice(names)
            data, place = bytearray(good[name]), draw.randrange(len(good[name]))
            if cuts and number % 3 == 2:
                what, data = f"cut at {place}", data[:place]
            else:
                bit = draw.randrange(8)
                what, data[place] = f"bit {bit} of byte {place}", data[place] ^ 1 << bit
            (checkpoint / name).write_bytes(data)
            yield f"{name}, {what}", fallback_failure(checkpoint)
            (checkpoint / name).write_bytes(good[name])
        read_checkpoint(checkpoint)

    return run
