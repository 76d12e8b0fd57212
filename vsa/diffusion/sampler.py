"""Samplers: from noise to latents with a velocity function.

A velocity function takes x_t `[B, ...]` and the timestep `[B]` (0..1000, float32) and returns the velocity
`[B, ...]`; guidance and conditioning live inside it. State is kept in fp32 whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vsa.diffusion.flow_matching import TIMESTEP_SCALE, add_noise, shift_sigma, velocity_to_x0

VelocityFn = Callable[[Tensor, Tensor], Tensor]
StepFn = Callable[[int, Tensor], None]
FreshFn = Callable[[int], Tensor]
"""Fresh noise `[B, ...]` before step i of a few-step run, i >= 1."""


def euler_sigmas(steps: int, shift: float = 1.0) -> Tensor:
    """Noise levels of an Euler run: `steps + 1` even points from 1 to 0, shifted.

    Args:
        steps: model evaluations.
        shift: see `flow_matching.shift_sigma`.

    Returns:
        float64 `[steps + 1]`, from 1 down to 0.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return shift_sigma(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift)


def guide(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance in the standard form, `uncond + scale * (cond - uncond)`.

    Scale 1 is the conditional prediction. Distillation code often quotes the additive form
    `cond + w * (cond - uncond)`, whose w is `scale - 1`.

    Args:
        cond: velocity with the caption.
        uncond: velocity with the null embedding, same shape.
        scale: guidance scale.
    """
    return uncond + scale * (cond - uncond)


def _state(noise: Tensor) -> Tensor:
    return noise if noise.dtype == torch.float64 else noise.float()


def sample_euler(velocity_fn: VelocityFn, noise: Tensor, sigmas: Tensor, on_step: StepFn | None = None) -> Tensor:
    """Euler sampling: integrate dx/dsigma = velocity from the first to the last noise level.

    Args:
        velocity_fn: see the head of this file.
        noise: `[B, ...]` x at `sigmas[0]`, pure noise when that is 1.
        sigmas: `[steps + 1]` strictly decreasing noise levels, from `euler_sigmas`.
        on_step: function called as `on_step(i, x)` after each step, for progress bars and previews.

    Returns:
        `[B, ...]` x at `sigmas[-1]`, fp32 (fp64 for fp64 noise).
    """
    levels = [float(s) for s in sigmas]
    if len(levels) < 2 or any(a <= b for a, b in pairwise(levels)):
        raise ValueError(f"sigmas must be at least two strictly decreasing values, got {levels}")
    x = _state(noise)
    for i, (now, nxt) in enumerate(pairwise(levels)):
        timestep = torch.full((len(x),), now * TIMESTEP_SCALE, device=x.device, dtype=torch.float32)
        x = x + (nxt - now) * velocity_fn(x, timestep).to(x.dtype)
        if on_step is not None:
            on_step(i, x)
    return x


def step_list(timesteps: Sequence[float], shift: float = 1.0) -> tuple[float, ...]:
    """Timesteps of a few-step generator, checked and warped by a flow shift.

    Recipes give a list either as the timesteps that the model reads (1000/757/522: use shift 1 here) or before the
    schedule's shift (1000/750/500/250 "warped": use the schedule's shift here).

    Args:
        timesteps: strictly decreasing timesteps in (0, 1000].
        shift: see `flow_matching.shift_sigma`.

    Returns:
        Timesteps as `sample_few_step` and `rollout.rollout` read them.
    """
    steps = [float(t) for t in timesteps]
    # the form of the comparisons also rejects NaN
    if not steps or not all(0 < t <= TIMESTEP_SCALE for t in steps) or not all(a > b for a, b in pairwise(steps)):
        raise ValueError(f"timesteps must be strictly decreasing and in (0, 1000], got {list(timesteps)}")
    if shift == 1:
        return tuple(steps)
    sigmas = shift_sigma(torch.tensor(steps, dtype=torch.float64) / TIMESTEP_SCALE, shift)
    return tuple((sigmas * TIMESTEP_SCALE).clamp(max=TIMESTEP_SCALE).tolist())


def sample_few_step(
    velocity_fn: VelocityFn,
    noise: Tensor,
    timesteps: Sequence[float] = (1000, 757, 522),
    *,
    fresh: FreshFn | None = None,
    on_step: StepFn | None = None,
) -> Tensor:
    """Few-step sampling of a distilled generator: predict the data, then add fresh noise for the next step.

    The procedure of consistency models and of DMD2's backward simulation (arXiv:2405.14867, section 4.5):
    `x0 = x - sigma * velocity`, then `x = (1 - sigma') * x0 + sigma' * fresh`, and the last x0 is the result.
    `rollout.rollout` trains on this function; with the noise of `rollout.rollout_noise` a clip depends on its seed
    only.

    Args:
        velocity_fn: see the head of this file.
        noise: `[B, ...]` pure noise.
        timesteps: strictly decreasing timesteps in (0, 1000], with any shift already applied (see `step_list`).
        fresh: `fresh(i)` is the fresh noise before step i, i >= 1; not needed for a single timestep.
        on_step: function called as `on_step(i, x0)` after each prediction.

    Returns:
        `[B, ...]` predicted data, fp32 (fp64 for fp64 noise).
    """
    steps = step_list(timesteps)
    if fresh is None and len(steps) > 1:
        raise ValueError(f"timesteps {list(steps)} need fresh noise between them, got fresh=None")
    x = x0 = _state(noise)
    for i, step in enumerate(steps):
        sigma = torch.full((len(x),), step / TIMESTEP_SCALE, dtype=torch.float64)
        if i > 0:
            assert fresh is not None
            x = add_noise(x0, fresh(i).to(x0), sigma)
        timestep = torch.full((len(x),), step, device=x.device, dtype=torch.float32)
        x0 = velocity_to_x0(x, velocity_fn(x, timestep).to(x.dtype), sigma)
        if on_step is not None:
            on_step(i, x0)
    return x0
