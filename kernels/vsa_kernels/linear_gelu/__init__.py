"""A linear layer followed by a GELU, with one pass over the hidden layer in each direction."""

from __future__ import annotations

from vsa_kernels.linear_gelu.api import linear_gelu

__all__ = ["linear_gelu"]
