"""Block pooling: the mean over the tokens of each block, and the self-similarity of these tokens."""

from __future__ import annotations

from vsa_kernels.pooling.api import block_mean_and_similarity, block_mean_pool

__all__ = ["block_mean_and_similarity", "block_mean_pool"]
