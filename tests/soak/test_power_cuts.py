"""A row about power cuts: what was flushed to the disk is enough to go on from, and nothing else is believed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.soak.forks import in_fork
from tests.soak.power import Disk
from tests.tiny_runs import TinyTraining, one_thread  # noqa: F401 (a fixture)
from tests.training.ranks import Ranks
from vsa.checkpoints.run_checkpoint import step_of
from vsa.files import write_whole

STEPS = 12
SETTINGS = (f"trainer.max_steps={STEPS}", "callbacks.checkpoint.every_n_steps=2", "data.val_batches=1")
CUT = 77


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], dict[int, str]]]:
    """Tensors and losses of a run that nothing interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("straight") / "outputs", patch)
        training(*SETTINGS)
        yield training.tensors(), training.losses()


def until_the_cut(runs: TinyTraining, number: int, seed: float, words: Sequence[str], rank: int) -> None:
    """Train, and lose the power before the flush or the rename with this number; writes what was lost beside it."""
    with pytest.MonkeyPatch.context() as patch:

        def at(reached: int) -> None:
            if reached == number:
                newest = [step_of(path) for path in disk.whole if path.name.startswith("step-")]
                done = disk.lose_power(random.Random(seed))
                (runs.output.parent / "lost").write_text("\n".join([str(max(newest, default=0)), *done]))
                os._exit(CUT)

        disk = Disk(runs.output.parent, at)
        disk.watched(patch)
        runs(*SETTINGS, *words)


def complete_step(folder: Path) -> int:
    """The newest checkpoint all of whose files have the digests in its state; 0 without one."""
    steps = [0]
    for path in folder.glob("step-*"):
        try:
            files = json.loads((path / "state.json").read_bytes())["files"]
            if all(hashlib.sha256((path / name).read_bytes()).hexdigest() == digest for name, digest in files.items()):
                steps.append(step_of(path))
        except (OSError, ValueError):
            continue
    return max(steps)


class FirstStep(L.Callback):
    """Writes the step of the first batch to a file."""

    def __init__(self, path: Path):
        self._path = path

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._path.exists():
            self._path.write_text(str(batch.step))


@pytest.mark.soak("power cuts, resumed bit for bit", attempts=60, short=0)
def test_a_run_goes_on_from_what_was_flushed(attempt, straight, tmp_path, monkeypatch, record_property):
    draw, runs = random.Random(attempt), TinyTraining(tmp_path / "all" / "outputs", monkeypatch)
    runs.config(*SETTINGS)
    runs.config(*SETTINGS, "ckpt_path=last")
    newest, lost = 0, list[str]()
    for number in range(1 + attempt % 2):
        cut = draw.randint(20, 110 >> number)
        while True:
            before = tmp_path / f"before-{number}"
            shutil.rmtree(before, ignore_errors=True)
            runs.output.parent.mkdir(exist_ok=True)
            shutil.copytree(runs.output.parent, before, symlinks=True)
            with Ranks(
                1, partial(until_the_cut, runs, cut, draw.random(), ["ckpt_path=last"] * (number > 0)), tmp_path / "p"
            ) as fork:
                (status,) = fork.statuses()
            assert status in (0, CUT), fork.output()[-3000:]
            durable, *lost = (runs.output.parent / "lost").read_text().splitlines() if status else ["0"]
            newest = max(newest, int(durable))
            if status and newest:
                break
            # too late, or before the first checkpoint
            cut = cut + 11 if status else cut // 2
            shutil.rmtree(runs.output.parent)
            shutil.copytree(before, runs.output.parent, symlinks=True)
        (runs.output.parent / "lost").unlink()
        complete = complete_step(runs.folder() / "checkpoints")
        # what the product flushed is whole, also where the cut has hit what it did not
        assert complete >= newest, (newest, lost)
    first = tmp_path / "first"
    in_fork(lambda: runs(*SETTINGS, "ckpt_path=last", callbacks=(FirstStep(first),)), tmp_path / "printed")
    # after the last checkpoint no step is left
    assert (int(first.read_text()) if first.exists() else STEPS) == complete, lost
    ours, (tensors, losses) = runs.tensors(), straight
    assert ours.keys() == tensors.keys()
    assert [name for name, value in tensors.items() if not torch.equal(ours[name], value)] == []
    # rows were flushed with the checkpoint, and those of later steps come anew
    assert runs.losses() == losses, lost
    assert complete_step(runs.folder() / "checkpoints") == STEPS


def test_what_is_not_flushed_is_lost(tmp_path):
    """The control of the attempts above: whole writes without a flush, or with a rename alone, do not last."""
    folder = tmp_path / "disk"
    folder.mkdir()
    ways = set[str]()
    for attempt in range(60):
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(folder)
            disk.watched(patch)
            shutil.rmtree(folder)
            folder.mkdir()
            write_whole(folder / "safe", b"safe" * 9)
            write_whole(folder / "safe", b"new" * 9)
            (folder / "new").write_bytes(b"unsafe" * 9)
            os.replace(folder / "new", folder / "unsafe")
        disk.lose_power(random.Random(attempt))
        assert (folder / "safe").read_bytes() == b"new" * 9
        unsafe = folder / "unsafe"
        ways.add("missing" if not unsafe.exists() else "whole" if unsafe.read_bytes() == b"unsafe" * 9 else "harmed")
    assert ways == {"missing", "whole", "harmed"}
