"""Reading folders of latent and text shards.

Layout of a folder (tar files in webdataset form, one sample a key):

    latents-C16x4x16x16-00000.tar   KEY.latent.safetensors, KEY.json     one latent shape per shard
                                    (tensor "latent", and "cond" in a data set with image conditions)
    text-00000.tar                  KEY.text.safetensors                 every caption; the null embedding once
    index.json                      byte offsets, sizes and digests; written last

C t h w latent channels, frames and size; Cc channels of the image condition; S E text tokens and width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from vsa.data.index import INDEX_NAME, DatasetIndex, SampleEntry, Span
from vsa.files import file_digest

NULL_KEY = "__null__"
"""Key of the null embedding in text shards."""


class LatentReader:
    """Random access to a folder of shards; holds no open files, so it can be handed to worker processes.

    Args:
        root: folder with an `index.json`.

    Raises:
        ValueError: the index is missing or malformed, or a shard is missing or cut short; names the file.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.index = DatasetIndex.load(self.root / INDEX_NAME)
        for shard in self.index.shards.values():
            path = self.root / shard.name
            if not path.is_file():
                raise ValueError(f"shard {path} is missing, {INDEX_NAME} lists it")
            size = path.stat().st_size
            if size != shard.bytes:
                raise ValueError(
                    f"shard {path} is cut short or changed: it has {size} bytes, {INDEX_NAME} says {shard.bytes}"
                )
        _, null = self._text(NULL_KEY, self.index.null_text, 0)
        self.null_text = null

    def latent(self, sample_id: str) -> Tensor:
        """float32 latents `[C, t, h, w]` of a sample, not normalised.

        Raises:
            ValueError: unknown id, or the stored bytes are damaged; names shard and sample.
        """
        return self._latent_tensor(sample_id, "latent", self.index.codec.channels)

    def condition(self, sample_id: str) -> Tensor:
        """float32 image condition `[Cc, t, h, w]` of a sample, ready for the model.

        Raises:
            ValueError: unknown id, no condition in this data set, or damaged bytes; names shard and sample.
        """
        return self._latent_tensor(sample_id, "cond", self.index.cond_channels)

    def _latent_tensor(self, sample_id: str, name: str, channels: int) -> Tensor:
        entry = self._entry(sample_id)
        header, tensors = self._tensors(sample_id, entry.latent)
        if header.get("codec_hash") != self.index.codec.hash:
            found = f"{header.get('codec_id')} {header.get('codec_hash')}"
            raise ValueError(
                f"shard {self.root / entry.latent.shard}, sample {sample_id}: encoded by {found}, "
                f"the index says {self.index.codec.id} {self.index.codec.hash}"
            )
        tensor, shape = tensors.get(name), (channels, *entry.latent_shape[1:])
        if tensor is None or tuple(tensor.shape) != shape:
            found = None if tensor is None else tuple(tensor.shape)
            raise ValueError(
                f"shard {self.root / entry.latent.shard}, sample {sample_id}: {name} of shape {found}, "
                f"the index says {shape}"
            )
        return tensor.float()

    def text(self, sample_id: str, caption: int) -> tuple[str, Tensor]:
        """One caption of a sample and its float32 embedding `[S, E]`.

        Raises:
            ValueError: unknown id or caption number, or the stored bytes are damaged; names shard and sample.
        """
        entry = self._entry(sample_id)
        if not 0 <= caption < entry.captions:
            raise ValueError(f"sample {sample_id} has {entry.captions} captions, number {caption} was asked for")
        return self._text(sample_id, entry.text, caption)

    def damaged_shards(self) -> Iterator[Path]:
        """Reads every shard whole and compares it with its digest; gives those that differ."""
        for shard in self.index.shards.values():
            if file_digest(self.root / shard.name) != shard.sha256:
                yield self.root / shard.name

    def verify(self) -> None:
        """Refuses a data set with a damaged shard.

        Raises:
            ValueError: names the first one.
        """
        for path in self.damaged_shards():
            raise ValueError(f"shard {path} is damaged: its digest differs from {INDEX_NAME}")

    def _entry(self, sample_id: str) -> SampleEntry:
        try:
            return self.index.samples[sample_id]
        except KeyError:
            raise ValueError(f"no sample {sample_id!r} in {self.root}") from None

    def _text(self, key: str, span: Span, caption: int) -> tuple[str, Tensor]:
        header, tensors = self._tensors(key, span)
        if header.get("text_encoder_hash") != self.index.text_encoder.hash:
            found = f"{header.get('text_encoder_id')} {header.get('text_encoder_hash')}"
            raise ValueError(
                f"shard {self.root / span.shard}, sample {key}: encoded by {found}, "
                f"the index says {self.index.text_encoder.id} {self.index.text_encoder.hash}"
            )
        captions, embedding = header.get("captions", []), tensors.get(str(caption))
        if embedding is None or caption >= len(captions):
            raise ValueError(f"shard {self.root / span.shard}, sample {key}: no caption number {caption}")
        return captions[caption], embedding.float()

    def _tensors(self, key: str, span: Span) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Our header and the tensors of one member, after its digest was checked."""
        path = self.root / span.shard
        with path.open("rb") as file:
            file.seek(span.offset)
            payload = file.read(span.size)
        if len(payload) != span.size or hashlib.sha256(payload).hexdigest() != span.sha256:
            raise ValueError(f"shard {path}, sample {key}: the bytes are damaged (digest differs from {INDEX_NAME})")
        try:
            tensors = load_tensors(payload)
            length = int.from_bytes(payload[:8], "little")
            header = json.loads(json.loads(payload[8 : 8 + length])["__metadata__"]["vsa"])
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"shard {path}, sample {key}: not a safetensors member of ours ({error})") from error
        return header, tensors
