"""Samples of the data to show beside generated clips: decoded, and as they were before encoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsa.data.bad_samples import BadSampleError
from vsa.data.clip_rules import ClipRules, Window, clip_size
from vsa.data.datamodule import ToyOnlineDataModule
from vsa.data.index import About
from vsa.data.plan import SampleRef, Shape
from vsa.data.plan_datamodule import PlanDataModule
from vsa.data.reconstruction import decibel
from vsa.data.sample_store import clip_number
from vsa.data.stream_datamodule import StreamDataModule
from vsa.data.toy_videos import render_clip

SEARCHED = 1000
"""Samples whose captions are compared with those asked for: a text shard is read for each."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One sample.

    Args:
        id: id of the sample.
        caption: first caption.
        rebuilt: uint8 `[T, H, W, 3]`, the stored latents decoded.
        original: the same frames as they were before encoding; None where they are not at hand.
    """

    id: str
    caption: str
    rebuilt: Tensor
    original: Tensor | None

    @property
    def psnr(self) -> float | None:
        """How well the codec rebuilds the clip, in dB; None without the original."""
        if self.original is None or self.original.shape != self.rebuilt.shape:
            return None
        difference = self.rebuilt.to(torch.int32) - self.original
        return decibel(float(difference.square().double().mean()))


def examples(
    data: PlanDataModule, captions: Sequence[str], count: int, *, device: torch.device | str
) -> Iterator[Example]:
    """Samples of captions, as far as the first `SEARCHED` have them, then held-out ones.

    Args:
        data: datamodule that is set up.
        captions: captions that are wanted first.
        count: maximum number of samples.
        device: device that decodes the latents.
    """
    for ref, shape, caption in _chosen(data, captions, count):
        with suppress(BadSampleError), torch.no_grad():
            # what is drawn on demand is drawn on the device
            latents: Any = data.store.latents([ref])
            rebuilt = data.codec.decode(latents.to(device)[0]).cpu()
            yield Example(id=ref.id, caption=caption, rebuilt=rebuilt, original=original(data, ref, shape))


def _chosen(data: PlanDataModule, captions: Sequence[str], count: int) -> list[tuple[SampleRef, Shape, str]]:
    by_caption: dict[str, tuple[SampleRef, Shape, str] | None] = dict.fromkeys(captions)
    others: list[tuple[SampleRef, Shape, str]] = []
    for ref, shape, is_validation in islice(_refs(data), SEARCHED):
        if None not in by_caption.values() and len(by_caption) + len(others) >= count:
            break
        with suppress(BadSampleError):
            caption = data.store.text(ref, 0)[0]
            if caption in by_caption:
                by_caption[caption] = by_caption[caption] or (ref, shape, caption)
            elif is_validation and len(others) < count:
                others.append((ref, shape, caption))
    return [*(example for example in by_caption.values() if example is not None), *others][:count]


def _refs(data: PlanDataModule) -> Iterator[tuple[SampleRef, Shape, bool]]:
    """Every sample with its latent shape and whether it is held out, those that are first."""
    for shape, refs in sorted(data.held_out.items()):
        yield from ((ref, shape, True) for ref in refs)
    # of a stream whole shards are read
    sources = {} if isinstance(data, StreamDataModule) else data.plan.sources
    for name, source in sources.items():
        for shape, ids in source.buckets.items():
            yield from ((SampleRef(source=name, id=sample_id), shape, False) for sample_id in ids)


def original(data: PlanDataModule, ref: SampleRef, shape: Shape) -> Tensor | None:
    """The clip that a sample was encoded from, uint8 `[T, H, W, 3]`; None where it is not at hand."""
    if isinstance(data, ToyOnlineDataModule):
        return render_clip(data.toy.seed, clip_number(ref.id), size=data.toy.size)[0]
    videos: str | None = getattr(data, "videos", None)
    store: Any = data.store
    about: About | None = store.entry(ref.source, ref.id).about if videos and hasattr(store, "entry") else None
    if videos is None or about is None or about.source is None:
        return None
    path, size = Path(videos) / about.source, clip_size(data.codec, shape)
    rules = ClipRules(buckets=(size,), fps=about.fps if about.resampled else None)
    window = Window(about.start, (size.frames, size.height, size.width))
    try:
        return rules.cut(path, data.codec, window=window)[0] if path.is_file() else None
    except (ValueError, OSError):
        return None
