"""Objective of distillation: distribution matching of a few-step generator, as functions of three networks.

B samples of a micro-batch, C T H W latent dims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vsa.attention.denoising import progress_of
from vsa.attention.kept_tiles import KeptTiles
from vsa.data.batch import VideoBatch, pad_text
from vsa.diffusion import distribution_matching as dm
from vsa.diffusion import flow_matching as fm
from vsa.diffusion import sampler
from vsa.diffusion.rollout import Update, rollout, rollout_index, stream_seeds
from vsa.models.forward_hooks import add_to_output, capture_outputs
from vsa.models.network import Network
from vsa.objectives.discriminator import Discriminator, Gan
from vsa.objectives.step_embedding import StepEmbedding
from vsa.settings import NonNegative, Positive, validated
from vsa.transfer import copy_async


@dataclass(frozen=True, kw_only=True)
class Networks:
    """The networks of a distillation by role.

    Args:
        generator: the student, generates data in a few steps.
        fake_score: the critic, tracks the distribution of the generator.
        real_score: the frozen teacher.
        discriminator: classifier on features of the critic; None without a GAN term.
        fake_steps: embedding of the generator's step for the critic; None disables step conditioning.
    """

    generator: Network
    fake_score: Network
    real_score: Network
    discriminator: Discriminator | None = None
    fake_steps: StepEmbedding | None = None


@dataclass(frozen=True, kw_only=True)
class NegativeText:
    """Text embedding of the teacher's unconditional pass.

    Args:
        text: `[1, S, E]`, padded as the captions are.
        mask: bool `[1, S]`, None where the padding is attended to.
    """

    text: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, data: Any, prompt: str) -> NegativeText:
        """The embedding of a caption, padded as by a data module; "" is the null embedding of its samples."""
        rows = data.text_encoder.encode_batch([prompt])[0] if prompt else data.store.null_text
        text, mask = pad_text([rows], length=data.text_encoder.max_tokens, padding=data.text_padding)
        return cls(text=text, mask=mask)

    def to(self, device: torch.device) -> NegativeText:
        return NegativeText(text=self.text.to(device), mask=None if self.mask is None else self.mask.to(device))


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """Generated data and its loss.

    Args:
        x0: `[B, C, T, H, W]` generated data, with a graph in the update of the generator.
        index: step of the list that generated it.
        loss: `[B]`, loss of each sample.
        sigmas: float64 `[B]` on the CPU, noise levels of the scores.
        raw_norm: float64 `[B]`, see `DmdGradient`; None for the update of the critic.
        normalizer: float64 `[B]`, see `DmdGradient`; None for the update of the critic.
        parts: `[B]` each, terms of `loss` by name.
    """

    x0: Tensor
    index: int
    loss: Tensor
    sigmas: Tensor
    raw_norm: Tensor | None = None
    normalizer: Tensor | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)


@validated
@dataclass(frozen=True, kw_only=True)
class DistributionMatching:
    """Distribution matching distillation (DMD2, arXiv:2405.14867) with explicit conventions.

    Args:
        shift: flow shift of the noise levels at which the scores are compared, as a function of the token count.
        timesteps: step list of the generator, strictly decreasing from 1000.
        timesteps_shift: flow shift applied to the list; 1: the model reads the list as it is.
        source: `simulate` runs the generator from noise, `data_latent` adds noise to real latents; see `rollout`.
        guidance: scale of the teacher's guidance in the named form.
        cfg_form: `standard`, `uncond + s * (cond - uncond)`, or `additive`, `cond + s * (cond - uncond)`.
        min_ratio: smallest noise level of the scores.
        max_ratio: largest noise level of the scores.
        velocity: weight of the velocity-matching regulariser between the generator and the guided teacher at the input
            of the scores; costs a pass of the generator.
        gan: a GAN term against the latents of the data, see `Gan`; costs a pass of the critic in either update.
        step_aware: condition the critic on the step that generated its input (`StepEmbedding`), so that the output of
            every step is matched with the teacher's distribution. Without it (DMD2) only the mixture over the steps is
            matched, in which the errors of the steps may cancel.
    """

    shift: fm.FlowShift
    timesteps: tuple[Positive, ...] = (1000, 757, 522)
    timesteps_shift: Positive = 1.0
    source: Literal["simulate", "data_latent"] = "simulate"
    guidance: float = 4.5
    cfg_form: dm.CfgForm = "standard"
    min_ratio: float = 0.02
    max_ratio: float = 0.98
    velocity: NonNegative = 0.0
    gan: Gan | None = None
    step_aware: bool = False

    def __post_init__(self):
        # these raise for invalid values now instead of at the first step
        steps = self.step_list
        dm.score_sigmas(
            seed=0, iteration=0, num_slots=1, update="generator", min_ratio=self.min_ratio, max_ratio=self.max_ratio
        )
        if steps[0] != fm.TIMESTEP_SCALE:
            raise ValueError(f"objective.timesteps must start at 1000 (pure noise), got {list(self.timesteps)}")
        if self.step_aware and len(steps) == 1:
            raise ValueError(
                f"objective.step_aware needs several steps, got objective.timesteps={list(self.timesteps)}"
            )
        dm.standard_scale(self.guidance, self.cfg_form)

    @property
    def step_list(self) -> tuple[float, ...]:
        """The timesteps that the generator reads, with the shift applied."""
        return sampler.step_list(self.timesteps, self.timesteps_shift)

    @property
    def guided(self) -> bool:
        """Whether the teacher needs a negative embedding."""
        return dm.standard_scale(self.guidance, self.cfg_form) != 1

    def index(self, *, seed: int, iteration: int, update: Update) -> int:
        """Step of the list whose output an update uses, the same on all ranks."""
        return rollout_index(seed=seed, iteration=iteration, num_steps=len(self.timesteps), update=update)

    def passes(self, *, seed: int, iteration: int, generator: bool) -> Mapping[tuple[str, bool], int]:
        """Number of passes of an iteration by (role in `Networks`, whether a backward follows).

        Args:
            seed: seed of the run.
            iteration: iteration of the distillation, from 0.
            generator: whether the generator is updated in this iteration.
        """

        def rollout_steps(update: Update) -> int:
            return self.index(seed=seed, iteration=iteration, update=update) if self.source == "simulate" else 0

        # only in the update of the generator does a backward follow the last pass of a rollout
        judged = 0 if self.gan is None else 1
        passes = Counter({("generator", False): rollout_steps("fake_score") + 1, ("fake_score", True): 1 + judged})
        if generator:
            passes[("generator", False)] += rollout_steps("generator")
            passes[("generator", True)] += 2 if self.velocity > 0 else 1
            passes[("fake_score", False)] += 1
            passes[("fake_score", True)] += judged
            passes[("real_score", False)] += 2 if self.guided else 1
        return passes

    def progress_share(self, start: float, stop: float, num_tokens: int) -> float:
        """Share of the generator's steps whose denoising progress is in a range; used for the scores as well."""
        return sum(start <= progress_of(t) < stop for t in self.step_list) / len(self.step_list)

    def generate(
        self, generator: Network, batch: VideoBatch, latents: Tensor, *, update: Update, index: int, topk: KeptTiles
    ) -> Tensor:
        """Generated data `[B, C, T, H, W]` at step `index` of the list, from noise that belongs to the update."""

        def velocity(x_t: Tensor, timestep: Tensor) -> Tensor:
            return generator(x_t, timestep, **batch.conditions, topk=topk)

        seeds = stream_seeds(batch.seeds, f"{update} rollout")
        return rollout(velocity, latents, seeds, self.step_list, index, self.source)

    def generator_update(
        self,
        networks: Networks,
        batch: VideoBatch,
        latents: Tensor,
        negative: NegativeText | None,
        *,
        seed: int,
        iteration: int,
        topk: KeptTiles,
        index: int | None = None,
    ) -> ScoredRollout:
        """Distribution matching loss of a micro-batch with normalised latents `[B, C, T, H, W]` (DMD, section 3.2).

        Args:
            networks: the networks by role; only the generator gets gradients.
            batch: captions and seeds.
            latents: tensor that gives shape and device, and is the data with `source=data_latent`.
            negative: embedding of the teacher's unconditional pass; required if `guided`.
            seed: seed of the run.
            iteration: iteration of the distillation.
            topk: kv tiles per query tile of networks with sparse attention.
            index: step of the list; None: the step of the iteration.
        """
        if index is None:
            index = self.index(seed=seed, iteration=iteration, update="generator")
        x0 = self.generate(networks.generator, batch, latents, update="generator", index=index, topk=topk)
        sigmas, x_t, noise = self._noised(networks, batch, x0, seed=seed, iteration=iteration, update="generator")
        with torch.no_grad():
            timestep = copy_async(fm.to_timestep(sigmas), x_t.device)
            fake = self._fake_velocity(networks, batch, x_t, timestep, topk, index)
            real = self._guided_velocity(networks.real_score, batch, negative, x_t, timestep, topk)
            fake_x0, real_x0 = (dm.predicted_x0(x_t, v.to(x_t.dtype), sigmas) for v in (fake, real))
        gradient = dm.dmd_gradient(x0, real_x0, fake_x0)
        parts = {"dmd": dm.dmd_loss(x0, gradient.gradient)}
        loss = parts["dmd"]
        if self.velocity > 0:
            own = networks.generator(x_t, timestep, **batch.conditions, topk=topk)
            parts["velocity"] = dm.velocity_matching_loss(own, real)
            loss = loss + self.velocity * parts["velocity"]
        if self.gan is not None:
            # a second pass of the critic, with a graph back to the generator
            noised = fm.add_noise(x0, noise, sigmas)
            parts["gan"] = dm.gan_generator_loss(self._logits(networks, batch, noised, timestep, topk, index)[0])
            loss = loss + self.gan.generator_weight * parts["gan"]
        return ScoredRollout(
            x0=x0,
            index=index,
            loss=loss,
            sigmas=sigmas,
            raw_norm=gradient.raw_norm,
            normalizer=gradient.normalizer,
            parts=parts,
        )

    def fake_score_update(
        self, networks: Networks, batch: VideoBatch, latents: Tensor, *, seed: int, iteration: int, topk: KeptTiles
    ) -> ScoredRollout:
        """Flow matching loss of the critic on new data of the generator; arguments as in `generator_update`."""
        index = self.index(seed=seed, iteration=iteration, update="fake_score")
        with torch.no_grad():
            x0 = self.generate(networks.generator, batch, latents, update="fake_score", index=index, topk=topk)
        sigmas, x_t, noise = self._noised(networks, batch, x0, seed=seed, iteration=iteration, update="fake_score")
        timestep = copy_async(fm.to_timestep(sigmas), x_t.device)
        if self.gan is None:
            velocity = self._fake_velocity(networks, batch, x_t, timestep, topk, index)
            loss = dm.critic_loss(velocity, x0, noise)
            return ScoredRollout(x0=x0, index=index, loss=loss, sigmas=sigmas, parts={"flow": loss})
        fake, velocity = self._logits(networks, batch, x_t, timestep, topk, index)
        # real data at the same noise levels, with the same noise
        real, _ = self._logits(networks, batch, fm.add_noise(latents.to(x_t), noise, sigmas), timestep, topk, index)
        parts = {"flow": dm.critic_loss(velocity, x0, noise), "gan": dm.gan_critic_loss(real, fake)}
        loss = parts["flow"] + self.gan.critic_weight * parts["gan"]
        return ScoredRollout(x0=x0, index=index, loss=loss, sigmas=sigmas, parts=parts)

    def _fake_velocity(
        self, networks: Networks, batch: VideoBatch, x_t: Tensor, timestep: Tensor, topk: KeptTiles, index: int
    ) -> Tensor:
        """Velocity of the critic for data generated at step `index` of the list."""
        assert self.step_aware == (networks.fake_steps is not None)
        critic, steps = networks.fake_score, networks.fake_steps
        told = nullcontext()
        if steps is not None:
            assert critic.time_embedder is not None
            told = add_to_output(critic.get_submodule(critic.time_embedder), steps(index))
        with told:
            return critic(x_t, timestep, **batch.conditions, topk=topk)

    def _logits(
        self, networks: Networks, batch: VideoBatch, x_t: Tensor, timestep: Tensor, topk: KeptTiles, index: int
    ) -> tuple[Tensor, Tensor]:
        """Logits `[B, layers]` of the classifier on the critic's features, and the critic's velocity."""
        assert self.gan is not None
        assert networks.discriminator is not None
        with capture_outputs({layer: networks.fake_score.blocks[layer] for layer in self.gan.layers}) as features:
            velocity = self._fake_velocity(networks, batch, x_t, timestep, topk, index)
        shape = x_t.shape[1:]
        logits = networks.discriminator({i: networks.fake_score.gather(x, shape) for i, x in features.items()})
        # FSDP gathers the critic's outer weights for the backward only if it comes through the critic's output
        return logits + 0 * velocity.float().flatten(1).mean(1, keepdim=True), velocity

    def _noised(
        self, networks: Networks, batch: VideoBatch, x0: Tensor, *, seed: int, iteration: int, update: Update
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Noise levels `[B]`, the input of the scores without a graph, and the noise in it."""
        tokens = networks.generator.layout_for(x0.shape[1:]).num_tokens
        sigmas = dm.score_sigmas(
            seed=seed,
            iteration=iteration,
            num_slots=batch.num_slots,
            update=update,
            shift=self.shift(tokens),
            min_ratio=self.min_ratio,
            max_ratio=self.max_ratio,
        )[batch.slots]
        noise = fm.noise_like(x0, stream_seeds(batch.seeds, f"{update} score"))
        return sigmas, fm.add_noise(x0.detach(), noise, sigmas), noise

    def _guided_velocity(
        self,
        real_score: Network,
        batch: VideoBatch,
        negative: NegativeText | None,
        x_t: Tensor,
        timestep: Tensor,
        topk: KeptTiles,
    ) -> Tensor:
        cond = real_score(x_t, timestep, **batch.conditions, topk=topk)
        if not self.guided:
            return cond
        assert negative is not None
        mask = None if negative.mask is None else negative.mask.expand(len(x_t), -1)
        # the first frame stays
        given = {**batch.conditions, "text": negative.text.expand(len(x_t), -1, -1), "text_mask": mask}
        uncond = real_score(x_t, timestep, **given, topk=topk)
        return dm.guide_score(cond.float(), uncond.float(), self.guidance, self.cfg_form)
