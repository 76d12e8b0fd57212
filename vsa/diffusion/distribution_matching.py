"""Distribution matching distillation: gradients and losses as pure functions of tensors; for rollouts see `rollout`.

There are three networks. The generator generates data in a few steps. `real_score` is the frozen teacher. `fake_score`,
the critic, tracks the distribution of the generator. The difference of the two scores on noised generated data points
from the generator's distribution towards that of the data (DMD, arXiv:2311.18828; DMD2, arXiv:2405.14867).

All three predict velocities `noise - x0` (see `flow_matching`). Losses are per sample, `[B]`, to be summed with
`flow_matching.weighted_loss`, so that they do not depend on how a global batch is split. No function here uses a global
random state: random numbers depend on (seed, iteration) or on the seeds of the samples only.

B samples; the other dimensions are free.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsa.diffusion.flow_matching import (
    mixed_generator,
    per_sample,
    refuse_other_shape,
    sample_mse,
    sample_sigmas,
    velocity_target,
    velocity_to_x0,
)
from vsa.diffusion.rollout import Update, check_update
from vsa.diffusion.sampler import guide

CfgForm = Literal["standard", "additive"]

# avoids a division by zero where the teacher returns the generated data itself
MIN_NORMALIZER = 1e-6


def guide_score(cond: Tensor, uncond: Tensor, scale: float, cfg_form: CfgForm) -> Tensor:
    """Classifier-free guidance of the real score, in an explicit convention.

    `standard` is `uncond + scale * (cond - uncond)`, scale 1 is no guidance; `additive` is
    `cond + scale * (cond - uncond)`, scale 0 is no guidance. Additive 3.5 is standard 4.5: published recipes use
    both forms and often do not say which.

    Args:
        cond: `[B, ...]` velocity with the caption.
        uncond: same shape, velocity with the negative embedding.
        scale: guidance scale in the named form.
        cfg_form: `standard` or `additive`.

    Returns:
        `[B, ...]` guided velocity. Since both are linear, the data predicted from it is the guided data.
    """
    refuse_other_shape(cond=cond, uncond=uncond)
    return guide(cond, uncond, standard_scale(scale, cfg_form))


def standard_scale(scale: float, cfg_form: CfgForm) -> float:
    """Guidance scale in the standard form, where 1 needs no negative embedding.

    Args:
        scale: guidance scale in the named form.
        cfg_form: `standard` or `additive`.
    """
    if cfg_form not in ("standard", "additive"):
        raise ValueError(f"cfg_form must be standard or additive, got {cfg_form!r}")
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale must be finite, got {scale}")
    return scale if cfg_form == "standard" else scale + 1


def predicted_x0(x_t: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Data predicted by a score network, in float64.

    The gradient is a difference of two such predictions, which are close to each other once the critic is good; a
    subtraction in bf16 or fp32 would lose most of it.

    Args:
        x_t: `[B, ...]` noised generated data.
        velocity: same shape, velocity at `x_t`.
        sigma: `[B]` noise levels in [0, 1].
    """
    refuse_other_shape(x_t=x_t, velocity=velocity)
    return velocity_to_x0(x_t.double(), velocity.double(), sigma.double())


class DmdGradient(NamedTuple):
    """Distribution matching gradient of generated data.

    gradient: float64 `[B, ...]`, gradient by the generated data.
    normalizer: float64 `[B]`, divisor of the raw gradient.
    raw_norm: float64 `[B]`, root mean square of the raw gradient: the gap between critic and teacher, in units of
        the latents.
    """

    gradient: Tensor
    normalizer: Tensor
    raw_norm: Tensor


@torch.no_grad()
def dmd_gradient(x0: Tensor, real_x0: Tensor, fake_x0: Tensor) -> DmdGradient:
    """Distribution matching gradient `(fake_x0 - real_x0) / max(mean|x0 - real_x0|, MIN_NORMALIZER)`, per sample.

    DMD, section 3.2: the integrand of eq. 7 is `w * alpha * (fake_score - real_score)`, a score is
    `(alpha * predicted_x0 - x_t) / sigma^2` with `alpha = 1 - sigma`, and eq. 8 has the weight
    `w = sigma^2 / alpha / mean|x0 - real_x0|`. Together they are
    `alpha * (fake_x0 - real_x0) / mean|x0 - real_x0|`; the remaining factor alpha is dropped here, as in the authors'
    code, so that the gradient depends on predicted data only. The normaliser makes the size of the gradient independent
    of the noise level and of the scale of the data. It is computed per sample, because over a batch a sample at high
    noise would dominate the others.

    NaN and infinity are kept: in `x0` or `real_x0` they make the gradient of the whole sample non-finite, in `fake_x0`
    one element, so that a check of the gradients can skip the update. (Published code replaces NaN by 0, which hides a
    broken network.) Where the teacher returns `x0` itself, the divisor is `MIN_NORMALIZER`.

    Args:
        x0: `[B, ...]` generated data.
        real_x0: same shape, data predicted by the guided teacher from the noised `x0`, see `predicted_x0`.
        fake_x0: same shape, data predicted by the critic from the same input.

    Returns:
        Gradient, normaliser and raw norm.
    """
    refuse_other_shape(x0=x0, real_x0=real_x0)
    refuse_other_shape(x0=x0, fake_x0=fake_x0)
    x0, real_x0, fake_x0 = x0.double(), real_x0.double(), fake_x0.double()
    raw, distance = fake_x0 - real_x0, (x0 - real_x0).abs()
    normalizer = distance.flatten(1).mean(1).clamp_min(MIN_NORMALIZER)
    raw_norm = sample_mse(raw, torch.zeros_like(raw)).sqrt()
    return DmdGradient(raw / per_sample(normalizer, raw), normalizer, raw_norm)


def dmd_loss(x0: Tensor, gradient: Tensor) -> Tensor:
    """Loss whose gradient by the generated data is `gradient`, averaged over the elements of each sample.

    `0.5 * mean((x0 - stop(x0 - gradient))^2)`: autograd gives `gradient / n` for the n elements of a sample,
    and the value is half the mean square of the gradient, which does not measure progress. The difference is computed
    in float64, so that a gradient far smaller than `x0` is not lost.

    Args:
        x0: `[B, ...]` generated data, with its graph.
        gradient: same shape, from `dmd_gradient`.

    Returns:
        float64 `[B]`.
    """
    refuse_other_shape(x0=x0, gradient=gradient)
    x0 = x0.double()
    return 0.5 * sample_mse(x0, (x0 - gradient.double()).detach())


def critic_loss(velocity: Tensor, x0: Tensor, noise: Tensor) -> Tensor:
    """Flow matching loss of the critic on generated data, without weights over timesteps.

    DMD, section 3.2, eq. 6, in terms of velocities. The generated data is treated as a constant; the caller must also
    detach the noised input of the critic.

    Args:
        velocity: `[B, ...]` velocity predicted by the critic at `add_noise(x0, noise, sigma)`.
        x0: same shape, generated data.
        noise: same shape, the noise in that input.

    Returns:
        `[B]` mean squared errors, fp32 (fp64 for fp64 inputs).
    """
    refuse_other_shape(x0=x0, noise=noise)
    return sample_mse(velocity, velocity_target(x0, noise).detach())


def velocity_matching_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Velocity-matching regulariser: mean squared distance of a sparse student's velocity from the dense teacher's.

    Both see the same input. It keeps a student close to the teacher without data of the teacher's quality
    (TurboDiffusion trains its sparse attention this way). No gradient reaches the teacher.

    Args:
        student: `[B, ...]` velocity.
        teacher: same shape, velocity of the frozen network at the same input and caption.

    Returns:
        `[B]`, fp32 (fp64 for fp64 inputs).
    """
    return sample_mse(student, teacher.detach())


def gan_generator_loss(fake_logits: Tensor) -> Tensor:
    """Non-saturating GAN loss of the generator, `softplus(-logit)` (DMD2, section 4.3).

    Args:
        fake_logits: `[B, ...]` logits of a classifier on critic features of noised generated data, high for real; their
            graph leads through the critic into the generator.

    Returns:
        `[B]`, the mean over the logits of each sample, fp32 (fp64 for fp64 logits).
    """
    return _logit_mean(F.softplus(-_logits("fake_logits", fake_logits)))


def gan_critic_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """GAN loss of the classifier, `softplus(-real) + softplus(fake)` (DMD2, section 4.3).

    Args:
        real_logits: `[B, ...]` logits on critic features of noised data.
        fake_logits: same shape, logits for noised generated data, which the caller has detached.

    Returns:
        `[B]`, the mean over the logits of each sample, fp32 (fp64 for fp64 logits).
    """
    refuse_other_shape(real_logits=real_logits, fake_logits=fake_logits)
    real, fake = _logits("real_logits", real_logits), _logits("fake_logits", fake_logits)
    return _logit_mean(F.softplus(-real) + F.softplus(fake))


def _logits(name: str, logits: Tensor) -> Tensor:
    if logits.ndim < 1:
        raise ValueError(f"{name} must be [B, ...], got shape {list(logits.shape)}")
    return logits if logits.dtype == torch.float64 else logits.float()


def _logit_mean(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


def score_sigmas(
    *,
    seed: int,
    iteration: int,
    num_slots: int,
    update: Update,
    shift: float = 1.0,
    min_ratio: float = 0.02,
    max_ratio: float = 0.98,
) -> Tensor:
    """Noise levels of one iteration, at which the scores are compared or the critic is trained.

    Levels are uniform, then shifted, then clamped to the window, in the published order: a large shift puts much weight
    on `max_ratio` itself (14% at shift 8). The window excludes levels at which the scores carry little information:
    near 0 both return their input, near 1 both return a mean (DMD, section 3.2, uses the same window). Levels are
    stratified over the global batch and equal on all ranks, see `flow_matching.sample_sigmas`; the two updates of an
    iteration get different levels.

    Args:
        seed: seed of the run.
        iteration: iteration of the distillation.
        num_slots: samples in the global batch.
        update: network that is updated, `generator` or `fake_score`.
        shift: see `flow_matching.shift_sigma`.
        min_ratio: smallest noise level, in [0, 1).
        max_ratio: largest noise level, above `min_ratio`, at most 1.

    Returns:
        float64 `[num_slots]`, by slot, on the CPU.
    """
    if not 0 <= min_ratio < max_ratio <= 1:
        raise ValueError(
            "timestep window must satisfy 0 <= min_ratio < max_ratio <= 1, "
            f"got min_ratio={min_ratio}, max_ratio={max_ratio}"
        )
    check_update(update)
    sigma = sample_sigmas(
        seed=mixed_generator("score", update, seed).initial_seed(),
        step=iteration,
        num_slots=num_slots,
        distribution="uniform",
        shift=shift,
    )
    return sigma.clamp(min_ratio, max_ratio)
