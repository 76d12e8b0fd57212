"""Training with a top-k by denoising range: each sample has that of its noise level, in the loss and in the records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from vsa.attention.kept_tiles import KeptTiles
from vsa.diffusion import flow_matching as fm
from vsa.evaluation.evaluator import validation_loss
from vsa.objectives.flow_matching import FlowMatchingLoss
from vsa.sampling.pipeline import load_run

PLAN = (
    "denoising=plan",
    "sparsity.denoising.topk_ranges=[[0,0.3,8],[0.6,1,1]]",
    "sparsity.denoising.dense_steps=1",
    "sparsity.denoising.refresh=2",
)
STAIRS = (
    "sparsity=staircase",
    "~sparsity.sparsity",
    "sparsity.topk=2",
    "sparsity.dense_steps=1",
    "sparsity.interval=1",
)
RUN = (*PLAN, *STAIRS, "sparsity.tiles=3", "data.batch_size=6", "data.val_fraction=0.2")


def topk_by_definition(step: int, sigma: float) -> int:
    """8 tiles, 3 fewer in every step but the first, down to the end of the sample's range."""
    end = 8 if 1 - sigma < 0.3 else 1 if 1 - sigma >= 0.6 else 2
    return max(end, 8 - 3 * step)


def test_every_sample_trains_at_the_topk_of_its_range(training, monkeypatch):
    calls: list[tuple[int, list[int]]] = []
    call = FlowMatchingLoss.__call__

    def alone(self, model, batch, noisy, *, topk):
        terms = call(self, model, batch, noisy, topk=topk)
        if model.training:
            topks = [topk_by_definition(batch.step, float(sigma)) for sigma in terms.sigmas]
            calls.append((batch.step, topks))
            for i, k in enumerate(topks):
                part = slice(i, i + 1)
                conditions = {n: None if x is None else x[part] for n, x in batch.conditions.items()}
                with torch.no_grad():
                    velocity = model(noisy.x_t[part], noisy.timestep[part], **conditions, topk=k)
                assert terms.mse[i].item() == pytest.approx(
                    fm.sample_mse(velocity, noisy.target[part]).item(), rel=1e-4
                )
        return terms

    monkeypatch.setattr(FlowMatchingLoss, "__call__", alone)
    clips = ("callbacks.samples.prompts=[a red circle]", "callbacks.samples.steps=4", "callbacks.samples.flow_shift=1")
    training(*RUN, *clips, "trainer.val_check_interval=4")
    monkeypatch.undo()
    assert [step for step, _ in calls] == [0, 1, 2, 3]
    assert {k for step, topks in calls if step == 3 for k in topks} >= {1, 8}

    # what is logged is the mean over samples
    metrics, objective = training.metrics(), training.last().state["config"]["task"]["objective"]
    shift = objective["shift"].get("value", 1.0)
    sigmas = fm.sample_sigmas(seed=5, step=0, num_slots=20_000, shift=shift).tolist()
    for step, row in metrics.items():
        mean = sum(topk_by_definition(step - 1, sigma) for sigma in sigmas) / len(sigmas)
        assert float(row["sparsity/topk"]) == pytest.approx(mean, rel=1e-3)
        assert float(row["sparsity/density"]) == pytest.approx(mean / 8, rel=1e-3)

    # the clip follows the plan: a dense step, then the ranges
    (record,) = [json.loads(p.read_text()) for p in (training.folder() / "samples").rglob("step-*/samples.json")]
    assert record["topk_by_step"] == [8, 8, 2, 1]
    assert record["denoising"]["refresh"] == 2

    run = load_run(training.folder(), weights="ema", device="cpu")
    topk = run.settings().topk
    assert topk == KeptTiles((2,), ranges=((0, 0.3, (8,)), (0.6, 1, (1,))))
    state = training.last().state
    assert validation_loss(run, state, batch_size=4)["val/loss"] == pytest.approx(
        float(metrics[4]["val/loss"]), rel=1e-4
    )
    # control: the end value of the schedule in every range
    plain = replace(run, sparsity=run.sparsity.with_denoising(run.sparsity.denoising.without_budgets()))
    assert validation_loss(plain, state, batch_size=4)["val/loss"] != pytest.approx(
        float(metrics[4]["val/loss"]), rel=1e-4
    )

    # a budget of FLOPs counts what the run counted
    budget = float(metrics[4]["throughput/flops_total"])
    trainer = training(*RUN, f"flop_budget={budget}", "run=budget")
    assert trainer.max_steps == 4
    assert float(training.metrics("budget")[4]["throughput/flops_total"]) == pytest.approx(budget, rel=1e-9)


def test_a_run_with_ranges_resumes_bit_for_bit(training):
    training(*RUN, "run=whole")
    training(*RUN, "run=parts", "trainer.max_steps=2")
    training(*RUN, "run=parts", "ckpt_path=last")
    whole, parts = training.tensors("whole"), training.tensors("parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    # control: without the ranges it is another run
    training(*STAIRS, "sparsity.tiles=3", "data.batch_size=6", "data.val_fraction=0.2", "run=plain")
    plain = training.tensors("plain")
    assert not all(torch.equal(whole[name], plain[name]) for name in whole)


def test_a_plan_that_does_not_fit_is_refused(training):
    with pytest.raises(ValueError, match="denoising: topk=9 is above the number of tiles, 8"):
        training("denoising=plan", "sparsity.denoising.topk_ranges=[[0,0.3,9]]")
    with pytest.raises(ValueError, match=r"sparsity\.denoising\.refresh=0: expected"):
        training("denoising=plan", "sparsity.denoising.refresh=0")
    with pytest.raises(ValueError, match=r"sparsity\.denoising\.refreshs=2: unknown setting, did you mean"):
        training("denoising=plan", "sparsity.denoising.refreshs=2")
    assert not training.folder().exists()


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_shares_of_noise_levels_are_those_of_the_draws(distribution, shift):
    how = {"distribution": distribution, "shift": shift, "logit_mean": 0.3, "logit_std": 1.2}
    sigmas = fm.sample_sigmas(seed=1, step=0, num_slots=50_000, **how)
    for low, high in ((0.0, 1.0), (0.0, 0.3), (0.3, 0.9), (0.9, 1.0)):
        share = ((sigmas > low) & (sigmas <= high)).double().mean().item()
        assert fm.sigma_share(low, high, **how) == pytest.approx(share, abs=1e-4)
    objective = FlowMatchingLoss(
        shift=fm.FlowShift(value=shift), distribution=distribution, logit_mean=0.3, logit_std=1.2
    )
    topk = KeptTiles((4,), ranges=((0.0, 0.3, (8,)),))
    mean = topk.expected(lambda start, stop: objective.progress_share(start, stop, 32))
    assert mean.number == pytest.approx(4 + 4 * (sigmas > 0.7).double().mean().item(), abs=1e-3)
