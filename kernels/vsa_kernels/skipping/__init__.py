"""Block-sparse attention that leaves out products with values that weigh next to nothing."""

from __future__ import annotations

from vsa_kernels.skipping.api import skipping_attn

__all__ = ["skipping_attn"]
