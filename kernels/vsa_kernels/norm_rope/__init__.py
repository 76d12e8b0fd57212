"""RMS norm over all heads of queries or keys, and their rotary position embedding."""

from __future__ import annotations

from vsa_kernels.norm_rope.api import norm_rope

__all__ = ["norm_rope"]
