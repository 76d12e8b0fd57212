"""Runs on clips that the training device draws."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal

import lightning as L
import pytest
import torch

from tests.limits import HANGS
from tests.training.ranks import run_ranks

WORLD = (
    "data=world_online",
    "~data.toy.size",
    "~data.toy.count",
    # latents 16 x 2 x 8 x 8: 32 tokens in 8 tiles
    "data.world.grid=[2,4,4]",
    "data.world.count=48",
)


class KillIn(L.Callback):
    """Kills this process in a micro-batch."""

    def __init__(self, batch: int):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, command_line, tmp_path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "skimage" else find(name, *a))
    status, _, err = command_line("train.py", "experiment=world", f"output_dir={tmp_path}", "trainer.accelerator=cpu")
    assert status == 1
    assert err.strip().splitlines()[-1] == "error: data needs the package skimage: pip install 'vsa-train[world]'"


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit_and_samples_held_out_captions(training) -> None:
    looks = ("callbacks=diagnostics", "callbacks.diagnostics.every_n_steps=2")
    ending = ("~callbacks.samples.prompts", "callbacks.samples.steps=2", "trainer.val_check_interval=2")
    training(*WORLD, *looks, *ending, "run=straight")
    clips = [path.name for path in (training.folder("straight") / "samples" / "step-00000004").glob("*.mp4")]
    assert clips
    assert all("-moving-" in name or "-circling-" in name for name in clips)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: training(*WORLD, *looks, *ending, callbacks=(KillIn(3),))
    )
    child.start()
    child.join(HANGS)
    assert child.exitcode == -signal.SIGKILL
    assert training.last().step == 2
    training(*WORLD, *looks, *ending, "ckpt_path=last")
    assert training.losses() == training.losses("straight")
    assert len(set(training.losses().values())) == 4
    for row, other in zip(training.metrics().values(), training.metrics("straight").values(), strict=True):
        assert row["val/loss"] == other["val/loss"]
        assert row["diag/recall"] == other["diag/recall"]
    tensors, expected = training.tensors(), training.tensors("straight")
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_micro_batches_are_the_batch(training) -> None:
    training(*WORLD)
    training(*WORLD, "run=parts", "trainer.accumulate_grad_batches=2")
    whole, parts = training.losses(), training.losses("parts")
    assert {step: float(loss) for step, loss in whole.items()} == pytest.approx(
        {step: float(loss) for step, loss in parts.items()}, rel=1e-5
    )


@pytest.mark.slow
def test_two_ranks_are_one(training) -> None:
    common = (*WORLD, "callbacks.throughput=null", "trainer.val_check_interval=2", "optim.eps=0.01")
    training(*common)
    run_ranks(2, lambda rank: training(*common, "run=two", "trainer=fsdp", "trainer.accelerator=cpu") and None)
    for step, row in training.metrics().items():
        for name in ("train/loss", "val/loss"):
            other = training.metrics("two")[step][name]
            assert (row[name] == "") == (other == "")
            if row[name]:
                assert float(row[name]) == pytest.approx(float(other), rel=2e-6)
    tensors, expected = training.tensors("two"), training.tensors()
    assert max((tensors[name] - expected[name]).abs().max().item() for name in expected) < 1e-6
