"""Noise levels, targets and the loss against their definitions, other libraries and distributions."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3
from hypothesis import given, settings
from hypothesis import strategies as st

import vsa.noise
from vsa.diffusion.flow_matching import (
    FlowShift,
    add_noise,
    decile,
    loss_weights,
    noise_like,
    sample_mse,
    sample_sigmas,
    shift_sigma,
    to_timestep,
    velocity_target,
    velocity_to_x0,
    weighted_loss,
)
from vsa.noise import mixed_generator


def test_velocity_is_the_derivative_of_the_path_and_leads_back_to_the_data():
    x0, noise = (
        torch.randn(2, 3, 4, 5, 6, dtype=torch.float64),
        torch.randn(2, 3, 4, 5, 6, dtype=torch.float64),
    )
    sigma = torch.tensor([0.3, 0.9], dtype=torch.float64)
    x_t = add_noise(x0, noise, sigma)
    slope = (add_noise(x0, noise, sigma + 1e-3) - add_noise(x0, noise, sigma - 1e-3)) / 2e-3
    torch.testing.assert_close(slope, velocity_target(x0, noise), atol=1e-9, rtol=0)
    torch.testing.assert_close(velocity_to_x0(x_t, velocity_target(x0, noise), sigma), x0)
    assert torch.equal(add_noise(x0, noise, torch.zeros(2)), x0)
    assert torch.equal(add_noise(x0, noise, torch.ones(2)), noise)
    assert to_timestep(torch.tensor([0.0, 0.757, 1.0], dtype=torch.float64)).tolist() == [0.0, 757.0, 1000.0]


def test_add_noise_equals_diffusers_scale_noise():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    t = scheduler.timesteps[[100, 700]]
    x0, noise = torch.randn(2, 4, 3, 2, 2), torch.randn(2, 4, 3, 2, 2)
    torch.testing.assert_close(add_noise(x0, noise, t / 1000), scheduler.scale_noise(x0, t, noise))


def test_add_noise_refuses_a_wrong_number_of_levels():
    with pytest.raises(ValueError, match=r"\[2\], got shape \[3\]"):
        add_noise(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(3))


@given(a=st.floats(0.1, 20), b=st.floats(0.1, 20))
@settings(max_examples=30, deadline=None)
def test_shifts_compose_keep_the_ends_and_the_order(a: float, b: float):
    sigma = torch.linspace(0, 1, 33, dtype=torch.float64)
    torch.testing.assert_close(shift_sigma(shift_sigma(sigma, a), b), shift_sigma(sigma, a * b))
    shifted_sigma = shift_sigma(sigma, a)
    assert shifted_sigma[0] == 0
    assert shifted_sigma[-1] == pytest.approx(1, abs=1e-12)
    assert (shifted_sigma.diff() > 0).all()


@given(st.floats(1e-3, 1e3))
def test_pure_noise_stays_pure_noise_at_every_shift(shift: float):
    assert float(shift_sigma(torch.tensor(1.0, dtype=torch.float64), shift)) == 1
    assert float(shift_sigma(torch.tensor(0.0, dtype=torch.float64), shift)) == 0


@pytest.mark.parametrize("shift", [0.0, -1.0, math.nan])
def test_shift_must_be_positive(shift: float):
    with pytest.raises(ValueError, match="flow shift must be above 0, got"):
        shift_sigma(torch.tensor([0.5]), shift)


def test_flow_shift_kinds():
    assert FlowShift(value=3)(1) == FlowShift(value=3)(10**6) == 3
    table = FlowShift(kind="table", table={4000: 5.0, 1000: 3.0, 2000: 4.0})
    assert [table(n) for n in (10, 1000, 1500, 2000, 3000, 4000, 9999)] == [3, 3, 3.5, 4, 4.5, 5, 5]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": "cosine"}, "kind=cosine: expected one of constant, table, got 'cosine'"),
        ({"value": 0.0}, "value=0.0: expected a number above 0, got 0.0"),
        ({"kind": "table"}, "table=None"),
        ({"table": {1: 1.0}}, "kind=constant"),
        ({"kind": "table", "table": {5: -1.0}}, "5: -1.0"),
    ],
)
def test_flow_shift_refuses(kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        FlowShift(**kwargs)


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize(
    ("distribution", "mean", "std", "shift"),
    [
        ("uniform", 0.0, 1.0, 1.0),
        ("uniform", 0.0, 1.0, 5.0),
        ("logit_normal", 0.0, 1.0, 3.0),
        ("logit_normal", 0.4, 1.7, 1.0),
    ],
)
@pytest.mark.parametrize("num_slots", [1, 2, 7, 64])
def test_each_stratum_holds_exactly_one_slot(distribution, mean, std, shift, num_slots):
    sigma = sample_sigmas(
        seed=3,
        step=17,
        num_slots=num_slots,
        distribution=distribution,
        shift=shift,
        logit_mean=mean,
        logit_std=std,
    )
    raw = shift_sigma(sigma, 1 / shift)
    u = raw if distribution == "uniform" else normal_cdf((torch.logit(raw) - mean) / std)
    assert sorted((u * num_slots).floor().long().tolist()) == list(range(num_slots))
    assert sigma.dtype == torch.float64


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal"])
def test_one_slot_alone_follows_the_distribution_over_steps(distribution: str):
    steps = 1500
    slot = torch.stack([sample_sigmas(seed=0, step=s, num_slots=4, distribution=distribution)[2] for s in range(steps)])
    u = (slot if distribution == "uniform" else normal_cdf(torch.logit(slot))).sort().values

    def kolmogorov_smirnov(values: torch.Tensor) -> float:
        return float((values - (torch.arange(steps) + 0.5) / steps).abs().max()) * math.sqrt(steps)

    assert kolmogorov_smirnov(u) < 1.63  # 1% level
    wrong = slot if distribution == "logit_normal" else normal_cdf(torch.logit(slot))
    assert kolmogorov_smirnov(wrong.sort().values) > 1.63


@pytest.mark.parametrize("between", [(0.875, 1.0), (0.0, 0.3), (0.2, 0.9)])
@pytest.mark.parametrize("distribution", ["logit_normal", "uniform"])
def test_sigmas_of_an_expert_are_the_distributions_within_its_levels(between, distribution):
    own = {"distribution": distribution, "shift": 3.0}
    many = {"num_slots": 4000, **own}
    sigma = sample_sigmas(seed=0, step=1, between=between, **many)
    assert sigma.min() >= between[0]
    assert sigma.max() <= between[1]
    everything = sample_sigmas(seed=0, step=1, **many)
    inside = everything[(everything >= between[0]) & (everything <= between[1])]
    # strata make both far better than independent draws; 3% of the larger sample is their grid
    points = torch.linspace(*between, 12, dtype=torch.float64)[1:-1]
    shares, expected = ((x[:, None] <= points).double().mean(0) for x in (sigma, inside))
    assert (shares - expected).abs().max() < 0.03
    # the control: as many levels, evenly spread
    even = (torch.linspace(*between, 4000, dtype=torch.float64)[:, None] <= points).double().mean(0)
    assert (even - expected).abs().max() > 0.03
    assert torch.equal(everything, sample_sigmas(seed=0, step=1, between=(0.0, 1.0), **many))


def test_sigmas_depend_on_seed_and_step_alone():
    state = torch.random.get_rng_state()
    a = sample_sigmas(seed=1, step=5, num_slots=8)
    torch.manual_seed(99)
    assert torch.equal(a, sample_sigmas(seed=1, step=5, num_slots=8))
    for other in (
        {"seed": 2, "step": 5},
        {"seed": 1, "step": 6},
        {"seed": 5, "step": 1},
        {"seed": 1 + 2**32, "step": 5},
    ):
        assert not torch.equal(a, sample_sigmas(**other, num_slots=8))
    torch.random.set_rng_state(state)
    noise_like(torch.zeros(2, 3), torch.tensor([1, 2]))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"distribution": "beta"}, "logit_normal or uniform, got 'beta'"),
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ({"logit_std": 0.0}, "logit_std must be above 0, got 0.0"),
        ({"shift": -3.0}, "got -3.0"),
    ],
)
def test_sample_sigmas_refuses(kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        sample_sigmas(**{"seed": 0, "step": 0, "num_slots": 4, **kwargs})


def test_noise_of_a_sample_does_not_depend_on_its_batch():
    seeds = torch.tensor([5, 2**62, -7, 5 + 2**32])
    noise = noise_like(torch.zeros(4, 3, 5, 2, 2), seeds)
    for i in (3, 1, 0, 2):
        assert torch.equal(noise[i], noise_like(torch.zeros(1, 3, 5, 2, 2), seeds[i : i + 1])[0])
    assert len({tuple(row.flatten().tolist()) for row in noise}) == 4
    assert torch.equal(noise_like(torch.zeros(4, 3, 5, 2, 2, dtype=torch.bfloat16), seeds), noise.bfloat16())
    with pytest.raises(ValueError, match=r"\[4\], got shape \[3\]"):
        noise_like(torch.zeros(4, 3), seeds[:3])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_noise_drawn_by_several_threads_is_that_of_each_seed(mode, monkeypatch):
    monkeypatch.setattr(vsa.noise, "usable_cores", lambda: 5)
    seeds = torch.tensor([3, 9, 3, 2**40, 0, 7, 1])
    with mode():
        noise = noise_like(torch.zeros(7, 2, 3, 9, 8), seeds)
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        assert torch.equal(row, torch.randn(2, 3, 9, 8, generator=mixed_generator("noise", seed)))
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    assert not noise.requires_grad
    assert noise.is_inference() == (mode is torch.inference_mode)


def test_noise_of_consecutive_seeds_is_standard_normal_and_uncorrelated():
    noise = noise_like(torch.zeros(64, 4096), torch.arange(64)).double()
    assert noise.mean().abs() < 0.01
    assert (noise.std() - 1).abs() < 0.01
    correlation = torch.corrcoef(noise) - torch.eye(64)
    assert correlation.abs().max() < 6 / math.sqrt(4096)


@pytest.mark.gpu
def test_noise_is_the_same_on_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    seeds = torch.tensor([1, 2])
    assert torch.equal(noise_like(torch.zeros(2, 9, device="cuda"), seeds).cpu(), noise_like(torch.zeros(2, 9), seeds))


@pytest.mark.parametrize(("ours", "theirs"), [("uniform", "none"), ("sigma_sqrt", "sigma_sqrt"), ("cosmap", "cosmap")])
def test_loss_weights_equal_diffusers(ours, theirs):
    sigma = torch.linspace(0.01, 1, 50)
    torch.testing.assert_close(loss_weights(sigma, ours), compute_loss_weighting_for_sd3(theirs, sigma))


def test_loss_weights_are_finite_at_both_ends_and_names_are_checked():
    for name in ("uniform", "sigma_sqrt", "cosmap"):
        assert loss_weights(torch.tensor([0.0, 1.0]), name).isfinite().all()
    with pytest.raises(ValueError, match="got 'snr'"):
        loss_weights(torch.tensor([0.5]), "snr")  # type: ignore[arg-type]


def test_sample_mse_is_the_mean_of_each_sample():
    pred, target = torch.randn(3, 2, 5, 3, 7), torch.randn(3, 2, 5, 3, 7)
    expected = torch.stack([torch.nn.functional.mse_loss(p, t) for p, t in zip(pred, target, strict=True)])
    torch.testing.assert_close(sample_mse(pred, target), expected)


def test_sample_mse_adds_up_in_fp32_for_bf16():
    pred = torch.full((1, 40000), 1.0, dtype=torch.bfloat16)
    pred[0, 0] = 256.0
    expected = (256.0**2 + 39999) / 40000
    assert float(sample_mse(pred, torch.zeros_like(pred))) == pytest.approx(expected, rel=1e-6)
    assert float(pred.square().mean()) != pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[2, 1\]"):
        sample_mse(torch.zeros(2, 3), torch.zeros(2, 1))


@given(cuts=st.sets(st.integers(1, 11)), seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_loss_does_not_depend_on_how_the_global_batch_is_cut(cuts: set[int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    mse, weights = (
        torch.rand(12, generator=generator).double(),
        torch.rand(12, generator=generator).double() + 0.1,
    )
    edges = [0, *sorted(cuts), 12]
    parts = [weighted_loss(mse[a:b], weights[a:b], weights.sum()) for a, b in pairwise(edges)]
    torch.testing.assert_close(torch.stack(parts).sum(), (mse * weights).sum() / weights.sum())


def test_decile():
    assert decile(torch.tensor([0.0, 0.05, 0.1, 0.55, 0.999, 1.0], dtype=torch.float64)).tolist() == [
        0,
        0,
        1,
        5,
        9,
        9,
    ]
