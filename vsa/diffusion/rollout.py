"""Rollouts of a few-step generator: its training data, generated with the steps and the noise of its sampler.

No function here uses a global random state: random numbers depend on (seed, iteration) or on the seeds of the samples
only, so that all ranks agree and a resumed run repeats its choices.

B samples; the other dimensions are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from vsa.diffusion.flow_matching import TIMESTEP_SCALE, add_noise, noise_like
from vsa.diffusion.sampler import VelocityFn, sample_few_step, step_list
from vsa.noise import mixed_generator

Update = Literal["generator", "fake_score"]


def stream_seeds(seeds: Tensor, stream: str) -> Tensor:
    """Seeds of an independent stream of noise for the same samples.

    One iteration draws noise several times per sample: for the rollout and for the scores of each update. The sample
    seeds already depend on (seed, iteration, sample); the name distinguishes the draws.

    Args:
        seeds: int64 `[B]` sample seeds.
        stream: name of the draw.

    Returns:
        int64 `[B]`.
    """
    if seeds.ndim != 1:
        raise ValueError(f"seeds must be [B], got shape {list(seeds.shape)}")
    mixed = [mixed_generator("stream", stream, seed).initial_seed() for seed in seeds.tolist()]
    return torch.tensor(mixed, dtype=torch.int64)


def rollout_index(*, seed: int, iteration: int, num_steps: int, update: Update) -> int:
    """Step of the list whose prediction is used in an iteration, uniform in 0..num_steps - 1.

    It is a pure function of its arguments: all ranks run the same number of sharded forwards without a broadcast, and a
    resumed run repeats the choice. One critic tracks the outputs of all chosen steps, so distribution matching makes
    the mixture over the steps equal to the data, not the last step by itself.

    Args:
        seed: seed of the run.
        iteration: iteration of the distillation.
        num_steps: length of the step list.
        update: network that is updated, `generator` or `fake_score`; the two choose independently.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    check_update(update)
    return int(torch.randint(num_steps, (), generator=mixed_generator("rollout", update, seed, iteration)))


def check_update(update: str) -> None:
    """Raise ValueError on an unknown update."""
    if update not in ("generator", "fake_score"):
        raise ValueError(f"update must be generator or fake_score, got {update!r}")


def rollout(
    velocity_fn: VelocityFn,
    latents: Tensor,
    seeds: Tensor,
    timesteps: Sequence[float],
    index: int,
    source: Literal["simulate", "data_latent"] = "simulate",
) -> Tensor:
    """Data generated at one step of the list, on which the generator is trained.

    `simulate` runs the sampler from pure noise up to `index`, with fresh noise between the steps, so that the generator
    trains on its own outputs, as in sampling (backward simulation, DMD2, section 4.5). It needs no data and `index + 1`
    forwards. `data_latent` adds noise to real latents for this step and needs one forward (DMD2, section 4.4). Both run
    `sampler.sample_few_step`; at the last index `simulate` equals that sampler bit for bit.

    Only the last forward has a graph, and only if gradients are enabled: for the critic, call it under `torch.no_grad`.

    Args:
        velocity_fn: generator, see the head of `sampler`.
        latents: `[B, ...]` data for `data_latent`; `simulate` uses only its shape, dtype and device.
        seeds: int64 `[B]` seeds of all noise; each update needs its own `stream_seeds`.
        timesteps: timesteps of `step_list`.
        index: index of `rollout_index`, in 0..len(timesteps) - 1.
        source: `simulate` or `data_latent`.

    Returns:
        `[B, ...]` generated data, fp32 (fp64 for fp64 latents).
    """
    steps = step_list(timesteps)
    if not 0 <= index < len(steps):
        raise ValueError(f"index must be in 0..{len(steps) - 1}, got {index}")
    # the state is fp32, as in the sampler, and so is the noise
    latents = latents if latents.dtype == torch.float64 else latents.float()
    if source == "data_latent":
        sigma = torch.full((len(latents),), steps[index] / TIMESTEP_SCALE, dtype=torch.float64)
        x_t = add_noise(latents, rollout_noise(latents, seeds, index), sigma)
        return sample_few_step(velocity_fn, x_t, (steps[index],))
    if source != "simulate":
        raise ValueError(f"source must be simulate or data_latent, got {source!r}")
    grad, calls = torch.is_grad_enabled(), count()

    def last_with_graph(x: Tensor, timestep: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad and next(calls) == index):
            return velocity_fn(x, timestep)

    # like the sampler, start from pure noise whatever the first timestep
    noise = rollout_noise(latents, seeds, 0)
    fresh = partial(rollout_noise, latents, seeds)
    return sample_few_step(last_with_graph, noise, steps[: index + 1], fresh=fresh)


def rollout_noise(latents: Tensor, seeds: Tensor, index: int) -> Tensor:
    """Noise of one step of a few-step run, each sample from its own seed.

    Args:
        latents: `[B, ...]`, gives shape, dtype and device.
        seeds: int64 `[B]`.
        index: 0 is the initial noise, the same as for an Euler run with these seeds; above 0 it is the fresh noise
            before that step.
    """
    return noise_like(latents, seeds if index == 0 else stream_seeds(seeds, f"step {index}"))
