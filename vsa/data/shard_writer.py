"""Writer of folders of latent and text shards, in the layout of `vsa.data.shards`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from vsa.data.codecs import Codec
from vsa.data.image_encoder import ImageEncoder
from vsa.data.index import (
    INDEX_NAME,
    SCHEMA,
    USUAL_FPS,
    About,
    CodecInfo,
    DatasetIndex,
    ImageInfo,
    SampleEntry,
    ShardEntry,
    Span,
    TextInfo,
    valid_id,
)
from vsa.data.index_statistics import deviation_or_one, encoded_moments
from vsa.data.index_values import LARGEST_VALUE
from vsa.data.own_files import is_leftover, listed_shards, remove_dataset, shard_files
from vsa.data.shards import NULL_KEY
from vsa.data.text import TextEncoder
from vsa.files import atomic_file, file_digest, write_whole, writing

# the classic tar header holds names of 100 bytes, of which the longest field takes 19
_LONGEST_ID = 80
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class ShardWriter:
    """Writer of one folder of shards; a context manager.

    Every shard is written under a temporary name and renamed when it is full; the index is written last. An existing
    index is removed first, so that an interrupted run leaves a folder without an index, never a mixture of data sets.

    Args:
        root: folder to write; created when missing.
        codec: codec of the latents.
        text_encoder: encoder of the captions passed to `add`.
        image_encoder: encoder of the image tokens passed to `add`; None: samples have none.
        samples_per_shard: samples in a full shard.
        dtype: dtype of the stored latents: float16, bfloat16 or float32.
        overwrite: whether an existing data set is replaced.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        codec: Codec,
        text_encoder: TextEncoder,
        image_encoder: ImageEncoder | None = None,
        samples_per_shard: int = 1024,
        dtype: str = "float16",
        overwrite: bool = False,
    ) -> None:
        self.root = Path(root)
        if dtype not in _DTYPES:
            raise ValueError(f"latent dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        if samples_per_shard < 1:
            raise ValueError(f"samples_per_shard must be at least 1, got {samples_per_shard}")
        if (self.root / INDEX_NAME).exists() and not overwrite:
            raise ValueError(f"{self.root} already holds a data set: choose another folder, or pass overwrite=True")
        own = listed_shards(self.root) or [path.name for path in shard_files(self.root) if is_leftover(path)]
        for path in shard_files(self.root):
            if path.name not in own:
                raise ValueError(f"{path} is not part of a data set in {self.root}: choose another folder, or move it")
        self._codec = codec
        self._text_encoder, self._image = text_encoder, image_encoder and ImageInfo.of(image_encoder)
        self._samples_per_shard = samples_per_shard
        self._dtype = _DTYPES[dtype]
        self._open: dict[str, _OpenShard] = {}
        self._counts: dict[str, int] = {}
        self._shards: dict[str, ShardEntry] = {}
        self._spans: dict[str, Span] = {}
        self._samples: dict[str, tuple[tuple[int, ...], int, About]] = {}
        self._cond_channels: int | None = None
        self._sums = torch.zeros(3, codec.channels, dtype=torch.float64)  # count, sum, sum of squares

    def __enter__(self) -> ShardWriter:
        self.root.mkdir(parents=True, exist_ok=True)
        remove_dataset(self.root)
        for path in (*shard_files(self.root), *self.root.glob(".tmp-*")):
            if is_leftover(path):
                path.unlink()
        null = self._text_payload([""])
        self._write("text", NULL_KEY, {"text.safetensors": null})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # shards that are still open are incomplete
            for shard in self._open.values():
                shard.abandon()

    def _finish(self) -> None:
        if not self._samples:
            raise ValueError(f"nothing to write to {self.root}: no samples")
        for stream in list(self._open):
            self._close(stream)
        write_whole(self.root / INDEX_NAME, self._index().to_json())

    def add(
        self,
        sample_id: str,
        latents: Tensor,
        captions: Sequence[str],
        info: Mapping[str, Any],
        cond_latents: Tensor | None = None,
        image_embeds: Tensor | None = None,
        version: str | None = None,
    ) -> None:
        """Store one sample.

        Args:
            sample_id: unique name.
            latents: `[C, t, h, w]`, not normalised.
            captions: one or more captions.
            info: metadata of the sample (frame rate, size), stored as KEY.json; its "source" (name of a file),
                "fields" (texts by name) and the "fps" of a clip are also stored in the index, and for a clip of a film
                its "start" and whether it is "resampled"; see `About`.
            cond_latents: image condition `[Cc, t, h, w]` for the model; either all samples have one or none has.
            image_embeds: tokens `[I, D]` of the image encoder, with one.
            version: version of the file, which the index alone stores; see `About`.
        """
        if not valid_id(sample_id) or len(sample_id) > _LONGEST_ID or sample_id == NULL_KEY:
            raise ValueError(f"sample id {sample_id!r} must be 1 to {_LONGEST_ID} letters, digits, '_' or '-'")
        if sample_id in self._samples:
            raise ValueError(f"sample id {sample_id!r} is used twice")
        if latents.dim() != 4 or latents.shape[0] != self._codec.channels:
            raise ValueError(
                f"latents of {sample_id} must be [{self._codec.channels}, t, h, w], got {list(latents.shape)}"
            )
        if not captions:
            raise ValueError(f"sample {sample_id} has no caption")
        latent = self._as_stored("latents", sample_id, latents)
        tensors = {"latent": latent}
        if cond_latents is not None:
            if cond_latents.shape[1:] != latents.shape[1:]:
                raise ValueError(
                    f"cond_latents of {sample_id} must be [Cc, {', '.join(map(str, latents.shape[1:]))}], "
                    f"got {list(cond_latents.shape)}"
                )
            tensors["cond"] = self._as_stored("cond_latents", sample_id, cond_latents)
        cond_channels = 0 if cond_latents is None else len(cond_latents)
        if self._cond_channels not in (None, cond_channels):
            raise ValueError(
                f"sample {sample_id} has {cond_channels} channels of image condition, "
                f"expected {self._cond_channels} as before"
            )
        self._cond_channels = cond_channels

        size = None if self._image is None else [self._image.tokens, self._image.dim]
        actual = None if image_embeds is None else list(image_embeds.shape)
        if actual != size:
            raise ValueError(f"image_embeds of {sample_id} must be {size}, got {actual}")
        if image_embeds is not None:
            tensors["image"] = self._as_stored("image_embeds", sample_id, image_embeds)

        flat = latent.double().flatten(1)
        self._sums += torch.stack([torch.full((len(flat),), flat.shape[1]), flat.sum(1), (flat**2).sum(1)])
        shape = tuple(latents.shape)
        header = {"codec_id": self._codec.id, "codec_hash": self._codec.hash}
        record = {"schema": SCHEMA, "id": sample_id, "latent_shape": shape, **header, "captions": list(captions)}
        record |= info
        fields = {
            "latent.safetensors": save_tensors(tensors, {"vsa": json.dumps(header)}),
            "json": json.dumps(record, ensure_ascii=False).encode(),
        }
        moving = info.get("clip_size", [1])[0] > 1
        about = About(
            moments=encoded_moments(latent.float()),
            source=info.get("source"),
            fields=info.get("fields") or {},
            fps=info.get("fps", USUAL_FPS) if moving or "start" in info else USUAL_FPS,
            start=info.get("start", 0),
            resampled=info.get("resampled", False),
            version=version,
        )
        self._samples[sample_id] = shape, len(captions), about
        self._write(f"latents-C{'x'.join(map(str, shape))}", sample_id, fields)
        self._write("text", sample_id, {"text.safetensors": self._text_payload(captions)})

    def _as_stored(self, what: str, sample_id: str, tensor: Tensor) -> Tensor:
        result = tensor.detach().cpu().to(self._dtype).contiguous()
        if not result.isfinite().all():
            raise ValueError(f"{what} of {sample_id} are not finite as {str(self._dtype).removeprefix('torch.')}")
        if result.abs().max() > LARGEST_VALUE:
            raise ValueError(
                f"{what} of {sample_id} have values of {float(result.abs().max()):.3g}, above {LARGEST_VALUE:g}"
            )
        return result

    def _text_payload(self, captions: Sequence[str]) -> bytes:
        encoder = self._text_encoder
        header = {"text_encoder_id": encoder.id, "text_encoder_hash": encoder.hash, "captions": list(captions)}
        rows = encoder.encode_batch(captions)
        tensors = {str(i): row.contiguous() for i, row in enumerate(rows)}
        # a single metadata key, because the order of several in the file would change from run to run
        return save_tensors(tensors, {"vsa": json.dumps(header)})

    def _write(self, stream: str, key: str, fields: dict[str, bytes]) -> None:
        if stream not in self._open:
            number = self._counts.get(stream, 0)
            self._counts[stream] = number + 1
            self._open[stream] = _OpenShard(self.root / f"{stream}-{number:05d}.tar")
        self._open[stream].write(key, fields)
        if self._open[stream].keys == self._samples_per_shard:
            self._close(stream)

    def _close(self, stream: str) -> None:
        entry, spans = self._open[stream].close()
        del self._open[stream]
        self._shards[entry.name] = entry
        self._spans.update(spans)

    def _index(self) -> DatasetIndex:
        count, total, squares = self._sums
        mean = total / count
        std = deviation_or_one((squares / count - mean**2).clamp_min(0).sqrt())
        return DatasetIndex(
            codec=CodecInfo.of(self._codec),
            text_encoder=TextInfo.of(self._text_encoder),
            latent_mean=tuple(mean.tolist()),
            latent_std=tuple(std.tolist()),
            null_text=self._spans[f"{NULL_KEY}.text.safetensors"],
            shards=self._shards,
            samples={
                name: SampleEntry(
                    id=name,
                    latent_shape=shape,  # pyright: ignore[reportArgumentType]
                    latent=self._spans[f"{name}.latent.safetensors"],
                    text=self._spans[f"{name}.text.safetensors"],
                    captions=captions,
                    about=about,
                )
                for name, (shape, captions, about) in self._samples.items()
            },
            cond_channels=self._cond_channels or 0,
            image_encoder=self._image,
        )


class _OpenShard:
    """A tar file during writing, under a temporary name."""

    def __init__(self, path: Path) -> None:
        # imported here, because webdataset takes seconds to import and readers do not need it
        from webdataset.writer import TarWriter

        self.path = path
        self.keys = 0
        self._digests: dict[str, str] = {}
        self._rename = atomic_file(path)
        self._temporary = self._rename.__enter__()
        self._file = self._temporary.open("wb")
        # fixed time and owner, so that equal samples give equal shards
        self._tar = TarWriter(self._file, encoder=False, compress=False, mtime=0, user="vsa", group="vsa")

    def write(self, key: str, fields: dict[str, bytes]) -> None:
        with writing(self.path, self._temporary):
            self._tar.write({"__key__": key, **fields})
        self._digests.update(
            {f"{key}.{field}": hashlib.sha256(payload).hexdigest() for field, payload in fields.items()}
        )
        self.keys += 1

    def close(self) -> tuple[ShardEntry, dict[str, Span]]:
        with writing(self.path, self._temporary):
            self._tar.close()
            self._file.close()
        # offsets come from reading the file back, which verifies what the index states
        with tarfile.open(self._temporary, "r:") as tar:
            spans = {
                m.name: Span(shard=self.path.name, offset=m.offset_data, size=m.size, sha256=self._digests[m.name])
                for m in tar
            }
        size, digest = os.path.getsize(self._temporary), file_digest(self._temporary)
        self._rename.__exit__(None, None, None)
        return ShardEntry(name=self.path.name, bytes=size, sha256=digest), spans

    def abandon(self) -> None:
        """Close and remove the temporary file, without hiding the original error if the disk is full."""
        for stream in (self._tar, self._file):
            with contextlib.suppress(OSError):
                stream.close()
        self._temporary.unlink(missing_ok=True)
