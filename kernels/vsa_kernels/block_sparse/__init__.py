"""Attention over the kv blocks that each query block selected."""

from __future__ import annotations

from vsa_kernels.block_sparse.api import block_sparse_attn

__all__ = ["block_sparse_attn"]
