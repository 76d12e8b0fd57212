"""A residual connection and the layer norm of its sum, in one pass over the hidden states in each direction."""

from __future__ import annotations

from vsa_kernels.residual_norm.api import residual_norm

__all__ = ["residual_norm"]
