"""Runs whose loader draws the noise ahead: the same steps, dumps and ends as those that draw it themselves."""

from __future__ import annotations

import math
import signal
from dataclasses import replace

import lightning as L
import pytest
import torch

import vsa.diffusion.flow_matching as fm
from tests.pinning import PretendedGPU, pinning_threads
from tests.training.test_diagnostics import LOOK
from tests.training.test_replay import Spoil, dumps_of
from tests.training.test_resume import SignalAt
from vsa.data.batch import VideoBatch
from vsa.training.callbacks.nan_dump import NanDump
from vsa.training.replay import replay_step

RUN = ("trainer.max_steps=4", "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=4", "data.num_workers=1")


class Seen(L.Callback):
    """The batches of a run, and whether all came with noise."""

    def __init__(self) -> None:
        self.ahead: list[bool] = []

    def on_train_batch_start(self, trainer, pl_module, batch: VideoBatch, batch_idx):
        self.ahead.append(batch.noise is not None)

    def on_validation_batch_start(self, trainer, pl_module, batch: VideoBatch, batch_idx, dataloader_idx=0):
        self.ahead.append(batch.noise is not None)


@pytest.fixture
def drawn_late(monkeypatch) -> list[int]:
    """Sizes of the noise that is drawn where it is used."""
    sizes: list[int] = []
    draw = fm.draw_noise
    monkeypatch.setattr(fm, "draw_noise", lambda size, *args: (sizes.append(size[0]), draw(size, *args))[1])
    return sizes


def numbers(training, run: str) -> dict[int, dict[str, str]]:
    rows = training.metrics(run).items()
    return {step: {k: v for k, v in row.items() if not k.startswith("throughput/")} for step, row in rows}


# the diagnostics of two steps draw the noise of their one sample themselves
@pytest.mark.parametrize(
    ("callbacks", "late"),
    [pytest.param((), [], id="plain"), pytest.param(LOOK, [1, 1], id="diagnosed", marks=pytest.mark.slow)],
)
def test_noise_drawn_ahead_changes_no_digit_and_is_what_the_loss_uses(
    training, monkeypatch, drawn_late, callbacks, late
):
    run = (*RUN, *callbacks)
    training(*run, "run=late")
    assert drawn_late.count(2) > 8
    drawn_late.clear()
    callback = Seen()
    with monkeypatch.context() as patch:
        PretendedGPU(patch)
        training(*run, "run=ahead", callbacks=(callback,))
        assert drawn_late == late
        assert not pinning_threads()
        assert len(callback.ahead) > 8
        assert all(callback.ahead)
        # the control: other noise in the batches is other losses
        pin = VideoBatch.pin_memory
        patch.setattr(VideoBatch, "pin_memory", lambda b: (p := pin(b), replace(p, noise=p.noise.neg()))[1])
        training(*run, "run=poisoned")
    assert numbers(training, "late") == numbers(training, "ahead")
    own, ahead, poisoned = (training.tensors(name) for name in ("late", "ahead", "poisoned"))
    assert all(torch.equal(own[name], ahead[name]) for name in own)
    assert all(training.losses("late")[step] != loss for step, loss in training.losses("poisoned").items())
    assert not torch.equal(own["model/proj_out.weight"], poisoned["model/proj_out.weight"])


def test_a_dump_is_replayed_without_the_noise_that_was_drawn_ahead(training, monkeypatch, drawn_late):
    with monkeypatch.context() as patch:
        PretendedGPU(patch)
        training(*RUN, callbacks=(Spoil("latents"),))
        assert not drawn_late
    (path,) = dumps_of(training.folder())
    result = replay_step(path, accelerator="cpu")
    assert result.reproduced
    assert drawn_late
    assert [math.isnan(float.fromhex(loss)) for loss in result.losses] == [False, True]


def test_batches_that_wait_for_a_dump_keep_no_noise(training, monkeypatch):
    with monkeypatch.context() as patch:
        PretendedGPU(patch)
        callback = Seen()
        (dump,) = (c for c in training(*RUN, callbacks=(callback,)).callbacks if isinstance(c, NanDump))
    assert all(callback.ahead)
    # those of the last two steps
    assert [[batch.noise for batch in batches] for batches in dump._batches.values()] == [[None, None]] * 2


def test_a_distillation_draws_nothing_ahead(distill, monkeypatch):
    callback = Seen()
    with monkeypatch.context() as patch:
        PretendedGPU(patch)
        distill("trainer.max_steps=2", callbacks=(callback,))
    assert callback.ahead
    assert not any(callback.ahead)


def test_a_signal_ends_a_run_and_its_thread(training, monkeypatch):
    training(*RUN, "run=whole")
    with monkeypatch.context() as patch:
        PretendedGPU(patch)
        with pytest.raises(SystemExit):
            training(*RUN, "run=cut", callbacks=(SignalAt(2, signal.SIGTERM),))
        assert training.last("cut").step < 4
        training(*RUN, "run=cut", "ckpt_path=last")
        assert not pinning_threads()
    assert training.losses("cut") == training.losses("whole")
    whole, cut = training.tensors("whole"), training.tensors("cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_memory_that_runs_out_in_the_thread_ends_a_run_in_one_line(training, monkeypatch):
    def fail(*args):
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr("vsa.data.batch.draw_noise", fail)
    with monkeypatch.context() as patch:
        PretendedGPU(patch)
        with pytest.raises(ValueError, match=r"^no page-locked memory for a batch of 2 samples[^\n]*$"):
            training(*RUN)
