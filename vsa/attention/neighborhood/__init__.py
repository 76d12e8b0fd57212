"""Neighborhood attention: windows that slide over the token grid, with stride, dilation and causal axes."""

from vsa.attention.neighborhood.simulate import simulate

__all__ = ["simulate"]
