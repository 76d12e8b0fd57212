"""Objectives of pretraining and finetuning: flow matching on data, and matching of a dense teacher.

B samples of a micro-batch, C T H W latent dims, L tokens, t h w tokens along time, height and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vsa.attention.kept_tiles import KeptTiles
from vsa.data.batch import VideoBatch
from vsa.diffusion import flow_matching as fm
from vsa.models.forward_hooks import capture_outputs
from vsa.models.network import Network
from vsa.noise import mixed_generator
from vsa.settings import NonNegative, Positive, Share, ShareBelowOne, validated
from vsa.transfer import copy_async

VALIDATION_SEED = 7919
"""Offset of the run's seed for noise and timesteps of validation, which must differ from those of training."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Per-sample terms of a loss.

    Args:
        mse: fp32 `[B]`, mean over the tokens of each sample.
        weights: fp32 `[B]`, weight of each sample.
        sigmas: float64 `[B]` on the CPU, noise level of each sample.
        total_weight: sum of the weights of the whole global batch.
        parts: fp32 `[B]` each, terms of `mse` by name where it is a sum of several; they are logged.
    """

    mse: Tensor
    weights: Tensor
    sigmas: Tensor
    total_weight: float
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NoisedBatch:
    """Inputs and targets of a model at one training step.

    Args:
        x_t: `[B, C, T, H, W]` noised latents.
        timestep: `[B]`, in 0..1000, or `[B, 2]` of first frame and rest where first frames may be given.
        target: `[B, C, T, H, W]` velocity.
        weights: see `LossTerms`.
        sigmas: see `LossTerms`.
        total_weight: see `LossTerms`.
        given: bool `[B]`, samples whose first latent frame is clean in `x_t` and counts in no loss; None: of none.
    """

    x_t: Tensor
    timestep: Tensor
    target: Tensor
    weights: Tensor
    sigmas: Tensor
    total_weight: float
    given: Tensor | None = None

    def mse(self, velocity: Tensor, target: Tensor) -> Tensor:
        """Mean squared error `[B]` of velocities `[B, C, T, H, W]` over all latent frames but given ones."""
        if self.given is None:
            return fm.sample_mse(velocity, target)
        frames = velocity.shape[2]
        known = fm.first_frames(self.given, frames)
        share = 1 - self.given.float() / frames
        return fm.sample_mse(torch.where(known, target, velocity), target) / share

    def terms(self, mse: Tensor, **parts: Tensor) -> LossTerms:
        """Loss terms with per-sample losses `[B]`."""
        return LossTerms(mse=mse, weights=self.weights, sigmas=self.sigmas, total_weight=self.total_weight, parts=parts)


@validated
@dataclass(frozen=True, kw_only=True)
class FlowMatchingLoss:
    """Flow matching loss on data: mean squared error of the velocity against noise - x0.

    Args:
        distribution: distribution of the timesteps, `logit_normal` or `uniform`.
        logit_mean: mean of the normal distribution of `logit_normal`.
        logit_std: standard deviation of the normal distribution of `logit_normal`.
        shift: flow shift as a function of the token count.
        weighting: name of the per-timestep weight.
        first_frame: share of the samples whose first latent frame is given: clean, at timestep 0 and out of the loss,
            in validation too. Such a model continues a picture (`vsa sample --first-frame`), and samples captions
            alone. Clips of one latent frame are never given. As Wan2.2-TI2V-5B reads its first frame
            (`expand_timesteps` of diffusers' WanPipeline).
        noise_range: lowest and highest noise level (0 is data, 1 noise) in training and validation; an expert of Wan2.2
            A14B has the levels on its side of the pipeline's `boundary_ratio`.
    """

    shift: fm.FlowShift
    distribution: Literal["logit_normal", "uniform"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: Positive = 1.0
    weighting: Literal["uniform", "sigma_sqrt", "cosmap"] = "uniform"
    first_frame: ShareBelowOne = 0.0
    noise_range: tuple[Share, Share] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.noise_range[0] >= self.noise_range[1]:
            raise ValueError(f"objective.noise_range={list(self.noise_range)}: expected a lower and a higher level")

    def __call__(self, model: Network, batch: VideoBatch, noised: NoisedBatch, *, topk: KeptTiles) -> LossTerms:
        """Loss terms of a micro-batch."""
        velocity = model(noised.x_t, noised.timestep, **batch.conditions, topk=topk)
        return noised.terms(noised.mse(velocity, noised.target))

    def progress_share(self, start: float, stop: float, num_tokens: int) -> float:
        """Share of training samples whose denoising progress is in a range, on a grid of `num_tokens` tokens."""
        low, high = self.noise_range
        inside = [min(max(level, low), high) for level in (1 - stop, 1 - start)]
        own = self._distribution(num_tokens)
        return fm.sigma_share(inside[0], inside[1], **own) / fm.sigma_share(low, high, **own)

    def _distribution(self, num_tokens: int) -> dict[str, Any]:
        return {
            "distribution": self.distribution,
            "shift": self.shift(num_tokens),
            "logit_mean": self.logit_mean,
            "logit_std": self.logit_std,
        }

    def noised(self, model: Network, batch: VideoBatch, latents: Tensor, *, seed: int) -> NoisedBatch:
        """Draw timesteps and noise of a micro-batch with normalised latents `[B, C, T, H, W]`, for inputs and targets.

        Every rank computes the timesteps of the whole global batch, so it knows the sum of all weights.
        """
        tokens = model.layout_for(latents.shape[1:]).num_tokens
        all_sigmas = fm.sample_sigmas(
            seed=seed,
            step=batch.step,
            num_slots=batch.num_slots,
            between=self.noise_range,
            **self._distribution(tokens),
        )
        sigmas = all_sigmas[batch.slots]
        noise = fm.noise_like(latents, batch.seeds, batch.noise)
        sigma = copy_async(sigmas.float(), latents.device)
        x_t, timestep, given = fm.add_noise(latents, noise, sigma), fm.to_timestep(sigma), None
        if self.first_frame > 0 and latents.shape[2] > 1:
            if model.patch_size[0] > 1:
                raise ValueError(
                    f"task.objective.first_frame={self.first_frame} needs tokens of one latent frame, but the patch "
                    f"is {list(model.patch_size)}"
                )
            drawn = torch.rand(batch.num_slots, generator=mixed_generator("first_frame", seed, batch.step))
            given = copy_async(drawn[batch.slots] < self.first_frame, latents.device)
            x_t, timestep = fm.give_first_frame(x_t, timestep, latents[:, :, :1], given)
        return NoisedBatch(
            x_t=x_t,
            timestep=timestep,
            given=given,
            target=fm.velocity_target(latents, noise),
            weights=copy_async(fm.loss_weights(sigmas, self.weighting).float(), latents.device),
            sigmas=sigmas,
            total_weight=float(fm.loss_weights(all_sigmas, self.weighting).sum()),
        )


@validated
@dataclass(frozen=True, kw_only=True)
class FinetuneLoss(FlowMatchingLoss):
    """Finetuning loss `data * L_data + velocity * L_velocity + attention * L_attention` on the same noised latents.

    L_data is flow matching on the data. L_velocity is the mean squared error against the velocity of the frozen dense
    teacher, which does not suffer from a shift between the data and the teacher's training data. L_attention is the
    error of the self-attention output of every layer relative to the teacher's mean square, averaged over layers. A
    plain call computes L_data only (validation).

    Args:
        shift: flow shift of the timesteps, see `FlowMatchingLoss`.
        data: weight of L_data.
        velocity: weight of L_velocity; above 0 needs a teacher.
        attention: weight of L_attention; above 0 needs a teacher.

    Source: velocity matching as in TurboDiffusion's sparse adaptation (arXiv 2512.16093).
    """

    data: NonNegative = 1.0
    velocity: NonNegative = 0.0
    attention: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data + self.velocity + self.attention == 0:
            raise ValueError("objective.data, objective.velocity and objective.attention are all 0: nothing to train")

    @property
    def needs_teacher(self) -> bool:
        return self.velocity > 0 or self.attention > 0

    def mixed(
        self, model: Network, teacher: Network | None, batch: VideoBatch, noised: NoisedBatch, *, topk: KeptTiles
    ) -> LossTerms:
        """Weighted sum of the terms of a micro-batch, and each term."""
        with attention_outputs(model, self.attention > 0) as outputs:
            velocity = model(noised.x_t, noised.timestep, **batch.conditions, topk=topk)
        parts = {"data": noised.mse(velocity, noised.target)}
        if teacher is not None:
            with torch.no_grad(), attention_outputs(teacher, self.attention > 0) as expected:
                target = teacher(noised.x_t, noised.timestep, **batch.conditions)
            parts["velocity"] = noised.mse(velocity, target)
            if self.attention > 0:
                shape, device = noised.x_t.shape[1:], noised.x_t.device

                def raster(net: Network, output: Tensor) -> Tensor:
                    return net.layout_for(shape, device).unpermute(net.gather(output, shape))

                errors = [
                    relative_error(raster(model, outputs[i]), raster(teacher, expected[i])) for i in sorted(outputs)
                ]
                parts["attention"] = torch.stack(errors).mean(0)
        total = torch.stack([getattr(self, name) * part for name, part in parts.items()]).sum(0)
        return noised.terms(total, **parts)


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative mean squared error fp32 `[B]` of `[B, L, C]`: per sample, over the mean square of `expected`."""
    actual, expected = actual.float().flatten(1), expected.float().flatten(1)
    return (actual - expected).square().mean(1) / expected.square().mean(1).clamp(min=1e-12)


def attention_outputs(model: Network, enabled: bool) -> AbstractContextManager[dict[int, Tensor]]:
    """Collect the projected self-attention outputs `[B, L, C]` of every layer from the forward inside the context."""
    name = model.attention_output
    blocks = model.blocks if enabled and name is not None else ()
    return capture_outputs({i: block.get_submodule(name) for i, block in enumerate(blocks)})
