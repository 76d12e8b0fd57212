"""A resumed run makes up for the validation that was interrupted."""

from __future__ import annotations

import signal
from contextlib import nullcontext

import lightning as L
import pytest

from tests.training.ranks import run_ranks
from vsa.reports.runs import read_run
from vsa.training.callbacks.missed_validation import MissedValidation
from vsa.training.deadline import Deadline

# validates every second step on two micro-batches
RUN = (
    *("trainer.accumulate_grad_batches=2", "trainer.val_check_interval=4"),
    *("callbacks.checkpoint.every_n_steps=2", "task.validate_at=[current,dense]"),
)
FACTS = ("val/loss", "val/loss_dense", "train/loss", "grad_norm/total", "lr")


class Watch(L.Callback):
    """The steps that were validated; ends the run in one of them."""

    def __init__(self, ends_at: int = -1, how: str = "error"):
        self.ends_at, self.how, self.steps = ends_at, how, []

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0:
            self.steps.append(trainer.global_step)
        if trainer.global_step == self.ends_at:
            if self.how == "signal" and batch_idx == 0:
                # looked at before the next batch
                signal.raise_signal(signal.SIGTERM)
            elif self.how == "error" and batch_idx == 1:
                raise RuntimeError("as if killed")


def rows(training, run):
    return {step: [row.get(name) for name in FACTS] for step, row in training.metrics(run).items()}


@pytest.mark.parametrize("how", ["error", pytest.param("signal", marks=pytest.mark.slow)])
def test_the_rows_are_those_of_a_run_without_interruption(training, how):
    training(*RUN, "run=straight", "trainer.max_steps=5", callbacks=(straight := Watch(),))
    with pytest.raises(RuntimeError if how == "error" else SystemExit):
        training(*RUN, "run=cut", "trainer.max_steps=5", callbacks=(Watch(2, how),))
    assert not training.metrics("cut")[2].get("val/loss")
    training(*RUN, "run=cut", "trainer.max_steps=5", "ckpt_path=last", callbacks=(resumed := Watch(),))
    assert straight.steps == resumed.steps == [2, 4, 5]
    assert rows(training, "cut") == rows(training, "straight")
    paths = [training.folder(run) / "validation.csv" for run in ("cut", "straight")]
    assert paths[0].read_text() == paths[1].read_text()


def test_nothing_is_validated_twice(training):
    training(*RUN, "run=whole", "trainer.max_steps=4")
    training(*RUN, "run=whole", "trainer.max_steps=7", "ckpt_path=last", callbacks=(watch := Watch(),))
    assert watch.steps == [6, 7]


def test_a_checkpoint_between_validations_is_not_validated(training):
    odd = (*RUN[:2], "callbacks.checkpoint.every_n_steps=3")
    with pytest.raises(RuntimeError):
        training(*odd, "run=odd", "trainer.max_steps=5", callbacks=(Watch(4),))
    training(*odd, "run=odd", "trainer.max_steps=5", "ckpt_path=last", callbacks=(watch := Watch(),))
    assert watch.steps == [4, 5]


def test_without_it_the_validation_would_be_missing(training, monkeypatch):
    monkeypatch.setattr(MissedValidation, "on_train_start", lambda *_: None)
    with pytest.raises(RuntimeError):
        training(*RUN, "run=cut", "trainer.max_steps=4", callbacks=(Watch(2),))
    training(*RUN, "run=cut", "trainer.max_steps=4", "ckpt_path=last", callbacks=(watch := Watch(),))
    assert watch.steps == [4]
    assert training.metrics("cut")[2]["val/loss"] == ""


CLIPS = ("callbacks.samples.prompts=[a red square]", "callbacks.samples.steps=2")


class StopIn(L.Callback):
    """A signal in a step, or the run's own time limit."""

    def __init__(self, step: int, how: str):
        self.step, self.how = step, how

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step - 1 and batch_idx % 2 == 0:
            if self.how == "signal":
                signal.raise_signal(signal.SIGTERM)
            else:
                pl_module.status.deadline = Deadline(0, "trainer.max_time")


def clips(training, run):
    return {path.name: path.read_bytes() for path in (training.folder(run) / "samples").rglob("*.gif")}


@pytest.mark.parametrize("how", ["signal", pytest.param("time limit", marks=pytest.mark.slow)])
def test_a_run_stopped_in_its_last_step_gets_its_end(training, caplog, how):
    last = (*RUN[:3], *CLIPS, "trainer.max_steps=3")
    training(*last, "run=straight")
    stop = pytest.raises(SystemExit) if how == "signal" else nullcontext()
    with stop:
        training(*last, "run=cut", callbacks=(StopIn(3, how),))
    assert training.folder("cut").joinpath("checkpoints", "step-00000003").is_dir()
    assert not training.metrics("cut")[3].get("val/loss")
    assert clips(training, "cut") == {}
    assert read_run(training.folder("cut")).status == "stopped"
    training(*last, "run=cut", "ckpt_path=last", callbacks=(resumed := Watch(),))
    assert resumed.steps == [3]
    assert rows(training, "cut") == rows(training, "straight")
    paths = [training.folder(run) / "validation.csv" for run in ("cut", "straight")]
    assert paths[0].read_text() == paths[1].read_text()
    assert clips(training, "cut") == clips(training, "straight") != {}
    assert read_run(training.folder("cut")).status == "finished"
    # and not once more
    training(*last, "run=cut", "ckpt_path=last", callbacks=(again := Watch(),))
    assert again.steps == []
    assert "nothing to do" in caplog.text


@pytest.mark.slow
def test_two_ranks_make_up_for_it_together(training):
    run = ("trainer=fsdp", "trainer.devices=2", *RUN, "trainer.max_steps=3")

    def straight(number: int) -> None:
        training(*run, "run=straight")

    def cut(number: int) -> None:
        with pytest.raises(RuntimeError):
            training(*run, "run=cut", callbacks=(Watch(2),))

    def resumed(number: int) -> None:
        training(*run, "run=cut", "ckpt_path=last")

    for each in (straight, cut, resumed):
        run_ranks(2, each)
    assert training.metrics("straight")[2]["val/loss"]
    assert rows(training, "cut") == rows(training, "straight")


def test_a_distillation_stopped_in_its_last_step_gets_its_validation(distill, training):
    """Which is due by its interval alone."""
    last = ("trainer.max_steps=3", "optim.schedule.warmup_steps=1", "trainer.val_check_interval=3")
    distill(*last, "run=straight")
    with pytest.raises(SystemExit):
        distill(*last, "run=cut", callbacks=(StopIn(3, "signal"),))
    assert not training.metrics("cut")[3].get("val/gap")
    distill(*last, "run=cut", "ckpt_path=last")
    found, expected = (training.metrics(run)[3]["val/gap"] for run in ("cut", "straight"))
    assert found == expected != ""
