"""What models are given of the first frames of the clips that they sample.

N clips, C T H W latent channels, frames and size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vsa.config import stored_data
from vsa.data.clip_rules import clip_size
from vsa.data.codecs import WanVAE
from vsa.data.plan import Shape

if TYPE_CHECKING:
    from vsa.sampling.pipeline import SamplingPipeline

CLEAN = "first"
"""Name of normalised first latent frames `[N, C, 1, H, W]` that stay clean; other names are those of
`Network.forward`."""

FirstFrames = Callable[[Sequence[str], Shape], Mapping[str, Tensor]]
"""Function of N prompts and a latent shape `(C, T, H, W)`: tensors with N samples each."""


def frames_of(run: SamplingPipeline, prompts: Sequence[str], shape: Shape) -> dict[str, Tensor]:
    """What the model of a run is given of the first frames of N clips, by its `first_frames`, on its device."""
    frames = {} if run.first_frames is None else run.first_frames(prompts, shape)
    return {name: tensor.to(run.device) for name, tensor in frames.items()}


def image_inputs(given: Mapping[str, Tensor], times: int = 1) -> dict[str, Tensor]:
    """The inputs of a forward among what it is given of B first frames, repeated for `times * B` samples."""
    return {name: torch.cat([tensor] * times) for name, tensor in given.items() if name != CLEAN}


def held_out_frames(config: Mapping[str, Any]) -> FirstFrames:
    """First frames of the held-out samples of a run, whose data are opened when they are needed.

    Args:
        config: config of the run.
    """

    @cache
    def opened() -> Any:
        data = stored_data(config)
        data.setup()
        return data

    return lambda prompts, shape: opened().first_frames(prompts, shape)


def with_pictures(run: SamplingPipeline, pictures: Sequence[Tensor]) -> SamplingPipeline:
    """A run whose clips begin with pictures.

    Args:
        run: run that continues a first frame, or whose model takes image conditions.
        pictures: uint8 `[H, W, 3]` in the size of the clips, one for each prompt or one for all.

    Raises:
        ValueError: the run does neither, or its codec or image encoder is not that of its training data.
    """
    if not run.continues and not run.takes_images:
        raise ValueError(
            f"{run.source} was trained with task.objective.first_frame=0: it cannot continue a first frame"
        )

    @cache
    def encoded(number: int, shape: Shape) -> Mapping[str, Tensor]:
        picture = pictures[number][None].to(run.device)
        if not run.takes_images:
            return {CLEAN: run.statistics.normalise(run.codec.encode(picture)[None])[0]}
        if not isinstance(run.codec, WanVAE):
            raise ValueError(f"image conditions need Wan's VAE, {run.source} has codec {run.codec.id}")
        inputs = run.codec.image_inputs(picture.expand(clip_size(run.codec, shape).frames, -1, -1, -1))
        if run.model.image_dim is None:
            return {"cond_latents": inputs["cond_latents"]}
        encoder = run.codec.image_encoder
        if run.image_encoder not in (None, encoder and encoder.hash):
            ours = "no image encoder" if encoder is None else f"image encoder {encoder.id}, hash {encoder.hash}"
            raise ValueError(
                f"the pipeline of data.codec.source has {ours}, but the training data of {run.source} were made with "
                f"hash {run.image_encoder}"
            )
        return inputs

    def frames(prompts: Sequence[str], shape: Shape) -> Mapping[str, Tensor]:
        rows = [encoded(i % len(pictures), shape) for i in range(len(prompts))]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return replace(run, first_frames=frames)
