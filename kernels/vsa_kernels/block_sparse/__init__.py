"""Block-sparse attention: each query block attends to the kv blocks that its list names."""

from __future__ import annotations

from vsa_kernels.block_sparse.api import block_sparse_attn, block_sparse_attn_backward, block_sparse_kernels
from vsa_kernels.block_sparse.merge import merge_attn

__all__ = ["block_sparse_attn", "block_sparse_attn_backward", "block_sparse_kernels", "merge_attn"]
