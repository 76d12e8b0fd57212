"""A resumed run makes up for the validation that was interrupted."""

from __future__ import annotations

import signal

import lightning as L
import pytest

from tests.training.ranks import run_ranks
from vsa.training.callbacks.missed_validation import MissedValidation

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


@pytest.mark.parametrize("how", ["error", "signal"])
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
