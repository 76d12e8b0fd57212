"""Flow matching: noise levels, targets and the loss, as pure functions of tensors.

sigma is the noise level in [0, 1]: 0 is data, 1 is pure noise. `x_t = (1 - sigma) * x0 + sigma * noise`, the
model predicts the velocity `noise - x0`, and reads the timestep `1000 * sigma`.

B samples, C T H W latent channels, frames and size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from vsa.noise import draw_noise, mixed_generator
from vsa.settings import Positive, validated
from vsa.transfer import copy_async

TIMESTEP_SCALE = 1000.0


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """View one value per sample as a tensor that broadcasts over a latent.

    Args:
        values: `[B]`.
        like: `[B, ...]`, gives the number of dimensions and the device.
    """
    if values.shape != like.shape[:1]:
        raise ValueError(f"expected one value per sample [{like.shape[0]}], got shape {list(values.shape)}")
    return copy_async(values, like.device).view(-1, *[1] * (like.ndim - 1))


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Noised latents `x_t = (1 - sigma) * x0 + sigma * noise`.

    Args:
        x0: `[B, C, T, H, W]` latents.
        noise: same shape.
        sigma: `[B]` noise levels in [0, 1].
    """
    s = per_sample(sigma, x0).to(x0.dtype)
    return (1 - s) * x0 + s * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """Target of the model, `noise - x0`: the derivative of `add_noise` by sigma."""
    return noise - x0


def velocity_to_x0(x_t: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Data predicted by a velocity, `x_t - sigma * v`.

    Args:
        x_t: `[B, ...]` noised latents.
        v: same shape, velocity at `x_t`.
        sigma: `[B]`.
    """
    return x_t - per_sample(sigma, x_t).to(x_t.dtype) * v


def to_timestep(sigma: Tensor) -> Tensor:
    """Timestep 0..1000 the model reads, float32 `[B]`."""
    return (sigma * TIMESTEP_SCALE).float()


def first_frames(given: Tensor, frames: int) -> Tensor:
    """bool `[B, 1, T, 1, 1]`: the first of `frames` latent frames, in samples where `given` `[B]` is true."""
    return given.view(-1, 1, 1, 1, 1) & (torch.arange(frames, device=given.device) == 0).view(1, 1, -1, 1, 1)


def give_first_frame(x_t: Tensor, timestep: Tensor, first: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Noised latents with clean first frames, and the timesteps of first frame and rest.

    Args:
        x_t: `[B, C, T, H, W]`.
        timestep: `[B]`.
        first: `[B, C, 1, H, W]` clean first latent frames.
        given: bool `[B]`, samples whose first frame is given.

    Returns:
        `[B, C, T, H, W]` and `[B, 2]`; the first frame has timestep 0 where it is given.
    """
    x_t = torch.where(first_frames(given, x_t.shape[2]), first.to(x_t.dtype), x_t)
    return x_t, torch.stack([timestep.masked_fill(given, 0), timestep], 1)


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Move noise levels towards noise: `shift * sigma / (1 + (shift - 1) * sigma)`.

    A longer token sequence needs more noise for the same loss of information (SD3, arXiv:2403.03206, section
    5.3.2). 0 and 1 stay fixed, shift 1 is the identity, and shifting by a then by b is shifting by a * b.

    Args:
        sigma: noise levels in [0, 1], of any shape.
        shift: > 0.
    """
    if not shift > 0:
        raise ValueError(f"flow shift must be above 0, got {shift}")
    shifted = shift * sigma / (1 + (shift - 1) * sigma)
    # rounding would move pure noise away from 1 by an ulp at some shifts, such as 0.3
    return torch.where(sigma == 1, sigma, shifted)


@validated
@dataclass(frozen=True, kw_only=True)
class FlowShift:
    """Flow shift as a function of the number of tokens of a segment.

    Args:
        kind: `constant` gives `value`; `table` interpolates `table` linearly in the number of tokens and is flat
            outside it.
        value: shift of `constant`.
        table: number of tokens to shift.
    """

    kind: Literal["constant", "table"] = "constant"
    value: Positive = 1.0
    table: Mapping[Any, Positive] | None = None

    def __post_init__(self) -> None:
        if (self.kind == "table") != bool(self.table):
            raise ValueError(f"table applies to kind table only, got kind={self.kind}, table={self.table}")
        for tokens, shift in (self.table or {}).items():
            if int(tokens) < 1:
                raise ValueError(f"table must map token counts to shifts above 0, got {tokens}: {shift}")

    def __call__(self, num_tokens: int) -> float:
        """Shift of a segment of `num_tokens` tokens."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        if self.kind == "constant":
            return float(self.value)
        points = sorted((int(n), float(s)) for n, s in (self.table or {}).items())
        if num_tokens <= points[0][0]:
            return points[0][1]
        for (n0, s0), (n1, s1) in pairwise(points):
            if num_tokens <= n1:
                return s0 + (s1 - s0) * (num_tokens - n0) / (n1 - n0)
        return points[-1][1]


def sample_sigmas(
    *,
    seed: int,
    step: int,
    num_slots: int,
    distribution: Literal["logit_normal", "uniform"] = "logit_normal",
    shift: float = 1.0,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    between: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Noise levels of one optimizer step, stratified over the global batch.

    The unit interval is divided into `num_slots` equal strata. Each slot gets a random stratum and a uniform position
    in it, and the quantile function of the distribution maps this to sigma. Every step therefore covers all noise
    levels, each slot alone still follows the distribution, and the result depends on (seed, step, slot) only: not on
    ranks, micro-batches or earlier calls.

    Args:
        seed: seed of the run.
        step: optimizer step.
        num_slots: samples in the global batch.
        distribution: `logit_normal` (SD3, arXiv:2403.03206, section 3.1; the VSA paper pretrains with mean 0
            and std 1) or `uniform`.
        shift: flow shift applied after the distribution, see `shift_sigma`.
        logit_mean: mean of logit(sigma).
        logit_std: standard deviation of logit(sigma).
        between: lowest and highest noise level; the distribution within them is the same, without the rest.

    Returns:
        float64 `[num_slots]` in (0, 1), by slot, on the CPU.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}")
    generator = mixed_generator("sigma", seed, step)
    strata = torch.randperm(num_slots, generator=generator)
    jitter = torch.rand(num_slots, generator=generator, dtype=torch.float64)
    u = (strata + jitter) / num_slots
    if between != (0.0, 1.0):
        own: Any = {"distribution": distribution, "shift": shift, "logit_mean": logit_mean, "logit_std": logit_std}
        low, high = (sigma_share(0, level, **own) for level in between)
        u = low + (high - low) * u
    # open interval: the quantile function of the normal is infinite at both ends
    u = u.clamp(1e-9, 1 - 1e-9)
    if distribution == "uniform":
        sigma = u
    elif distribution == "logit_normal":
        if not logit_std > 0:
            raise ValueError(f"logit_std must be above 0, got {logit_std}")
        sigma = torch.sigmoid(logit_mean + logit_std * torch.special.ndtri(u))
    else:
        raise ValueError(f"timestep distribution must be logit_normal or uniform, got {distribution!r}")
    return shift_sigma(sigma, shift)


def sigma_share(
    low: float,
    high: float,
    *,
    distribution: Literal["logit_normal", "uniform"] = "logit_normal",
    shift: float = 1.0,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
) -> float:
    """Share of the noise levels of `sample_sigmas` above `low` and up to `high`; other arguments as there."""

    def below(level: float) -> float:
        if level <= 0 or level >= 1:
            return float(level >= 1)
        # the inverse of the shift
        level = float(shift_sigma(torch.tensor(level, dtype=torch.float64), 1 / shift))
        if distribution == "uniform":
            return level
        place = (math.log(level) - math.log1p(-level) - logit_mean) / logit_std
        return 0.5 * math.erfc(-place / math.sqrt(2))

    return below(high) - below(low)


def noise_like(latents: Tensor, seeds: Tensor, drawn: Tensor | None = None) -> Tensor:
    """Standard normal noise, drawn for each sample from its own seed.

    It is drawn on the CPU in float32, so that a sample gets the same noise on every device, in every dtype and batch.

    Args:
        latents: `[B, ...]`, gives shape, dtype and device.
        seeds: int64 `[B]`.
        drawn: the noise of these seeds where it was drawn ahead, by `vsa.noise.draw_noise`.
    """
    if drawn is None:
        drawn = draw_noise(latents.shape, seeds, latents.device)
    elif drawn.shape != latents.shape:
        raise ValueError(f"expected noise of shape {list(latents.shape)}, got {list(drawn.shape)}")
    return copy_async(drawn, latents.device).to(latents.dtype)


def loss_weights(sigma: Tensor, name: Literal["uniform", "sigma_sqrt", "cosmap"] = "uniform") -> Tensor:
    """Weight of each sample in the loss.

    Args:
        sigma: `[B]`.
        name: `uniform` 1; `sigma_sqrt` sigma^-2, sigma at least 1e-3; `cosmap` 2 / (pi * (1 - 2 sigma +
            2 sigma^2)) (SD3, arXiv:2403.03206, section 3.1).
    """
    if name == "uniform":
        return torch.ones_like(sigma)
    if name == "sigma_sqrt":
        return sigma.clamp_min(1e-3) ** -2
    if name == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    raise ValueError(f"loss weighting must be uniform, sigma_sqrt or cosmap, got {name!r}")


def sample_mse(pred: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each sample, in fp32 (fp64 for fp64 inputs).

    Args:
        pred: `[B, ...]` prediction of the model.
        target: same shape.

    Returns:
        `[B]`.
    """
    refuse_other_shape(pred=pred, target=target)
    dtype = torch.float64 if pred.dtype == torch.float64 else torch.float32
    return (pred.to(dtype) - target.to(dtype)).square().flatten(1).mean(1)


def refuse_other_shape(**pair: Tensor) -> None:
    """Raise ValueError with the names of two tensors of different shapes, which would be broadcast."""
    first, second = (list(tensor.shape) for tensor in pair.values())
    if first != second:
        raise ValueError(f"{' and '.join(pair)} must have the same shape, got {first} and {second}")


def weighted_loss(mse: Tensor, weights: Tensor, weight_total: Tensor | float) -> Tensor:
    """Loss of one micro-batch, `sum_i w_i * mse_i / weight_total`.

    With `weight_total` the sum of the weights of the whole global batch, the sum of this value over
    micro-batches and ranks does not depend on how the global batch is split.

    Args:
        mse: `[B]` from `sample_mse`.
        weights: `[B]` from `loss_weights`.
        weight_total: sum of the weights over the global batch.
    """
    return (weights.to(mse) * mse).sum() / weight_total


def decile(sigma: Tensor) -> Tensor:
    """Decile of [0, 1] of each noise level, int64 0..9; 1.0 belongs to the last."""
    return (sigma * 10).floor().long().clamp(0, 9)
