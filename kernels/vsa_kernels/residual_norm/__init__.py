"""Residual connections, with the layer norm of the sum or without, with one pass over the tokens in each direction."""

from __future__ import annotations

from vsa_kernels.residual_norm.api import gated_residual, residual_norm

__all__ = ["gated_residual", "residual_norm"]
