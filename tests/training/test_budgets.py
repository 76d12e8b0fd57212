"""Budgets of tokens and seconds; those of FLOPs are in test_training and test_diagnostics."""

from __future__ import annotations

import time

import pytest

import vsa.training.budgets as budgets
import vsa.training.train as run_module
from vsa.evaluation.figures import read_metric

WSD = ("optim=adamw_wsd", "trainer.log_every_n_steps=1")


def test_a_budget_of_tokens_is_that_of_the_tokens_trained_on(training):
    # latents 16 x 2 x 8 x 8 in patches of 1 x 2 x 2: 32 tokens, 4 samples a step
    trainer = training("sample_token_budget=700", *WSD)
    assert trainer.max_steps == trainer.global_step == round(700 / 128)
    assert training.last().state["config"]["trainer"]["max_steps"] == 5


def test_a_budget_of_seconds_is_measured_once_and_kept(training, monkeypatch):
    measured, passed = [], []
    measure = run_module._step_seconds

    def seconds(cfg):
        start = time.perf_counter()
        measured.append(measure(cfg))
        passed.append(time.perf_counter() - start)
        # the machine of a test is busy
        return 0.5

    monkeypatch.setattr(run_module, "_step_seconds", seconds)
    monkeypatch.setattr(budgets, "MEASURED_STEPS", 3)
    monkeypatch.setattr(run_module, "MEASURED_STEPS", 3)
    training("second_budget=2.1", *WSD)
    state = training.last().state
    assert state["step"] == state["config"]["trainer"]["max_steps"] == 4
    assert len(measured) == 1
    assert 0 < 3 * measured[0] < passed[0]
    # what was measured has left nothing and moved nothing
    assert sorted(p.name for p in training.output.rglob("step-*")) == ["step-00000002", "step-00000004"]
    training("run=plain", "trainer.max_steps=4", *WSD)
    assert training.losses() == training.losses("plain")
    lr = [read_metric(training.folder(run) / "metrics.csv", "lr")[1].tolist() for run in ("default", "plain")]
    assert lr[0] == lr[1]
    # another time would be another number of steps
    monkeypatch.setattr(run_module, "_step_seconds", None)
    assert training("second_budget=2.1", "ckpt_path=last", *WSD) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("flop_budget=1e9", "second_budget=3"), "flop_budget=1000000000.0 and second_budget=3: expected one budget"),
        (
            ("second_budget=3", "sparsity=staircase_toy", "~sparsity.sparsity"),
            "second_budget=3 needs the same sparsity at every step, StaircaseSparsity changes it",
        ),
        (("second_budget=3", "trainer=ddp", "trainer.devices=2"), "second_budget=3 is measured on one device"),
    ],
)
def test_budgets_that_cannot_be_are_refused(training, overrides, message):
    with pytest.raises(ValueError, match=message):
        training(*overrides, "trainer.accelerator=cpu")
    assert not training.folder().exists()
