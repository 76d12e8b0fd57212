"""Sample stores: folders of shards, or toy clips rendered on the fly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vsa.data.bad_samples import read_drop_list
from vsa.data.batch import PendingLatents
from vsa.data.codecs import EMBEDDED, Codec, settings_of
from vsa.data.encoders import SENTENCE_SETTINGS
from vsa.data.index import INDEX_NAME, USUAL_FPS, CodecInfo, DatasetIndex, ImageInfo, SampleEntry, TextInfo
from vsa.data.index_statistics import deviation_or_one, pooled_statistics
from vsa.data.plan import SampleRef, Shape
from vsa.data.revisions import open_local_index
from vsa.data.shards import LatentReader
from vsa.data.text import SentenceEncoder, TextEncoder
from vsa.data.toy_videos import ToyClips, captions_of, clip_attributes, render_clip

# number of clips for the statistics of a toy set
_PROBE_CLIPS = 64


class SampleStore(Protocol):
    """Random access to latents and captions of named sources."""

    @property
    def codec(self) -> CodecInfo:
        """The codec of the latents."""
        ...

    @property
    def text_encoder(self) -> TextInfo:
        """The text encoder of the captions."""
        ...

    @property
    def latent_mean(self) -> Tensor:
        """float32 `[C]` mean of the latents."""
        ...

    @property
    def latent_std(self) -> Tensor:
        """float32 `[C]` standard deviation of the latents."""
        ...

    @property
    def cond_channels(self) -> int:
        """Number of channels of the image condition of every sample; 0 without one."""
        ...

    @property
    def image_encoder(self) -> ImageInfo | None:
        """The encoder of the image tokens of every sample; None without them."""
        ...

    @property
    def null_text(self) -> Tensor:
        """float32 `[S, E]`, the embedding of the empty caption."""
        ...

    @property
    def fps(self) -> float:
        """Frames per second of most clips."""
        ...

    @property
    def buckets(self) -> Mapping[str, Mapping[Shape, tuple[str, ...]]]:
        """Sample ids by latent shape, by source."""
        ...

    def latents(self, refs: Sequence[SampleRef]) -> Tensor | PendingLatents:
        """float32 `[B, C, t, h, w]` of samples of one shape, not normalised."""
        ...

    def image_inputs(self, ref: SampleRef) -> dict[str, Tensor]:
        """What the store has of the first frame of the sample; see `LatentReader.image_inputs`."""
        ...

    def captions(self, ref: SampleRef) -> int:
        """How many captions the sample has."""
        ...

    def text(self, ref: SampleRef, caption: int) -> tuple[str, Tensor]:
        """One caption and its embedding `[S, E]`."""
        ...


def open_shards(
    roots: Mapping[str, str | Path],
    *,
    revisions: Mapping[str, int | None] | None = None,
    drop: str | Path | None = None,
    tell: Callable[[str], None] = print,
) -> ShardStore:
    """Open folders of shards, without the samples of a drop list.

    Args:
        roots: folder by source name.
        revisions: revision of each folder, None for the newest one, by source name; None: the newest ones.
        drop: see `vsa.data.bad_samples.read_drop_list`; None: all samples.
        tell: function called with messages for the user.
    """
    opened = {name: open_local_index(Path(root), (revisions or {}).get(name)) for name, root in roots.items()}
    for name, (index, newest) in opened.items():
        if index.revision < newest.revision:
            tell(f"{roots[name]} has grown to revision {newest.revision}; revision {index.revision} of it is used")
    indexes = {name: index for name, (index, _) in opened.items()}
    known = {name: newest.samples.keys() for name, (_, newest) in opened.items()}
    indexes = chosen_samples(indexes, drop=drop, tell=tell, known=known)
    return ShardStore({name: LatentReader(root, index=indexes[name]) for name, root in roots.items()})


def chosen_samples(
    indexes: Mapping[str, DatasetIndex],
    *,
    drop: str | Path | None,
    tell: Callable[[str], None],
    known: Mapping[str, Collection[str]] | None = None,
) -> Mapping[str, DatasetIndex]:
    """The indexes without the samples of a drop list.

    Arguments as in `open_shards`; a drop list may also name samples of newer revisions, `known`.
    """
    if drop is None:
        return indexes
    samples = {name: index.samples.keys() for name, index in indexes.items()}
    dropped = read_drop_list(Path(drop), samples if known is None else known)
    dropped = {name: names & samples[name] for name, names in dropped.items()}
    tell(
        f"data.drop={drop} leaves out {sum(map(len, dropped.values()))} of {sum(map(len, samples.values()))} "
        "samples; if training samples are among them, this changes the order of the others (plan hash)"
    )
    return {name: index.without(dropped[name]) for name, index in indexes.items()}


def refuse_other_encoders(store: SampleStore, codec: Codec, text_encoder: TextEncoder) -> None:
    """Raise ValueError if another codec or text encoder has encoded the samples."""
    for what, ours, theirs in (
        ("codec", CodecInfo.of(codec), store.codec),
        ("text encoder", TextInfo.of(text_encoder), store.text_encoder),
    ):
        if ours != theirs:
            sentences = theirs.id.startswith(SentenceEncoder.NAME) and not ours.id.startswith(SentenceEncoder.NAME)
            settings = " ".join(SENTENCE_SETTINGS) if sentences else settings_of(theirs.id)
            raise ValueError(
                f"the shards were encoded with {what} {theirs.id} ({theirs.hash}), "
                f"the configuration has {ours.id} ({ours.hash})" + (f": set {settings}" if settings else "")
            )


def stored_index(data: Any) -> Iterator[tuple[str, DatasetIndex]]:
    """Folder and index of the first set that the settings of a data module name, if it can be read."""
    root = data.get("root") or next((source["root"] for source in (data.get("sources") or {}).values()), None)
    # a set that cannot be read is refused when it is opened
    with suppress(ValueError, OSError):
        yield str(root), DatasetIndex.load(Path(str(root)) / INDEX_NAME)


def follow_codec(data: Any) -> str | None:
    """Give settings of shards with an embedded codec the kind that the record of their set names; a line about it.

    Args:
        data: settings of a data module, changed here.
    """
    target = data.get("codec", {}).get("_target_")
    for root, index in stored_index(data):
        stored = EMBEDDED.get(index.codec.id.partition("-")[0])
        if target != stored and {target, stored} == set(EMBEDDED.values()):
            data.codec._target_ = stored
            return f"the shards in {root} have another embedded codec: data.codec._target_={stored}"
    return None


class ShardStore:
    """One or more folders of shards made by the same codec and text encoder.

    Args:
        readers: reader of each folder, by source name.
    """

    def __init__(self, readers: Mapping[str, LatentReader]) -> None:
        if not readers:
            raise ValueError("expected at least one data set, got none")
        self._readers = dict(readers)
        first, *others = self._readers.values()
        self.codec = first.index.codec
        self.text_encoder = first.index.text_encoder
        self.cond_channels, self.image_encoder = first.index.cond_channels, first.index.image_encoder
        self.null_text = first.null_text
        for other in others:
            if other.index.cond_channels != self.cond_channels:
                raise ValueError(
                    f"cannot mix {first.place} ({self.cond_channels} channels of image condition) with {other.place} "
                    f"({other.index.cond_channels})"
                )
            for what in ("codec", "text_encoder", "image_encoder"):
                ours, theirs = getattr(first.index, what), getattr(other.index, what)
                if ours != theirs:
                    names = [f"({what} {info.id}, {info.hash})" if info else f"(no {what})" for info in (ours, theirs)]
                    raise ValueError(f"cannot mix {first.place} {names[0]} with {other.place} {names[1]}")
        self.buckets = {name: _by_shape(reader) for name, reader in self._readers.items()}
        rates = sum((reader.index.rates() for reader in self._readers.values()), Counter[float]())
        self.fps = max(rates, key=lambda rate: rates[rate], default=USUAL_FPS)
        mean, std = pooled_statistics([reader.index for reader in self._readers.values()])
        self.latent_mean, self.latent_std = mean.float(), std.float()

    @property
    def revisions(self) -> dict[str, int]:
        """Revision of each folder, by source."""
        return {name: reader.index.revision for name, reader in self._readers.items()}

    def entry(self, source: str, sample_id: str) -> SampleEntry:
        """The entry of a sample in its index."""
        return self._readers[source].index.samples[sample_id]

    def latents(self, refs: Sequence[SampleRef]) -> Tensor:
        """float32 `[B, C, t, h, w]` of samples of one shape, not normalised."""
        # a sample that a batch holds many times is read once
        read = cache(lambda ref: self._readers[ref.source].latent(ref.id))
        return torch.stack([read(ref) for ref in refs])

    def image_inputs(self, ref: SampleRef) -> dict[str, Tensor]:
        """What the store has of the first frame of the sample; see `LatentReader.image_inputs`."""
        return self._readers[ref.source].image_inputs(ref.id)

    def captions(self, ref: SampleRef) -> int:
        """How many captions the sample has."""
        return self._readers[ref.source].index.samples[ref.id].captions

    def text(self, ref: SampleRef, caption: int) -> tuple[str, Tensor]:
        """One caption and its embedding `[S, E]`."""
        return self._readers[ref.source].text(ref.id, caption)


class RenderedStore:
    """What stores of clips that are made on demand, without files, have in common.

    Args:
        codec: codec of the pixels.
        text_encoder: encoder of the captions.
    """

    cond_channels = 0
    image_encoder = None
    fps = USUAL_FPS

    def __init__(self, codec: Codec, text_encoder: TextEncoder) -> None:
        self._codec, self._text_encoder = codec, text_encoder
        self.codec, self.text_encoder = CodecInfo.of(codec), TextInfo.of(text_encoder)
        self.null_text = text_encoder.encode("")

    def image_inputs(self, ref: SampleRef) -> dict[str, Tensor]:
        """Empty: these clips have no image condition."""
        return {}


class ToyStore(RenderedStore):
    """Toy clips (`ToyClips`)."""

    def __init__(self, clips: ToyClips, codec: Codec, text_encoder: TextEncoder) -> None:
        super().__init__(codec, text_encoder)
        self._clips, self.fps = clips, float(clips.fps)
        probe = torch.stack([self._encode(i) for i in range(min(clips.count, _PROBE_CLIPS))])
        self.latent_mean, self.latent_std = probe_statistics(probe)
        c, t, h, w = probe.shape[1:]
        ids = tuple(f"toy-{clips.seed}-{i:08d}" for i in range(clips.count))
        self.buckets = {"toy": {(c, t, h, w): ids}}

    def latents(self, refs: Sequence[SampleRef]) -> Tensor:
        """float32 `[B, C, t, h, w]`, not normalised."""
        # a sample that a batch holds many times is drawn once
        draw = cache(lambda ref: self._encode(clip_number(ref.id)))
        return torch.stack([draw(ref) for ref in refs])

    def captions(self, ref: SampleRef) -> int:
        """How many captions the sample has."""
        return len(self._captions(ref))

    def text(self, ref: SampleRef, caption: int) -> tuple[str, Tensor]:
        """One caption and its embedding `[S, E]`."""
        words = self._captions(ref)[caption]
        return words, self._text_encoder.encode(words)

    def _encode(self, number: int) -> Tensor:
        video, _, _ = render_clip(self._clips.seed, number, size=self._clips.size)
        return self._codec.encode(video)

    def _captions(self, ref: SampleRef) -> tuple[str, ...]:
        return captions_of(clip_attributes(self._clips.seed, clip_number(ref.id)))


def probe_statistics(latents: Tensor) -> tuple[Tensor, Tensor]:
    """float32 `[C]` mean and standard deviation of latents `[B, C, t, h, w]`."""
    flat = latents.double().transpose(0, 1).flatten(1)
    return flat.mean(1).float(), deviation_or_one(flat.std(1, correction=0)).float()


def clip_number(sample_id: str) -> int:
    """Number of a rendered clip in its set, the end of its id."""
    return int(sample_id.rpartition("-")[2])


def _by_shape(reader: LatentReader) -> dict[Shape, tuple[str, ...]]:
    ids: dict[Shape, list[str]] = {}
    for sample in reader.index.samples.values():
        ids.setdefault(sample.latent_shape, []).append(sample.id)
    return {shape: tuple(names) for shape, names in ids.items()}
