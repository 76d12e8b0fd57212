"""Samplers against diffusers' schedulers and against differential equations with a known solution."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vsa.diffusion.sampler import euler_sigmas, guide, sample_euler, sample_few_step, step_list


def field(x: Tensor, timestep: Tensor) -> Tensor:
    """A velocity that depends on place, time and neighbours."""
    t = (timestep / 1000).view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
    return torch.tanh(x) * (0.5 + t) + 0.1 * x.roll(1, -1) - 0.3


@pytest.mark.parametrize("steps", [1, 4, 25])
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
def test_euler_equals_diffusers(steps: int, shift: float):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist())
    sigmas = euler_sigmas(steps, shift)
    torch.testing.assert_close(sigmas.float(), scheduler.sigmas)
    noise = torch.randn(2, 3, 4, 2, 5)
    x = noise.clone()
    for t in scheduler.timesteps:
        x = scheduler.step(field(x, t.expand(2)), t, x, return_dict=False)[0]
    torch.testing.assert_close(sample_euler(field, noise, sigmas), x, atol=1e-5, rtol=1e-5)
    # control: another shift is another path
    if steps > 1:
        other = sample_euler(field, noise, euler_sigmas(steps, shift + 1))
        assert (other - x).abs().max() > 1e-3


@pytest.mark.parametrize("timesteps", [(1000, 757, 522), (1000, 750, 500, 250), (999.0,)])
def test_few_step_equals_diffusers(timesteps):
    scheduler = FlowMatchLCMScheduler(shift=1.0)
    scheduler.set_timesteps(timesteps=[float(t) for t in timesteps])
    noise = torch.randn(2, 3, 4, 2, 5)
    theirs, x = torch.Generator().manual_seed(4), noise.clone()
    for t in scheduler.timesteps:
        x = scheduler.step(field(x, t.expand(2)), t, x, generator=theirs, return_dict=False)[0]
    ours = sample_few_step(field, noise, timesteps, fresh=drawn(noise, 4))
    torch.testing.assert_close(ours, x, atol=1e-5, rtol=1e-5)
    if len(timesteps) > 1:
        other = sample_few_step(field, noise, timesteps, fresh=drawn(noise, 5))
        assert (other - x).abs().max() > 1e-2


def drawn(noise: Tensor, seed: int) -> Callable[[int], Tensor]:
    """Fresh noise in the order of its steps, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return lambda i: torch.randn(noise.shape, generator=generator)


def test_fresh_noise_is_asked_for_once_before_each_step_but_the_first():
    requests: list[tuple[int, int]] = []
    steps: list[int] = []

    def fresh(i: int) -> Tensor:
        requests.append((i, len(steps)))
        # another dtype than the state
        return torch.full((2, 3), float(i), dtype=torch.float64)

    noise = torch.randn(2, 3).bfloat16()
    out = sample_few_step(field, noise, (900, 600, 300), fresh=fresh, on_step=lambda i, x0: steps.append(i))
    assert requests == [(1, 1), (2, 2)]
    assert steps == [0, 1, 2]
    assert out.dtype == torch.float32
    # written out in float64
    x = noise.double()
    for i, (sigma, after) in enumerate(pairwise((0.9, 0.6, 0.3))):
        x = (1 - after) * (x - sigma * field(x, torch.full((2,), 1000 * sigma))) + after * (i + 1)
    expected = x - 0.3 * field(x, torch.full((2,), 300.0))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    # control: the noise of a step in the place of another
    control = sample_few_step(field, noise, (900, 600, 300), fresh=lambda i: fresh(3 - i))
    assert (control - out).abs().max() > 1e-2


MEAN, STD = 1.5, 0.4


def gaussian_velocity(x: Tensor, timestep: Tensor) -> Tensor:
    """E[noise - x0 | x_t] for data N(MEAN, STD^2): both are linear in x_t."""
    s = (timestep / 1000).view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
    variance = (1 - s) ** 2 * STD**2 + s**2
    deviation = (x - (1 - s) * MEAN) / variance
    return s * deviation - (MEAN + (1 - s) * STD**2 * deviation)


@given(st.floats(1e-3, 1e3))
def test_a_warped_list_starts_at_pure_noise(shift: float):
    steps = step_list((1000, 757, 522), shift)
    assert steps[0] == 1000
    assert all(a > b for a, b in pairwise(steps))
    # control: at this one the formula alone is an ulp short
    assert 1000 * (0.3 / (1 + (0.3 - 1))) < 1000


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_converges_at_first_order_to_the_known_solution(shift: float):
    # the flow of a Gaussian is affine: the noise quantile stays, so x0 = MEAN + STD * noise
    noise = torch.linspace(-3, 3, 13, dtype=torch.float64)[:, None]
    exact = MEAN + STD * noise

    def error(steps: int) -> float:
        return float((sample_euler(gaussian_velocity, noise, euler_sigmas(steps, shift)) - exact).abs().max())

    assert error(1000) < 1e-2
    assert 1.8 < error(200) / error(400) < 2.2
    assert error(4) > 10 * error(1000)


def test_one_euler_step_of_a_true_point_mass_is_exact():
    target = torch.randn(3, 2, 5)

    def to_point(x: Tensor, timestep: Tensor) -> Tensor:
        return (x - target) / (timestep / 1000).view(-1, 1, 1)

    noise = torch.randn(3, 2, 5)
    for steps in (1, 7):
        torch.testing.assert_close(
            sample_euler(to_point, noise, euler_sigmas(steps, 5.0)), target, atol=1e-5, rtol=1e-5
        )
    few = sample_few_step(to_point, noise, fresh=drawn(noise, 0))
    torch.testing.assert_close(few, target, atol=1e-5, rtol=1e-5)


def test_few_step_with_exact_denoiser_gives_posterior_mean():
    # one step from pure noise knows nothing: it predicts the mean of the data
    noise = torch.randn(4096, 1, dtype=torch.float64)
    torch.testing.assert_close(
        sample_few_step(gaussian_velocity, noise, (1000,)), torch.full_like(noise, MEAN), atol=1e-9, rtol=0
    )
    many = sample_few_step(gaussian_velocity, noise, range(1000, 0, -50), fresh=drawn(noise, 0))
    assert float(many.mean()) == pytest.approx(MEAN, abs=0.03)
    assert 0.2 < float(many.std()) < STD + 0.03


def test_euler_can_stop_halfway_and_go_on():
    noise = torch.randn(2, 6, dtype=torch.float64)
    sigmas = euler_sigmas(10, 3.0)
    halfway = sample_euler(field, noise, sigmas[:6])
    torch.testing.assert_close(sample_euler(field, halfway, sigmas[5:]), sample_euler(field, noise, sigmas))


def test_steps_are_reported_and_the_state_is_fp32():
    reports: list[tuple[int, Tensor]] = []

    def bf16_field(x: Tensor, timestep: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        assert timestep.dtype == torch.float32
        assert timestep.shape == (2,)
        return field(x, timestep).bfloat16()

    out = sample_euler(bf16_field, torch.randn(2, 3).bfloat16(), euler_sigmas(5), lambda i, x: reports.append((i, x)))
    assert [i for i, _ in reports] == [0, 1, 2, 3, 4]
    assert torch.equal(reports[-1][1], out)
    assert out.dtype == torch.float32


def test_guidance_is_the_standard_form():
    cond, uncond = torch.randn(4), torch.randn(4)
    assert torch.allclose(guide(cond, uncond, 1.0), cond)
    assert torch.equal(guide(cond, uncond, 0.0), uncond)
    torch.testing.assert_close(guide(cond, uncond, 4.5), cond + 3.5 * (cond - uncond))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: euler_sigmas(0), "steps must be at least 1, got 0"),
        (lambda: euler_sigmas(3, 0.0), "above 0, got 0.0"),
        (lambda: sample_euler(field, torch.zeros(1, 1), torch.tensor([1.0])), "at least two"),
        (lambda: sample_euler(field, torch.zeros(1, 1), torch.tensor([0.0, 1.0])), "strictly decreasing"),
        (lambda: sample_few_step(field, torch.zeros(1, 1), ()), "got \\[\\]"),
        (lambda: sample_few_step(field, torch.zeros(1, 1), (500, 900)), "strictly decreasing"),
        (lambda: sample_few_step(field, torch.zeros(1, 1), (1001, 900)), "1001"),
        (lambda: sample_few_step(field, torch.zeros(1, 1), (900, 0)), "900, 0"),
        (
            lambda: sample_few_step(field, torch.zeros(1, 1), (900, 500)),
            r"timesteps \[900.0, 500.0\] need fresh noise between them, got fresh=None",
        ),
    ],
)
def test_bad_schedules_are_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
