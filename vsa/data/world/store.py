"""The clips of a world as training samples, rendered and encoded on the training device.

A loader yields scenes, a few thousand integers per clip; `VideoBatch.to` converts them to latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vsa.data.codecs import Codec
from vsa.data.plan import SampleRef, Shape
from vsa.data.sample_store import RenderedStore, clip_number, probe_statistics
from vsa.data.text import TextEncoder
from vsa.data.world.render import render
from vsa.data.world.scenes import Scenes, WorldClips, draw_scene, stack_scenes, world_attributes, world_caption

# patch size of the models in whose tokens a grid is given
_PATCH = (1, 2, 2)
# number of pixels for the statistics, and the smallest and largest number of clips
_PROBE_PIXELS = 1 << 26
_PROBE_CLIPS = 8, 64


def clip_size(grid: tuple[int, int, int], codec: Codec) -> tuple[int, int, int]:
    """Frames, height and width of the clip that a codec turns into a token grid."""
    t, h, w = (n * p * s for n, p, s in zip(grid, _PATCH, codec.stride, strict=True))
    return codec.frames_that_fit(t), h, w


@dataclass(frozen=True, kw_only=True, eq=False)
class SceneLatents:
    """Latents of scenes, computed by `to` (`vsa.data.batch.PendingLatents`).

    Args:
        scenes: B clips.
        size: frames, height and width of their pixels.
        codec: codec of the scenes.
    """

    scenes: Scenes
    size: tuple[int, int, int]
    codec: Codec

    @property
    def shape(self) -> torch.Size:
        """`[B, C, T, H, W]` of the latents."""
        return torch.Size((len(self.scenes), *self.codec.latent_shape(*self.size)))

    def __getitem__(self, part: slice) -> SceneLatents:
        return replace(self, scenes=self.scenes[part])

    @torch.no_grad()
    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tensor:
        """float32 latents `[B, C, T, H, W]`, not normalised."""
        videos = render(self.scenes.to(device), self.size)
        # one by one, because a larger product may round in another order
        return torch.stack([self.codec.encode(video) for video in videos])


class WorldStore(RenderedStore):
    """The clips of a world (`WorldClips`)."""

    def __init__(self, clips: WorldClips, codec: Codec, text_encoder: TextEncoder) -> None:
        super().__init__(codec, text_encoder)
        self._clips = clips
        self.size = clip_size(clips.grid, codec)
        least, most = _PROBE_CLIPS
        pixels = self.size[0] * self.size[1] * self.size[2]
        probe = self._pending(range(min(clips.count, max(least, min(most, _PROBE_PIXELS // pixels)))))
        mean, std = probe_statistics(torch.cat([probe[i : i + 1].to("cpu") for i in range(len(probe.scenes))]))
        # rounded to four digits, on which machines with another order of summation agree
        self.latent_mean, self.latent_std = mean.round(decimals=4), std.round(decimals=4)
        c, t, h, w = codec.latent_shape(*self.size)
        ids = tuple(f"world-{clips.seed}-{i:08d}" for i in range(clips.count))
        self.buckets: dict[str, dict[Shape, tuple[str, ...]]] = {"world": {(c, t, h, w): ids}}

    def latents(self, refs: Sequence[SampleRef]) -> SceneLatents:
        """Latents `[B, C, t, h, w]` of samples, to be computed on the training device."""
        return self._pending([clip_number(ref.id) for ref in refs])

    def captions(self, ref: SampleRef) -> int:
        """How many captions the sample has."""
        return 1

    def text(self, ref: SampleRef, caption: int) -> tuple[str, Tensor]:
        """The caption and its embedding `[S, E]`."""
        words = world_caption(world_attributes(self._clips.seed, clip_number(ref.id)))
        return words, self._text_encoder.encode(words)

    def _pending(self, numbers: Sequence[int]) -> SceneLatents:
        scenes = stack_scenes([draw_scene(self._clips.seed, i, self.size) for i in numbers])
        return SceneLatents(scenes=scenes, size=self.size, codec=self._codec)
