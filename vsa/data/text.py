"""Text encoders: captions to embeddings `[S, E]`."""

from __future__ import annotations

import hashlib
import re
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class TextEncoder(Protocol):
    """Turns a caption into token embeddings.

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

    def encode(self, caption: str) -> Tensor:
        """float32 `[S, E]`, 1 <= S <= max_tokens, not padded; the empty caption gives the null embedding."""
        ...


class HashedNgramEncoder:
    """One token per word: the sum of hashed character n-grams of the word plus a code of its position.

    Every n-gram owns a vector of signs drawn from its blake2b digest, so equal words agree, similar words correlate
    and the table is the same on every machine without weights. Tokens have root mean square 1. Follows the subword
    sums of Bojanowski et al., "Enriching Word Vectors with Subword Information" (2017), section 3.2, with fixed signs
    in place of learned vectors.

    Args:
        dim: E, width of a token.
        max_tokens: S at most; later words are dropped.

    Raises:
        ValueError: `dim` or `max_tokens` below 1.
    """

    # the whole word weighs more than its pieces: "left" and "lift" share pieces and must stay apart
    _WORD_WEIGHT = 2.0
    _POSITION_WEIGHT = 0.5

    def __init__(self, dim: int = 64, max_tokens: int = 16) -> None:
        if dim < 1 or max_tokens < 1:
            raise ValueError(f"dim and max_tokens must be at least 1, got {dim} and {max_tokens}")
        self.dim = dim
        self.max_tokens = max_tokens
        self.id = f"hashed-ngrams-{dim}x{max_tokens}"
        probe = self.encode("The probe of a hash, probed.").numpy().astype("<f4").tobytes()
        self.hash = hashlib.sha256(f"{self.id}/v1".encode() + probe).hexdigest()[:16]

    def encode(self, caption: str) -> Tensor:
        """float32 `[S, E]`, one row a word; a caption without words gives the null embedding `[1, E]`."""
        words = re.findall(r"\w+", caption.lower())[: self.max_tokens]
        tokens = [
            self._word(word) + self._POSITION_WEIGHT * self._signs(f"position {i}") for i, word in enumerate(words)
        ]
        table = np.stack(tokens or [self._signs("null")])
        table = table / np.sqrt((table**2).mean(axis=1, keepdims=True))
        return torch.from_numpy(table.astype(np.float32))

    def _word(self, word: str) -> np.ndarray:
        marked = f"<{word}>"
        grams = [marked[i : i + n] for n in (2, 3) for i in range(len(marked) - n + 1)]
        pieces = np.sum([self._signs(f"gram {gram}") for gram in grams], axis=0) / np.sqrt(len(grams))
        return self._WORD_WEIGHT * self._signs(f"word {word}") + pieces

    def _signs(self, name: str) -> np.ndarray:
        """float64 `[E]` of -1 and 1 from the digest of `name`."""
        blocks = range((self.dim + 511) // 512)
        digest = b"".join(hashlib.blake2b(f"{i} {name}".encode()).digest() for i in blocks)
        bits = np.unpackbits(np.frombuffer(digest, dtype=np.uint8))[: self.dim]
        return bits.astype(np.float64) * 2 - 1
