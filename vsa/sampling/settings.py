"""Sampling settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from vsa.attention.denoising import Denoising, DenoisingPlan, progress_of
from vsa.attention.kept_tiles import KeptTiles
from vsa.data.batch import TextPadding
from vsa.diffusion.flow_matching import to_timestep
from vsa.diffusion.sampler import euler_sigmas, step_list


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """All settings that determine the clip of a prompt, besides the weights.

    Args:
        seed: clip i of a call starts from the noise of (seed, i).
        steps: Euler steps, or the length of `step_list`.
        guidance: classifier-free guidance scale in the standard form; 1 skips the unconditional pass.
        flow_shift: flow shift of the Euler steps; 1 with a step list, which already includes its shift.
        topk: video kv tiles per query tile.
        denoising: dense steps and layers, and reuse of selections; its budgets are part of `topk`.
        latent_shape: (C, T, H, W) of one clip.
        batch_size: clips sampled together; changes them only by rounding.
        text_padding: padding of the prompts, as in training.
        step_list: timesteps of a distilled generator, sampled with `sample_few_step`; None: Euler steps.
    """

    seed: int = 0
    steps: int = 32
    guidance: float = 1.0
    flow_shift: float = 1.0
    topk: KeptTiles
    denoising: DenoisingPlan = field(default_factory=DenoisingPlan)
    latent_shape: tuple[int, int, int, int]
    batch_size: int = 16
    text_padding: TextPadding = "mask"
    step_list: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.topk.layers) < 1:
            raise ValueError(f"topk must be at least 1, got {self.topk}")
        if len(self.latent_shape) != 4 or min(self.latent_shape) < 1:
            raise ValueError(f"latent_shape must be four positive sizes (C, T, H, W), got {self.latent_shape}")
        if not 0 < self.flow_shift < math.inf:
            raise ValueError(f"flow shift must be above 0 and finite, got {self.flow_shift}")
        if not math.isfinite(self.guidance):
            raise ValueError(f"guidance must be a finite number, got {self.guidance}")
        if self.step_list is not None and (self.steps, self.flow_shift) != (len(step_list(self.step_list)), 1):
            raise ValueError(
                f"step list {list(self.step_list)} needs {len(self.step_list)} steps and flow shift 1, got "
                f"steps={self.steps} and flow_shift={self.flow_shift}"
            )

    @property
    def timesteps(self) -> tuple[float, ...]:
        """Timestep that the model reads at each step."""
        if self.step_list is not None:
            return self.step_list
        return tuple(to_timestep(euler_sigmas(self.steps, self.flow_shift)[:-1]).tolist())

    def kept(self, num_tiles: int, num_layers: int) -> list[KeptTiles]:
        """Number of tiles that each layer keeps in each step."""
        passes = (Denoising(self.denoising).at(i, progress_of(t)) for i, t in enumerate(self.timesteps))
        return [now.kept(self.topk, num_tiles, num_layers) for now in passes]
