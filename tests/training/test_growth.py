"""Runs on data sets that grow: each keeps its revision, and goes on with a newer one from a step on, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.data.conftest import write_dataset
from tests.data.test_growth import grow
from tests.training.test_bad_samples import train  # noqa: F401
from vsa.config import build

ODD = (
    "data.batch_size=3",
    "data.val_fraction=0.2",
    "trainer.val_check_interval=4",
    "callbacks.checkpoint.every_n_steps=2",
)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "shards", videos=23, images=0)


def numbers(training, run: str) -> tuple[dict[int, str], dict[str, torch.Tensor]]:
    """Losses by step, every fourth also of the validation, and the state of networks, averages and optimizer."""
    rows = training.metrics(run)
    losses = {
        step: row["train/loss"] + (row.get("val/loss", "") if step % 4 == 0 else "") for step, row in rows.items()
    }
    return losses, training.tensors(run)


def assert_same_run(training, run: str, expected: str) -> None:
    (losses, tensors), (others, theirs) = numbers(training, run), numbers(training, expected)
    assert losses == others
    assert tensors.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors.items())


def test_a_run_keeps_its_revision_and_takes_a_newer_one_from_a_step_on(train, training, shards, caplog):  # noqa: F811
    train(*ODD, "run=old", "trainer.max_steps=9")
    train(*ODD, "run=begun", "trainer.max_steps=3")
    shutil.copytree(training.folder("begun"), training.folder("phased"))
    grow(shards, "more-")
    # resumed on the grown set, by workers: the run that never saw it grow
    train(*ODD, "run=begun", "trainer.max_steps=9", "ckpt_path=last", "data.num_workers=2")
    assert_same_run(training, "begun", "old")
    assert f"{shards} has grown to revision 2; revision 1 of it is used" in caplog.text
    # phases in one go, and stopped before and in the second phase
    phases = "data.revision=[[0,1],[5,2]]"
    train(*ODD, "run=straight", "trainer.max_steps=9", phases)
    train(*ODD, "run=phased", "trainer.max_steps=7", "ckpt_path=last", phases)
    # from now on it is in the record of the run
    train(*ODD, "run=phased", "trainer.max_steps=9", "ckpt_path=last")
    assert_same_run(training, "phased", "straight")
    old, phased = training.losses("old"), training.losses("phased")
    assert [step for step in old if old[step] == phased[step]] == [1, 2, 3, 4, 5]
    checkpoint = training.last("phased")
    assert checkpoint.state["revision"] == {"main": [[0, 1], [5, 2]]}
    # whatever reads the run's data reads those revisions
    again = build(checkpoint.config["data"])
    again.setup()
    assert again.plan_hash == checkpoint.state["plan_hash"]
    assert training.last("old").config["data"]["revision"] == 1
    with pytest.raises(
        ValueError, match=r"data.revision=\[\[0,2\]\]: up to step 9 the run has used \[\[0,1\],\[5,2\]\] of"
    ):
        train(*ODD, "run=phased", "data.revision=2", "ckpt_path=last", "trainer.max_steps=12")
