"""A dropped step is written with all that it was made of, and `vsa replay` runs it again."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.training.ranks import run_ranks
from vsa.checkpoints.run_checkpoint import latest_checkpoint
from vsa.data.batch import VideoBatch
from vsa.training.callbacks import nan_dump
from vsa.training.replay import replay_step


class Spoil(L.Callback):
    """At a step: one value of the batch, of a weight, or of a gradient alone that no replay can find again."""

    def __init__(self, what: str, *, step: int = 2, value: float = math.nan):
        self.what, self.step, self.value = what, step, value

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != self.step:
            return
        if self.what == "latents" and (batch_idx + 1) % pl_module.accumulate == 0:
            batch.latents[1, 0, 0, 0, 0] = self.value
        elif self.what != "gradient" and self.what != "latents":
            with torch.no_grad():
                pl_module.get_parameter(self.what).view(-1)[0] = self.value

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.what == "gradient" and trainer.global_step == self.step:
            next(pl_module.model.parameters()).grad.view(-1)[0] = self.value


def dumps_of(folder: Path) -> list[Path]:
    return sorted((folder / "nan-dumps").glob("*"))


def test_a_nan_of_the_data_is_found_again(training, command_line):
    training("trainer.max_steps=4", "trainer.accumulate_grad_batches=2", callbacks=(Spoil("latents"),))
    assert training.metrics()[4]["skipped_steps"] == "1"
    (path,) = dumps_of(training.folder())
    assert path.name == "step-00000002-model"
    # networks alone: no moments and no averages
    assert set(latest_checkpoint(path / "networks").state["files"]) == {"model.safetensors"}
    status, out, err = command_line("replay", str(path), "--accelerator", "cpu")
    assert (status, err.count("error")) == (0, 0), err
    assert "first not finite: latents of sample toy-" in out
    assert "(1 of 2048 values, micro-batch 1)" in out
    assert "the same bit for bit" in out
    # the other micro-batch has a loss, which is as exact
    result = replay_step(path, accelerator="cpu")
    assert [math.isnan(float.fromhex(loss)) for loss in result.losses] == [False, True]


def test_the_first_step_is_replayed(training):
    training("trainer.max_steps=2", "run=first", callbacks=(Spoil("latents", step=0),))
    (path,) = dumps_of(training.folder("first"))
    assert replay_step(path, accelerator="cpu").reproduced


def test_a_run_does_not_go_on_from_a_step_alone(training):
    training("trainer.max_steps=3", callbacks=(Spoil("latents"),))
    (path,) = dumps_of(training.folder())
    with pytest.raises(ValueError, match="holds one dropped step and cannot be resumed"):
        training("trainer.max_steps=5", "run=other", f"ckpt_path={path}/networks/step-00000002")
    # and it is no run of its own inside the run
    training("trainer.max_steps=2", "overwrite=true")
    assert not dumps_of(training.folder())


@pytest.mark.parametrize(
    ("weight", "value", "first"),
    [
        ("model.blocks.1.attn1.to_q.weight", 3e38, "output of model.blocks.1.attn1.to_q"),
        ("model.blocks.1.attn1.norm_q.weight", 3e38, "output of model.blocks.1.attn1.norm_q"),
        ("model.blocks.0.ffn.net.0.proj.bias", math.inf, "weight model.blocks.0.ffn.net.0.proj.bias"),
    ],
)
def test_the_first_tensor_in_order_is_named(training, weight, value, first):
    training("trainer.max_steps=3", callbacks=(Spoil(weight, value=value),))
    (path,) = dumps_of(training.folder())
    result = replay_step(path, accelerator="cpu")
    assert result.reproduced, result.lines()
    assert result.first is not None
    assert result.first.startswith(first)


def test_what_came_from_outside_is_not_reproduced(training, command_line):
    training("trainer.max_steps=3", callbacks=(Spoil("gradient"),))
    (path,) = dumps_of(training.folder())
    status, out, _ = command_line("replay", str(path), "--accelerator", "cpu")
    assert status == 1
    assert "every tensor was finite" in out
    # the loss was finite and is the same
    assert "the same bit for bit" in out


def test_another_loss_is_not_reproduced(training):
    training("trainer.max_steps=3", callbacks=(Spoil("latents"),))
    (path,) = dumps_of(training.folder())
    file = path / "batches-0.safetensors"
    with safe_open(file, framework="pt") as handle:
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 (not a mapping)
        about = handle.metadata()
    tensors["0/latents"] = tensors["0/latents"].nan_to_num()
    save_file(tensors, file, about)
    result = replay_step(path, accelerator="cpu")
    assert (result.first, result.reproduced) == (None, False)


@pytest.mark.slow
def test_two_ranks_write_a_batch_each_and_are_replayed_by_one_process(training):
    def rank(number: int) -> None:
        # one rank alone has the bad sample, the update of both is dropped
        spoils = (Spoil("latents"),) if number == 1 else ()
        training("trainer=fsdp", "trainer.devices=2", "trainer.max_steps=4", callbacks=spoils)

    run_ranks(2, rank)
    assert training.metrics()[4]["skipped_steps"] == "1"
    (path,) = dumps_of(training.folder())
    assert {file.name for file in path.glob("*.safetensors")} == {"batches-0.safetensors", "batches-1.safetensors"}
    result = replay_step(path, accelerator="cpu")
    assert result.reproduced, result.lines()
    assert [math.isnan(float.fromhex(loss)) for loss in result.losses] == [False, True]
    (path / "batches-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"not complete: batches-1.safetensors is missing"):
        replay_step(path, accelerator="cpu")


@pytest.mark.parametrize(
    ("dumps", "expected"),
    [pytest.param(0, 0, marks=pytest.mark.slow), pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)],
)
def test_no_more_dumps_than_asked_for_also_after_a_resume(training, dumps, expected):
    spoils = tuple(Spoil("latents", step=step) for step in (1, 2, 3, 5))
    setting = f"callbacks.nan_dump.dumps={dumps}"
    training("trainer.max_steps=4", setting, callbacks=spoils)
    training("trainer.max_steps=6", setting, "ckpt_path=last", callbacks=spoils)
    assert training.metrics()[6]["skipped_steps"] == "4"
    assert len(dumps_of(training.folder())) == expected


def test_a_dump_that_cannot_be_written_is_told_and_training_goes_on(training, monkeypatch, caplog):
    caplog.set_level("INFO")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(nan_dump, "write_batches", full)
    training("trainer.max_steps=4", callbacks=(Spoil("latents"),))
    assert "could not be written: [Errno 28] No space left" in caplog.text
    assert training.last().step == 4
    assert not dumps_of(training.folder())


def test_dumping_changes_no_loss(training):
    for run, dumps in (("with", 1), ("without", 0)):
        training(f"run={run}", f"callbacks.nan_dump.dumps={dumps}", callbacks=(Spoil("latents", step=1),))
    assert training.losses("with") == training.losses("without")


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_other_folders_are_refused(path, tmp_path):
    with pytest.raises(ValueError, match="is not a folder of a dropped step"):
        replay_step(tmp_path / path)


@pytest.mark.parametrize("network", ["model", pytest.param("fake_score", marks=pytest.mark.slow)])
def test_either_network_of_a_distillation(distill, training, network):
    class SpoilNetwork(L.Callback):
        """A weight of one network in an iteration in which both are updated."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 5:
                spoilt = pl_module.model if network == "model" else pl_module.fake_score.network
                with torch.no_grad():
                    spoilt.proj_out.bias.fill_(math.inf)

    distill("run=spoilt", "trainer.max_steps=6", "callbacks.nan_dump.dumps=2", callbacks=(SpoilNetwork(),))
    paths = dumps_of(training.folder("spoilt"))
    assert any(path.name.endswith(network) for path in paths)
    for path in paths:
        result = replay_step(path, accelerator="cpu")
        assert result.reproduced, (path, result.lines())


def batch_of(samples: int, *, channels: int = 16, step: int = 2, image: torch.Tensor | None = None) -> VideoBatch:
    """A batch of random latents as a dump holds it."""
    return VideoBatch(
        latents=torch.randn(samples, channels, 2, 8, 8),
        text=torch.randn(samples, 3, 64),
        text_mask=torch.ones(samples, 3, dtype=torch.bool),
        sample_ids=tuple(map(str, range(samples))),
        captions=("",) * samples,
        seeds=torch.arange(samples),
        slots=torch.arange(samples),
        num_slots=samples,
        step=step,
        image_embeds=image,
    )


def test_batches_of_another_step_or_shape_are_refused(training):
    training("trainer.max_steps=4", callbacks=(Spoil("latents"),))
    (path,) = dumps_of(training.folder())
    image = torch.randn(4, 5, 16)
    for changes, message in (
        ({"step": 3}, "has a batch of step 3, expected 2"),
        ({"channels": 5}, "do not fit"),
        ({"image": image}, "do not fit"),
        ({"image": image[0]}, r"0/image_embeds has shape \[5, 16\]"),
    ):
        nan_dump.write_batches(path / "batches-0.safetensors", [batch_of(4, **changes)], [torch.tensor(0.5)])
        with pytest.raises(ValueError, match=message):
            replay_step(path, accelerator="cpu")
