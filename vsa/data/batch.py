"""The batch every training step consumes.

B samples, C latent channels, T H W latent frames and size, S text tokens, E text width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VideoBatch:
    """Samples of one latent shape, as stored (latents are not yet normalised).

    Args:
        latents: `[B, C, T, H, W]` float32.
        text: `[B, S, E]` float32 text embeddings, zero-padded; a dropped caption holds the null embedding.
        text_mask: bool `[B, S]`, True where a text token is real.
        sample_ids: id of each sample.
        captions: the caption behind each embedding ("" where dropped).
        seeds: int64 `[B]`, a pure function of (seed, step, sample): noise is drawn from it.
        slots: int64 `[B]`, position of each sample in the global batch of its step.
        num_slots: size of that global batch.
        step: optimizer step the batch belongs to.
    """

    latents: Tensor
    text: Tensor
    text_mask: Tensor
    sample_ids: tuple[str, ...]
    captions: tuple[str, ...]
    seeds: Tensor
    slots: Tensor
    num_slots: int
    step: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> VideoBatch:
        """The batch with latents and text on `device`; seeds and slots stay on the CPU, where noise is drawn."""
        moved = {n: getattr(self, n).to(device, non_blocking=non_blocking) for n in ("latents", "text", "text_mask")}
        return replace(self, **moved)
