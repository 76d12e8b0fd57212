"""Reader of folders of latent and text shards.

Layout of a folder (tar files in webdataset form, one sample a key):

    latents-C16x4x16x16-00000.tar   KEY.latent.safetensors, KEY.json     one latent shape per shard
                                    (tensor "latent", in a data set with image conditions "cond" and "image")
    text-00000.tar                  KEY.text.safetensors                 every caption; the null embedding once
    index.json                      byte offsets, sizes and digests; written last

C t h w latent channels, frames and size; Cc channels of the image condition; I D image tokens and width; S E text
tokens and width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from vsa.data.bad_samples import BadSampleError, Cause
from vsa.data.index import INDEX_NAME, DatasetIndex, SampleEntry, Span
from vsa.data.index_values import LARGEST_VALUE
from vsa.files import file_digest, open_regular, parse_json

NULL_KEY = "__null__"
"""Key of the null embedding in text shards."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class LatentReader:
    """Random access to a folder of shards; holds no open files, so that it can be passed to worker processes.

    Args:
        root: folder with an `index.json`.
        index: part of the index to read, see `DatasetIndex.without`; None: the whole `index.json`.
        whole: whether missing and truncated shards and a damaged null embedding raise an error.

    Attributes:
        place: the folder, for messages.
    """

    def __init__(self, root: str | Path, *, index: DatasetIndex | None = None, whole: bool = True) -> None:
        self.root = Path(root)
        self.place = str(self.root)
        self.index = DatasetIndex.load(self.root / INDEX_NAME) if index is None else index
        if whole:
            for problem in self.misshapen_shards().values():
                raise ValueError(problem)
            self.null_text = self.read_null_text()

    def read_null_text(self) -> Tensor:
        """float32 embedding `[S, E]` of the empty caption.

        Raises:
            BadSampleError: its bytes are damaged.
        """
        return next(self._texts(NULL_KEY, self.index.null_text, [0]))[1]

    def misshapen_shards(self) -> dict[str, str]:
        """Problem of each shard that is missing or has an unexpected size, by name."""
        problems = {}
        for shard in self.index.shards.values():
            path = self.root / shard.name
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                problems[shard.name] = f"shard {path} is missing, but {INDEX_NAME} lists it"
            elif size != shard.bytes:
                problems[shard.name] = f"shard {path} is truncated or changed: expected {shard.bytes} bytes, got {size}"
        return problems

    def latent(self, sample_id: str) -> Tensor:
        """float32 latents `[C, t, h, w]` of a sample, not normalised."""
        return self._stored(sample_id, {"latent": (self.index.codec.channels, *self._cells(sample_id))})[0]

    def image_inputs(self, sample_id: str) -> dict[str, Tensor]:
        """What the data set has of a sample's first frame, for the model: float32 `cond_latents` `[Cc, t, h, w]` and
        `image_embeds` `[I, D]`."""
        shapes, encoder = dict[str, tuple[int, ...]](), self.index.image_encoder
        if self.index.cond_channels:
            shapes["cond"] = self.index.cond_channels, *self._cells(sample_id)
        if encoder is not None:
            shapes["image"] = encoder.tokens, encoder.dim
        names = {"cond": "cond_latents", "image": "image_embeds"}
        tensors = self._stored(sample_id, shapes) if shapes else ()
        return {names[name]: tensor for name, tensor in zip(shapes, tensors, strict=True)}

    def _cells(self, sample_id: str) -> tuple[int, ...]:
        return self._entry(sample_id).latent_shape[1:]

    def _stored(self, sample_id: str, shapes: Mapping[str, Sequence[int]]) -> list[Tensor]:
        """Tensors beside the latent of a sample, and the latent itself, by name with their shapes."""
        entry = self._entry(sample_id)
        header, tensors = self._tensors(sample_id, entry.latent)
        if header.get("codec_hash") != self.index.codec.hash:
            actual = f"{_short(header.get('codec_id'))} {_short(header.get('codec_hash'))}"
            says = f"{self.index.codec.id} {self.index.codec.hash}"
            raise self._bad(sample_id, entry.latent, "metadata", f"expected encoder {says}, got {actual}")
        for name, shape in shapes.items():
            actual = list(tensors[name].shape) if name in tensors else None
            if actual != [*shape]:
                raise self._bad(sample_id, entry.latent, "shape", f"expected {name} of shape {[*shape]}, got {actual}")
        return [self._numbers(sample_id, entry.latent, name, tensors[name]) for name in shapes]

    def text(self, sample_id: str, caption: int) -> tuple[str, Tensor]:
        """One caption of a sample and its float32 embedding `[S, E]`."""
        entry = self._entry(sample_id)
        if not 0 <= caption < entry.captions:
            raise ValueError(f"caption of sample {sample_id} must be in 0..{entry.captions - 1}, got {caption}")
        return next(self._texts(sample_id, entry.text, [caption]))

    def texts(self, sample_id: str) -> Iterator[tuple[str, Tensor]]:
        """Every caption of a sample with its embedding, as in `text`; the member that holds them is read once."""
        entry = self._entry(sample_id)
        return self._texts(sample_id, entry.text, range(entry.captions))

    def damaged_shards(self) -> Iterator[Path]:
        """Read every shard of the expected size in full and yield those that differ from their digest."""
        misshapen = self.misshapen_shards()
        for shard in self.index.shards.values():
            if shard.name not in misshapen and file_digest(self.root / shard.name) != shard.sha256:
                yield self.root / shard.name

    def verify(self) -> None:
        """Refuses a data set with a damaged shard."""
        for path in self.damaged_shards():
            raise ValueError(f"shard {path} is damaged: its digest differs from {INDEX_NAME}")

    def _entry(self, sample_id: str) -> SampleEntry:
        try:
            return self.index.samples[sample_id]
        except KeyError:
            raise ValueError(f"no sample {sample_id!r} in {self.root}") from None

    def _texts(self, key: str, span: Span, numbers: Iterable[int]) -> Iterator[tuple[str, Tensor]]:
        header, tensors = self._tensors(key, span)
        encoder = self.index.text_encoder
        if header.get("text_encoder_hash") != encoder.hash:
            actual = f"{_short(header.get('text_encoder_id'))} {_short(header.get('text_encoder_hash'))}"
            says = f"{encoder.id} {encoder.hash}"
            raise self._bad(key, span, "metadata", f"expected encoder {says}, got {actual}")
        for caption in numbers:
            captions, embedding = header.get("captions"), tensors.get(str(caption))
            if embedding is None or not isinstance(captions, list) or caption >= len(captions):
                raise self._bad(key, span, "metadata", f"missing caption {caption}")
            if not isinstance(captions[caption], str):
                got = _short(captions[caption])
                raise self._bad(key, span, "metadata", f"caption {caption}: expected text, got {got}")
            if embedding.dim() != 2 or embedding.shape[1] != encoder.dim or len(embedding) > encoder.max_tokens:
                says = f"at most {encoder.max_tokens} tokens of width {encoder.dim}"
                raise self._bad(key, span, "shape", f"expected text of {says}, got shape {list(embedding.shape)}")
            yield captions[caption], self._numbers(key, span, "text", embedding)

    def _numbers(self, key: str, span: Span, name: str, tensor: Tensor) -> Tensor:
        """The tensor as float32, checked for dtype and range."""
        if tensor.dtype not in _DTYPES:
            raise self._bad(key, span, "dtype", f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}")
        tensor = tensor.float()
        # empty captions may have no tokens
        least, most = (float(value) for value in tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
        # comparisons with NaN are false
        if not (least >= -LARGEST_VALUE and most <= LARGEST_VALUE):
            cause: Cause = "nan" if tensor.isnan().any() else "inf" if tensor.isinf().any() else "range"
            words = {"nan": "are not finite (NaN)", "inf": "are not finite (Inf)"}
            what = words.get(cause, f"reach {float(tensor.abs().max()):.3g}, at most {LARGEST_VALUE:g} is a latent")
            raise self._bad(key, span, cause, f"values of {name} {what}")
        return tensor

    def _tensors(self, key: str, span: Span) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Header and tensors of one member, with a checked digest."""
        payload = self._payload(key, span)
        if len(payload) != span.size or hashlib.sha256(payload).hexdigest() != span.sha256:
            raise self._bad(key, span, "digest", f"the bytes are damaged (digest differs from {INDEX_NAME})")
        try:
            tensors = load_tensors(payload)
            length = int.from_bytes(payload[:8], "little")
            outer = parse_json(payload[8 : 8 + length], "header", {"__metadata__": {"vsa": str}})
            header = parse_json(outer["__metadata__"]["vsa"], "header", object)
        except (SafetensorError, ValueError) as error:
            raise self._bad(key, span, "decode", f"expected a safetensors member of vsa ({_short(error)})") from error
        if not isinstance(header, dict):
            raise self._bad(key, span, "metadata", f"header: expected an object, got {_short(header)}")
        return header, tensors

    def _payload(self, key: str, span: Span) -> bytes:
        """The bytes of one member, fewer if the shard is truncated."""
        try:
            with open_regular(self.root / span.shard) as file:
                file.seek(span.offset)
                return file.read(span.size)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise self._bad(key, span, "unreadable", f"cannot be read ({reason})") from error

    def _bad(self, key: str, span: Span, cause: Cause, what: str) -> BadSampleError:
        message = f"shard {self.place}/{span.shard}, sample {key}: {what}"
        return BadSampleError(message, cause=cause, shard=span.shard, sample=key)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
