"""Block-sparse attention that skips value products of negligible weight: the second stage of SpargeAttn."""

from __future__ import annotations

from vsa_kernels.skipping.api import skipping_attn

__all__ = ["skipping_attn"]
