"""A row about `overwrite=true` in the folder of an old run: whatever lies there, and whenever it is killed, stays."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_runs import TinyTraining, one_thread  # noqa: F401 (a fixture)
from tests.training.ranks import Ranks, wait_for
from tests.training.test_places import contents
from vsa.checkpoints.run_checkpoint import list_checkpoints

NAMES = (
    *("notes.txt", "adapters/adapter_model.safetensors", ".git/HEAD", ".git/objects/ab/cd", "shards/index.json"),
    *("best-checkpoint/state.json", "export/config.json", "checkpoints/step-00000002 (copy)/model.safetensors"),
    *(".hidden", ".lock", "odd \n name/\u00e4 .mp4", "checkpoints/mine/x", "metrics.csv.1", "metrics (1).csv", "-rf"),
    *("tensorboard/events", ".tmp-mine", ".writing-x/a", ".removing-x/a", "checkpoints/.writing-step-00000009/a"),
    *("default.1/run.json", "wandb/latest-run/x", "report.html", "certificate/certificate.json", "*", "x" * 200),
    "checkpoints/step-9/a",
)


THROUGH = "run_dir=outputs/pretrain/default/checkpoints/.."
"""A spelling through a folder of the run itself, which is no path while that is not there."""


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("old") / "outputs", patch)
        training("trainer.max_steps=2", "callbacks.checkpoint.every_n_steps=1")
        yield training.folder()


def filled(folder: Path, draw: random.Random) -> None:
    """Put drawn files, links and empty folders into a run folder."""
    for name in draw.sample(NAMES, draw.randint(1, 9)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(draw.randbytes(draw.choice((0, 1, 4000))))
    if draw.random() < 0.5:
        (folder / "a link").symlink_to(draw.choice(("..", "run.json", "/nowhere", "../../../mine.txt")))
    if draw.random() < 0.5:
        (folder / "empty" / "deep").mkdir(parents=True)
    if draw.random() < 0.3:
        for path in draw.sample(sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()), 2):
            path.chmod(0o400)
    if draw.random() < 0.3:
        # not the run's own files alone may be gone
        draw.choice([folder / "metrics.csv", folder / "config.yaml"]).unlink()


def spellings(parent: Path) -> tuple[str, ...]:
    """Settings that name the folder outputs/pretrain/default below `parent`, the working directory."""
    (parent / "one").symlink_to("outputs")
    (parent / "two").symlink_to("one")
    (parent / "sub").mkdir()
    return (
        *(f"output_dir={parent}/outputs", "output_dir=outputs", "output_dir=./outputs//", "output_dir=one"),
        *(
            "output_dir=two",
            "output_dir=sub/../outputs",
            f"output_dir={parent}/sub/../one",
            "output_dir=one/../outputs",
        ),
        *("run_dir=outputs/pretrain/default", f"run_dir={parent}//two/./pretrain/default/", THROUGH),
        "output_dir=outputs/pretrain/..",
    )


@pytest.mark.soak("overwrite=true in old runs with other files, spelled anyhow and killed", attempts=100, short=0)
def test_every_byte_of_an_old_run_stays(attempt, old_run, tmp_path, monkeypatch):
    draw = random.Random(attempt)
    runs = TinyTraining(tmp_path / "outputs", monkeypatch)
    folder = runs.folder()
    shutil.copytree(old_run, folder)
    filled(folder, draw)
    (tmp_path / "mine.txt").write_text("mine")
    neighbours = draw.sample(("default.1", "default.2", "default.1.log", ".default.other", "default.old"), 2)
    for name in neighbours:
        (folder.with_name(name)).write_text("a neighbour")
    old = contents(folder)
    monkeypatch.chdir(tmp_path)
    where, before = draw.choice(spellings(tmp_path)), contents(tmp_path)
    others = {name: content for name, content in before.items() if not name.startswith("outputs/pretrain/def")}
    words = [where, "overwrite=true", "trainer.max_steps=5", "callbacks.checkpoint.every_n_steps=1", "seed=7"]
    kills, printed_in = draw.choice((0, 1, 1, 2)), tmp_path.parent / f"{tmp_path.name}-printed"
    runs.config(*words)
    for _ in range(kills):
        with Ranks(1, lambda _: runs(*words), printed_in) as fork:
            # from the moment at which the folder is no longer the old one, or somewhen
            moved = (lambda: fork.ended() or places_of(folder, old) != [folder]) if draw.random() < 0.7 else fork.ended
            wait_for(moved, draw.uniform(0, 4))
            time.sleep(draw.choice((0.0, 0.0, draw.uniform(0, 1))))
            fork.send(signal.SIGKILL)
            fork.statuses()
        (found,) = places_of(folder, old)
        assert found == folder or found.name.startswith((".default.overwritten-", "default.")), found
    # once more, to the end
    words[0] = "run_dir=outputs/pretrain/default" if where == THROUGH and kills else where
    with Ranks(1, lambda _: runs(*words), printed_in) as fork:
        assert fork.statuses() == [0], fork.output()[-3000:]
        printed = fork.output()
    (found,) = places_of(folder, old)
    assert found.name.removeprefix("default.").isdigit(), found
    assert kills or str(found) in printed, printed[-2000:]
    # the run is a new one, and nothing else has changed
    assert [path.name for path in list_checkpoints(folder / "checkpoints")][-1] == "step-00000005"
    assert not (folder / "notes.txt").exists()
    now = contents(tmp_path)
    assert {name: now.get(name) for name in others} == others
    assert all((folder.with_name(name)).read_text() == "a neighbour" for name in neighbours)
    new = {name.split("/")[2] for name in now if name.count("/") >= 2 and name.startswith("outputs/pretrain/")}
    assert not [name for name in new if name.startswith(".") and name not in neighbours], new


def places_of(folder: Path, old: dict[str, bytes | str | None]) -> list[Path]:
    """Folders beside a run folder, or itself, that hold all of the old run, byte for byte."""
    found = []
    for path in sorted(folder.parent.iterdir()):
        try:
            if path.is_dir() and contents(path) == old:
                found.append(path)
        # renamed while it was read
        except FileNotFoundError:
            continue
    return found


def test_one_byte_less_is_noticed(tmp_path):
    """The control of the attempts above."""
    (tmp_path / "runs" / "default").mkdir(parents=True)
    (tmp_path / "runs" / "default" / "a").write_bytes(b"old")
    old = contents(tmp_path / "runs" / "default")
    assert Counter(places_of(tmp_path / "runs" / "default", old)) == {tmp_path / "runs" / "default": 1}
    os.truncate(tmp_path / "runs" / "default" / "a", 2)
    assert places_of(tmp_path / "runs" / "default", old) == []
