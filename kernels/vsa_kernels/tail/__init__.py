"""Block-sparse attention with a pooled tail: kv blocks that are not listed join the softmax by their means."""

from __future__ import annotations

from vsa_kernels.tail.api import tail_attn

__all__ = ["tail_attn"]
