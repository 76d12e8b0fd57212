"""A tiny run in this process, its checkpoints, damage to them, and the counting of tries."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch

from scripts.soak import tiny
from scripts.soak.rows import Attempts
from vsa.checkpoints.run_checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint, write_checkpoint

TINY = {
    word.partition("=")[0]: word
    for word in (
        *(word for word in tiny.SETTINGS if not word.startswith("sparsity.")),
        *tiny.TOY,
        *("sparsity=linear", "sparsity.topk=4", "sparsity.dense_steps=1", "sparsity.total_steps=20"),
        *("optim=adamw_cosine", "optim.schedule.total_steps=20"),
        *("callbacks.checkpoint.every_n_steps=2", "callbacks.checkpoint.keep=4"),
    )
}
"""Settings by key of a run with 32 tokens and a tenth of a second per step."""


def train(folder: Path, *overrides: str) -> str:
    """Train the tiny run `folder/pretrain/RUN` in this process; returns the message of a refusal, or ""."""
    # options of another choice of a group are those of its file
    replaced = {word.partition("=")[0] for word in overrides}
    own = (word for word in TINY.values() if word.partition(".")[0] not in replaced)
    words = {word.partition("=")[0]: word for word in (*own, *overrides, f"output_dir={folder}")}
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            tiny.train_here([*words.values()])
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


def after_kill(place: Path) -> tuple[bool, str | None]:
    """Whether a killed save left its folder; failure of its checkpoints to be good and of the next save to clean up."""
    litter = [path.name for path in place.iterdir() if path.name.startswith(".")]
    broken = [path.name for path in list_checkpoints(place) if not is_good(path)]
    step = latest_checkpoint(place, lambda _: None).step
    write_checkpoint(place, {"model": {"w": torch.ones(2)}}, {"step": step + 1})
    rest = [path.name for path in place.iterdir() if path.name.startswith(".")]
    shutil.rmtree(place)
    good = not broken and len(litter) <= 1 and not rest
    return bool(litter), None if good else f"{broken=} {litter=} left={rest!r}"


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
