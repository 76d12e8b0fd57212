"""Budgets of tokens and seconds; those of FLOPs are in test_training and test_diagnostics."""

from __future__ import annotations

import time

import pytest

import vsa.training.budgets as budgets
import vsa.training.train as run_module
from vsa.evaluation.figures import read_metric
from vsa.training.modules.pretrain import PretrainModule

WSD = ("optim=adamw_wsd", "trainer.log_every_n_steps=1")


def test_a_budget_of_tokens_is_that_of_the_tokens_trained_on(training):
    # latents 16 x 2 x 8 x 8 in patches of 1 x 2 x 2: 32 tokens, 4 samples a step
    trainer = training("sample_token_budget=700", *WSD)
    assert trainer.max_steps == trainer.global_step == round(700 / 128)
    assert training.last().state["config"]["trainer"]["max_steps"] == 5


def test_a_budget_of_seconds_is_measured_once_and_kept(training, monkeypatch):
    step_times, call_times = [], []
    measure = run_module._step_seconds

    def seconds(cfg, step):
        start = time.perf_counter()
        step_times.append(measure(cfg, step))
        call_times.append(time.perf_counter() - start)
        # the machine of a test is busy
        return 0.5

    monkeypatch.setattr(run_module, "_step_seconds", seconds)
    monkeypatch.setattr(budgets, "MEASURED_STEPS", 3)
    monkeypatch.setattr(run_module, "MEASURED_STEPS", 3)
    training("second_budget=2.1", *WSD)
    state = training.last().state
    assert state["step"] == state["config"]["trainer"]["max_steps"] == 4
    assert len(step_times) == 1
    assert 0 < 3 * step_times[0] < call_times[0]
    # what was measured has left nothing and moved nothing
    assert sorted(p.name for p in training.output.rglob("step-*")) == ["step-00000002", "step-00000004"]
    training("run=plain", "trainer.max_steps=4", *WSD)
    assert training.losses() == training.losses("plain")
    lr = [read_metric(training.folder(run) / "metrics.csv", "lr")[1].tolist() for run in ("default", "plain")]
    assert lr[0] == lr[1]
    # another time would be another number of steps
    monkeypatch.setattr(run_module, "_step_seconds", None)
    assert training("second_budget=2.1", "ckpt_path=last", *WSD) is None


def test_seconds_follow_an_annealed_schedule(training, monkeypatch):
    """Dense steps take 1 s and the last ones 0.5 s: the run ends where the sum of its steps is the budget."""
    calls = []

    def seconds(cfg, step):
        calls.append(step)
        return 1.0 if step == 0 else 0.5

    monkeypatch.setattr(run_module, "_step_seconds", seconds)
    # 8 tiles for 3 steps, then 2 fewer every 2 steps down to 2: 8 8 8 6 6 4 4 2 2 ...
    stairs = (
        "sparsity=staircase_toy", "~sparsity.sparsity", "sparsity.sparsity=null", "sparsity.topk=2",
        "sparsity.dense_steps=3", "sparsity.interval=2", "sparsity.tiles=2", "sparsity.fraction=null",
    )  # fmt: skip
    # 3 of 1 s, 2 each of 5/6 and 4/6 s, then 1/2 s
    for budget, steps in ((3.1, 3), (3 + 10 / 6, 5), (3 + 18 / 6 + 1.1, 9)):
        trainer = training(f"second_budget={budget}", *stairs, *WSD, f"run=seconds{steps}")
        assert trainer.max_steps == steps
    assert calls == [0, 7] * 3


def test_a_step_is_timed_at_the_sparsity_of_another(training, monkeypatch):
    topks = []
    monkeypatch.setattr(run_module, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(run_module, "MEASURED_STEPS", 1)
    monkeypatch.setattr(budgets, "WARM_UP_STEPS", 1)
    topk = PretrainModule.topk
    monkeypatch.setattr(PretrainModule, "topk", lambda *args: topks.append(topk(*args)) or topks[-1])
    cfg = training.config("sparsity=linear", "sparsity.dense_steps=2", "sparsity.total_steps=100", "sparsity.topk=null")
    for step in (0, 102):
        topks.clear()
        assert run_module._step_seconds(cfg, step) > 0
        assert {topk.number for topk in topks} == ({8} if step == 0 else {4})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("flop_budget=1e9", "second_budget=3"), "flop_budget=1000000000.0 and second_budget=3: expected one budget"),
        (
            ("second_budget=3", "sparsity=missed_mass", "~sparsity.sparsity", "callbacks=diagnostics"),
            "second_budget needs a schedule known in advance, MissedMassSparsity is measured",
        ),
        (("second_budget=3", "trainer=ddp", "trainer.devices=2"), "second_budget=3 is measured on one device"),
    ],
)
def test_budgets_that_cannot_be_are_refused(training, overrides, message):
    with pytest.raises(ValueError, match=message):
        training(*overrides, "trainer.accelerator=cpu")
    assert not training.folder().exists()
