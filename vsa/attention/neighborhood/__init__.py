"""Neighborhood attention: windows that slide over the token grid, with stride, dilation and causal axes."""
