"""`index.json`: the position of every sample in a folder of shards, and the encoders of the data set.

The index is written last, so a folder without one is not a data set yet. Samples are read by byte offset and checked
against their digest; nothing is ever unpickled or extracted. The first value of the file is the SHA-256 of the rest.

A set that grew has a newer revision in `index.json` and the earlier ones, unchanged, in `index-1.json`, `index-2.json`
and so on; each index after the first holds the SHA-256 of the one before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

from vsa.data.index_values import channel_statistics, digest, reals, whole, wholes, words
from vsa.data.plan import Shape
from vsa.files import check_kind, parse_json, read_text
from vsa.settings import Bound

SCHEMA = 1
INDEX_NAME = "index.json"
MOST_INDEX_BYTES = 1 << 32
"""Most bytes of an index, that of some 20 million samples."""
USUAL_FPS = 8.0
"""Frames per second of toy clips, and what clips are shown at whose data set does not say it."""

# ids have no dots: the name of a shard member is split at its first dot into id and field
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_SEAL = re.compile(r'\{"index_sha256": "([0-9a-f]{64})", ')
_KEYS = {"index_sha256", "schema", "codec", "text_encoder", "latent_mean", "latent_std"}
_KEYS |= {"cond_channels", "null_text", "shards"}
_OTHER_KEYS = {"image_encoder", "revision", "previous"}
# far above the values of data sets, far below those that exhaust a machine
_MOST_CHANNELS = 65_536
_MOST_STRIDE, _MOST_SIDE, _MOST_CAPTIONS, _MOST_BYTES, _MOST_REVISIONS = 1024, 1 << 20, 100_000, 1 << 50, 100_000
_Size = Annotated[int, Bound(">=", 1), Bound("<=", _MOST_CHANNELS)]
_Text = Annotated[str, Bound(">=", 1), Bound("<=", 4096)]
_ENCODERS: dict[str, Any] = {
    "codec": {"id": _Text, "hash": _Text, "stride": list, "channels": _Size},
    "text_encoder": {"id": _Text, "hash": _Text, "dim": _Size, "max_tokens": _Size},
    "image_encoder?": {"id": _Text, "hash": _Text, "tokens": _Size, "dim": _Size},
}


@dataclass(frozen=True, kw_only=True)
class _Info:
    id: str
    hash: str

    @classmethod
    def of(cls, encoder: Any) -> Self:
        """The fields of a codec or encoder that an index stores."""
        return cls(**{each.name: getattr(encoder, each.name) for each in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class CodecInfo(_Info):
    """The codec of the latents; see `vsa.data.codecs.Codec`."""

    stride: tuple[int, int, int]
    channels: int


@dataclass(frozen=True, kw_only=True)
class TextInfo(_Info):
    """The text encoder of the captions; see `vsa.data.text.TextEncoder`."""

    dim: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class ImageInfo(_Info):
    """The image encoder of the first frames; see `vsa.data.image_encoder.ImageEncoder`."""

    tokens: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """One shard member: the position of its bytes and their SHA-256."""

    shard: str
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class About:
    """Metadata of a sample besides its latents and captions.

    Args:
        moments: means and standard deviations of its latents by channel, float32 `[2, C]` in base64.
        source: name of the file from which it was cut; None: not known.
        version: digest of the size and both ends of that file; None: not known.
        fields: further fields of that file in the caption file.
        fps: frames per second.
        start: number of its first frame in that file.
        resampled: whether frames of the file are counted after it was resampled to `fps`.
    """

    moments: str
    source: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    fps: float = USUAL_FPS
    start: int = 0
    resampled: bool = False
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class SampleEntry:
    """One sample: its latent `[C, t, h, w]` and the number of its captions."""

    id: str
    latent_shape: Shape
    latent: Span
    text: Span
    captions: int
    about: About


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard file: its size and SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The content of `index.json`.

    Args:
        codec: codec of the latents.
        text_encoder: text encoder of the captions.
        latent_mean: C per-channel means of all latents.
        latent_std: C per-channel standard deviations (1 where a channel is constant).
        null_text: position of the embedding of the empty caption.
        shards: shard files by name.
        samples: samples by id, in the order they were written.
        cond_channels: channels of the image condition stored with every latent; 0 without one.
        image_encoder: encoder of the image tokens stored with every latent; None without them.
        revision: 1 for a set that has not grown.
        previous: SHA-256 of the index of the revision before it.
    """

    codec: CodecInfo
    text_encoder: TextInfo
    latent_mean: tuple[float, ...]
    latent_std: tuple[float, ...]
    null_text: Span
    shards: Mapping[str, ShardEntry]
    samples: Mapping[str, SampleEntry]
    cond_channels: int = 0
    image_encoder: ImageInfo | None = None
    revision: int = 1
    previous: str | None = None

    def without(self, drop: Collection[str]) -> DatasetIndex:
        """The index without the given samples, and without shards that hold no other sample."""
        if not drop:
            return self
        samples = {name: sample for name, sample in self.samples.items() if name not in drop}
        used_shards = {span.shard for sample in samples.values() for span in (sample.latent, sample.text)}
        shards = {name: shard for name, shard in self.shards.items() if name in used_shards | {self.null_text.shard}}
        return replace(self, samples=samples, shards=shards)

    def to_json(self) -> str:
        """The text of `index.json`, digest first; per-shard sample lists, so that it stays readable and small."""
        records: dict[str, dict[str, Any]] = {name: asdict(shard) for name, shard in self.shards.items()}
        for sample in self.samples.values():
            latent, text = sample.latent, sample.text
            record = records[latent.shard]
            record["latent_shape"] = sample.latent_shape
            record.setdefault("latents", []).append([sample.id, latent.offset, latent.size, latent.sha256])
            about = sample.about
            details = {"source": about.source, "fields": dict(about.fields), "moments": about.moments}
            details |= {"start": about.start, "resampled": about.resampled, "version": about.version}
            details["fps"] = about.fps if about.fps != USUAL_FPS else None
            record.setdefault("about", []).append({name: value for name, value in details.items() if value})
            row = [sample.id, text.offset, text.size, text.sha256, sample.captions]
            records[text.shard].setdefault("texts", []).append(row)
        content = {
            "schema": SCHEMA,
            # absent in a set that has not grown
            **({} if self.previous is None else {"revision": self.revision, "previous": self.previous}),
            "codec": asdict(self.codec),
            "text_encoder": asdict(self.text_encoder),
            "latent_mean": self.latent_mean,
            "latent_std": self.latent_std,
            "cond_channels": self.cond_channels,
            **({} if self.image_encoder is None else {"image_encoder": asdict(self.image_encoder)}),
            "null_text": asdict(self.null_text),
            "shards": list(records.values()),
        }
        body = json.dumps(content)
        return f'{{"index_sha256": "{hashlib.sha256(body.encode()).hexdigest()}", {body[1:]}'

    def summary(self) -> str:
        """A summary in a few lines: number of samples by latent shape, and statistics of every channel."""
        counts = Counter(sample.latent_shape for sample in self.samples.values())
        lines = [f"{count:8d} latents of {'x'.join(map(str, shape))}" for shape, count in sorted(counts.items())]
        if rates := self.rates():
            named = ", ".join(f"{rate:.4g} ({count})" for rate, count in rates.most_common(5))
            mixed = ": they move at different speeds, --fps RATE makes them equal" if len(rates) > 1 else ""
            lines.append(f"frames per second of the clips: {named}{', ...' if len(rates) > 5 else ''}{mixed}")
        if self.revision > 1:
            lines.append(f"revision {self.revision} of the data set: runs that began with an earlier one keep it")
        for name, values in (("mean", self.latent_mean), ("std", self.latent_std)):
            lines.append(f"latent {name} by channel: " + " ".join(f"{value:.4g}" for value in values))
        return "\n".join(lines)

    def rates(self) -> Counter[float]:
        """Number of clips by frames per second, without those of one latent frame, which may be images."""
        return Counter(sample.about.fps for sample in self.samples.values() if sample.latent_shape[1] > 1)

    @staticmethod
    def load(path: Path) -> DatasetIndex:
        """Reads and checks `index.json`."""
        return DatasetIndex.parse(index_text(path), str(path))

    @staticmethod
    def parse(text: str, path: str) -> DatasetIndex:
        """Checks the text of an `index.json`.

        Args:
            text: content of the file.
            path: path of the file, for messages.
        """
        content = parse_json(text, path, object)
        schema = content.get("schema") if isinstance(content, dict) else None
        seal = _SEAL.match(text)
        if seal and hashlib.sha256(b"{" + text[seal.end() :].encode()).hexdigest() != seal[1]:
            raise ValueError(f"{path} is damaged: it differs from its own digest")
        if schema != SCHEMA:
            raise ValueError(f"{path}: expected schema {SCHEMA}, got {schema!r}")
        if not seal:
            raise ValueError(
                f"{path} is damaged, or from before version 0.1.0: "
                "it does not begin with its own digest, encode the data set again"
            )
        try:
            if odd := sorted(content.keys() ^ _KEYS ^ (content.keys() & _OTHER_KEYS)):
                raise ValueError(f"missing or unknown keys {odd}")
            return _parse(content)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(f"{path} is not a complete index: {type(error).__name__} {error}") from error


def index_text(path: Path) -> str:
    """The text of an index in a folder; ValueError that names the file if it cannot be read."""
    try:
        return read_text(path, limit=MOST_INDEX_BYTES)
    except FileNotFoundError:
        raise ValueError(f"no {path.name} in {path.parent}: not encoded, or encoding was interrupted") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def valid_id(name: str) -> bool:
    """Whether `name` may be a sample id: 1 to 128 of letters, digits, "_" and "-"."""
    return _ID.fullmatch(name) is not None


def _parse(content: dict[str, Any]) -> DatasetIndex:
    check_kind(content, _ENCODERS, "it")
    stride = wholes("codec.stride", content["codec"]["stride"], 3, _MOST_STRIDE)
    codec = CodecInfo(**content["codec"] | {"stride": stride})
    shards: dict[str, ShardEntry] = {}
    latents: dict[str, tuple[Shape, Span, About]] = {}
    texts: dict[str, tuple[int, Span]] = {}
    for record in content["shards"]:
        name = record["name"]
        if not _SHARD_NAME.fullmatch(name) or name in shards:
            raise ValueError(f"shard name {name!r}")
        size = whole(f"{name}.bytes", record["bytes"], 1, _MOST_BYTES)
        shards[name] = ShardEntry(name=name, bytes=size, sha256=digest(f"{name}.sha256", record["sha256"]))
        rows, abouts = record.get("latents", []), record.get("about", [])
        if len(rows) != len(abouts):
            raise ValueError(f"{name} has {len(rows)} latents, but {len(abouts)} entries about them")
        for (sample, *place), about in zip(rows, abouts, strict=True):
            if sample in latents or not valid_id(sample):
                raise ValueError(f"latent {sample!r} in {name}")
            shape, span = _shape(f"{name}.latent_shape", record["latent_shape"], codec), _span(shards[name], *place)
            # plans are laid out for the shapes before a latent is read
            if math.prod(shape) > size:
                raise ValueError(f"{name}.latent_shape={list(shape)} in a shard of {size} bytes")
            latents[sample] = shape, span, _about(sample, about)
        for sample, *place, captions in record.get("texts", ()):
            if sample in texts:
                raise ValueError(f"text {sample!r} in {name}")
            texts[sample] = whole(f"{sample}.captions", captions, 1, _MOST_CAPTIONS), _span(shards[name], *place)
    if latents.keys() != texts.keys():
        odd = sorted(latents.keys() ^ texts.keys())
        raise ValueError(f"{len(odd)} samples without latent or text, first {odd[0]!r}")
    null = content["null_text"]
    mean, std = channel_statistics(content, channels=codec.channels)
    return DatasetIndex(
        codec=codec,
        text_encoder=TextInfo(**content["text_encoder"]),
        latent_mean=mean,
        latent_std=std,
        null_text=_span(shards[null["shard"]], null["offset"], null["size"], null["sha256"]),
        shards=shards,
        samples={
            name: SampleEntry(
                id=name, latent_shape=shape, latent=span, text=texts[name][1], captions=texts[name][0], about=about
            )
            for name, (shape, span, about) in latents.items()
        },
        cond_channels=whole("cond_channels", content["cond_channels"], 0, _MOST_CHANNELS),
        image_encoder=ImageInfo(**content["image_encoder"]) if "image_encoder" in content else None,
        # absent in a set that has not grown
        revision=whole("revision", content.get("revision", 1), 1, _MOST_REVISIONS),
        previous=digest("previous", content["previous"]) if content.get("revision", 1) != 1 else None,
    )


def _about(sample: str, content: dict[str, Any]) -> About:
    others = {"source", "fields", "fps", "start", "resampled", "version"}
    if content.keys() - others != {"moments"}:
        raise ValueError(f"about {sample}: expected moments and any of {sorted(others)}, got {sorted(content)}")
    return About(
        moments=words(f"{sample}.moments", content["moments"], most=1 << 20),
        source=words(f"{sample}.source", content["source"]) if "source" in content else None,
        fields={str(name): words(f"{sample}.{name}", value) for name, value in content.get("fields", {}).items()},
        fps=reals(f"{sample}.fps", [content.get("fps", USUAL_FPS)], positive=True)[0],
        start=whole(f"{sample}.start", content.get("start", 0), 0, _MOST_BYTES),
        resampled=content.get("resampled") is True,
        version=digest(f"{sample}.version", content["version"]) if "version" in content else None,
    )


def _shape(name: str, content: Any, codec: CodecInfo) -> Shape:
    c, t, h, w = wholes(name, content, 4, _MOST_SIDE)
    if c != codec.channels:
        raise ValueError(f"{name}={content}: the codec has {codec.channels} channels")
    return c, t, h, w


def _span(shard: ShardEntry, offset: Any, size: Any, sha256: Any) -> Span:
    offset = whole(f"offset in {shard.name}", offset, 0, _MOST_BYTES)
    size = whole(f"size in {shard.name}", size, 1, _MOST_BYTES)
    if offset + size > shard.bytes:
        raise ValueError(f"bytes {offset}..{offset + size} of {shard.name}, which has {shard.bytes}")
    return Span(shard=shard.name, offset=offset, size=size, sha256=digest(f"digest in {shard.name}", sha256))
