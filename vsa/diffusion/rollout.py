"""Rollouts of a few-step generator: what it is trained on, with the steps and the noise of its sampler.

No function here draws from a global random state: everything random comes from (seed, iteration) or from the seeds
of the samples, so that all ranks agree and a resumed run repeats its choices.

B samples; the other dimensions are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from vsa.diffusion.flow_matching import TIMESTEP_SCALE, add_noise, mixed_generator, noise_like
from vsa.diffusion.sampler import VelocityFn, sample_few_step, step_list

Update = Literal["generator", "fake_score"]


def stream_seeds(seeds: Tensor, stream: str) -> Tensor:
    """Seeds of an independent stream of noise for the same samples.

    One iteration needs several draws per sample: the rollout and the score noise of each update. The sample seeds
    hold (seed, iteration, sample) already; a name tells the draws apart.

    Args:
        seeds: int64 `[B]` sample seeds.
        stream: name of the draw.

    Returns:
        int64 `[B]`.

    Raises:
        ValueError: if `seeds` is not one-dimensional.
    """
    if seeds.ndim != 1:
        raise ValueError(f"seeds must be [B], got shape {tuple(seeds.shape)}")
    mixed = [mixed_generator("stream", stream, seed).initial_seed() for seed in seeds.tolist()]
    return torch.tensor(mixed, dtype=torch.int64)


def rollout_index(*, seed: int, iteration: int, num_steps: int, update: Update) -> int:
    """Step of the list whose prediction is used in an iteration, uniform in 0..num_steps - 1.

    A pure function of its arguments: all ranks make the same number of sharded forwards without a broadcast, and
    a resumed run repeats the choice. One critic follows the outputs of all chosen steps, so what distribution
    matching makes equal to the data is the mixture over the steps, not the last step by itself.

    Args:
        seed: seed of the run.
        iteration: of the distillation.
        num_steps: length of the step list.
        update: whose update it is, `generator` or `fake_score`; the two choose independently.

    Raises:
        ValueError: if `num_steps` < 1 or the update is unknown.
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
    """Data generated at one step of the list: what the generator is trained on.

    `simulate` runs the sampler from pure noise up to `index`, with fresh noise between the steps, so that the
    generator trains on its own outputs, as it is used (backward simulation, DMD2, section 4.5). It needs no data
    and takes `index + 1` forwards. `data_latent` noises real latents to the step and takes one forward (DMD2,
    section 4.4). Both run `sampler.sample_few_step`; at the last index `simulate` is that sampler, bit for bit.

    Only the last forward has a graph, and only if gradients are enabled around the call: for the critic, call
    under `torch.no_grad`.

    Args:
        velocity_fn: generator, see the head of `sampler`.
        latents: `[B, ...]` data for `data_latent`; `simulate` takes shape, dtype and device.
        seeds: int64 `[B]`, of all noise; give each update its own `stream_seeds`.
        timesteps: from `step_list`.
        index: from `rollout_index`, in 0..len(timesteps) - 1.
        source: `simulate` or `data_latent`.

    Returns:
        `[B, ...]` generated data, fp32 (fp64 for fp64 latents).

    Raises:
        ValueError: on a bad step list, an index outside it, an unknown source, or not one seed per sample.
    """
    steps = step_list(timesteps)
    if not 0 <= index < len(steps):
        raise ValueError(f"index must lie in 0..{len(steps) - 1}, got {index}")
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

    # pure noise whatever the first timestep is, as the sampler starts
    noise = rollout_noise(latents, seeds, 0)
    fresh = partial(rollout_noise, latents, seeds)
    return sample_few_step(last_with_graph, noise, steps[: index + 1], fresh=fresh)


def rollout_noise(latents: Tensor, seeds: Tensor, index: int) -> Tensor:
    """Noise of one step of a few-step run, each sample from its own seed.

    Args:
        latents: `[B, ...]`, gives shape, dtype and device.
        seeds: int64 `[B]`.
        index: 0 is the noise that a run starts from, the same as that of an Euler run of these seeds; above 0 the
            fresh noise put in before that step.

    Raises:
        ValueError: if there is not one seed per sample.
    """
    return noise_like(latents, seeds if index == 0 else stream_seeds(seeds, f"step {index}"))
