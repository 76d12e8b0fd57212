"""The batch every training step consumes.

B samples, C latent channels, T H W latent frames and size, S text tokens, E text width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from vsa.data.bad_samples import BadSample
from vsa.errors import LoaderError
from vsa.noise import draw_noise
from vsa.transfer import copy_async

TextPadding = Literal["mask", "zeros"]
"""Padding of captions to one length: `mask` hides the padding, `zeros` attends to it, as Wan was trained."""

_INPUTS = ("latents", "text", "text_mask", "cond_latents", "image_embeds")
_PER_SAMPLE = (*_INPUTS, "sample_ids", "captions", "seeds", "slots", "noise")


class PendingLatents(Protocol):
    """Latents that are computed on the training device; before that they have a shape and can be sliced by sample."""

    @property
    def shape(self) -> torch.Size:
        """`[B, C, T, H, W]`."""
        ...

    def __getitem__(self, part: slice) -> PendingLatents: ...

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tensor:
        """The latents, float32, computed on `device`."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamMark:
    """Position of a stream of shards; see `vsa.data.stream`.

    Args:
        worker: worker process of the loader that read the batch.
        shard: position in the order of shards up to which that process has yielded every sample after this batch.
    """

    worker: int
    shard: int


class NoPinnedMemory(LoaderError):
    """A batch does not fit into page-locked memory."""


@dataclass(frozen=True, kw_only=True)
class VideoBatch:
    """Samples of one latent shape, as stored (latents are not yet normalised).

    Args:
        latents: `[B, C, T, H, W]` float32; `PendingLatents` in a loader of rendered clips, until `to` computes them.
        text: `[B, S, E]` float32 text embeddings, zero-padded; a dropped caption holds the null embedding.
        text_mask: bool `[B, S]`, True for real text tokens; None: the padding is attended to as well.
        sample_ids: id of each sample.
        captions: caption of each embedding ("" where dropped).
        seeds: int64 `[B]` noise seeds, a pure function of (seed, step, sample, its occurrence in the global batch).
        slots: int64 `[B]`, position of each sample in the global batch of its step.
        num_slots: size of that global batch.
        step: optimizer step the batch belongs to.
        cond_latents: `[B, Cc, T, H, W]` float32 image condition, an input of the model besides the latents.
        image_embeds: `[B, I, D]` float32 tokens of the image encoder for the first frames.
        bad: bad samples that were drawn and replaced by others.
        mark: position of a stream of shards after this batch; None without a stream.
        noise_ahead: whether `pin_memory` draws `noise`, for a loss that uses the noise of `seeds` itself.
        noise: `[B, C, T, H, W]` float32 on the CPU, that of `seeds`; None: it is drawn when it is used.
    """

    latents: Tensor
    text: Tensor
    text_mask: Tensor | None
    sample_ids: tuple[str, ...]
    captions: tuple[str, ...]
    seeds: Tensor
    slots: Tensor
    num_slots: int
    step: int
    cond_latents: Tensor | None = None
    image_embeds: Tensor | None = None
    bad: tuple[BadSample, ...] = ()
    mark: StreamMark | None = None
    noise_ahead: bool = False
    noise: Tensor | None = None

    @property
    def conditions(self) -> dict[str, Tensor | None]:
        """Inputs of a model besides noised latents and timestep."""
        return {name: getattr(self, name) for name in _INPUTS if name != "latents"}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> VideoBatch:
        """The batch with latents and text on `device`; seeds, slots and noise stay on the CPU, where noise is drawn."""
        tensors = {name: getattr(self, name) for name in _INPUTS}
        inputs = {
            name: copy_async(t, device) if isinstance(t, Tensor) else t.to(device, non_blocking=non_blocking)
            for name, t in tensors.items()
            if t is not None
        }
        return replace(self, **inputs)

    def pin_memory(self) -> VideoBatch:
        """The batch in page-locked memory, with its noise if `noise_ahead`; a loader of batches for a GPU calls it.

        Raises:
            NoPinnedMemory: it does not fit.
        """
        tensors = {name: getattr(self, name) for name in _INPUTS}
        try:
            # pending latents are computed on the GPU
            pinned = {name: t.pin_memory() for name, t in tensors.items() if isinstance(t, Tensor)}
            if self.noise_ahead:
                pinned["noise"] = draw_noise(self.latents.shape, self.seeds, "cuda")
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise NoPinnedMemory(
                f"no page-locked memory for a batch of {len(self.sample_ids)} samples (latents "
                f"{list(self.latents.shape)}): a smaller data.num_workers or micro-batch needs less"
            ) from error
        return replace(self, **pinned)

    def rows(self, part: slice) -> VideoBatch:
        """A part of the samples, each with its slot, seed and noise."""
        values = {name: getattr(self, name) for name in _PER_SAMPLE}
        return replace(self, **{name: value[part] for name, value in values.items() if value is not None})


def check_text_padding(padding: str) -> None:
    """Raise ValueError for a padding that is not in `TextPadding`."""
    if padding not in ("mask", "zeros"):
        raise ValueError(f"text_padding must be mask or zeros, got {padding!r}")


def pad_text(rows: Sequence[Tensor], *, length: int, padding: TextPadding = "mask") -> tuple[Tensor, Tensor | None]:
    """Embeddings of several captions as one tensor, zero-padded to a fixed length, so that shapes never vary.

    Args:
        rows: B embeddings `[S_i, E]`, S_i at most `length`.
        length: S.
        padding: see `TextPadding`.

    Returns:
        float32 text `[B, S, E]`, and the bool mask `[B, S]` of the real tokens (None for `zeros`).
    """
    check_text_padding(padding)
    text = torch.zeros(len(rows), length, rows[0].shape[1])
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        text[i, : len(row)] = row
        mask[i, : len(row)] = True
    return text, (mask if padding == "mask" else None)
