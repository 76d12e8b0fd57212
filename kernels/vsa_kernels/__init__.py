"""Operators of block-sparse attention, and fused layers around it: norms, rotation, residuals, GELU."""

from __future__ import annotations

from inspect import isfunction
from pathlib import Path

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse import block_sparse_attn, block_sparse_attn_backward, block_sparse_kernels, merge_attn
from vsa_kernels.checks import typed
from vsa_kernels.coarse_fine import CoarseFineOutput, coarse_fine_attn
from vsa_kernels.compile_cache import tag_caches
from vsa_kernels.gathered import TileGroups, gathered_attn, group_tiles, longest_first
from vsa_kernels.linear_gelu import linear_gelu
from vsa_kernels.norm_rope import norm_rope
from vsa_kernels.pooling import block_mean_and_similarity, block_mean_pool
from vsa_kernels.residual_norm import gated_residual, residual_norm
from vsa_kernels.selection import mean_scores, select_share, select_topk, subblock_scores
from vsa_kernels.skipping import skipping_attn
from vsa_kernels.tail import tail_attn
from vsa_kernels.workspace import set_workspace_limit, workspace_limit

__all__ = [
    "BlockIndex",
    "Blocks",
    "CoarseFineOutput",
    "TileGroups",
    "block_mean_and_similarity",
    "block_mean_pool",
    "block_sparse_attn",
    "block_sparse_attn_backward",
    "block_sparse_kernels",
    "coarse_fine_attn",
    "gated_residual",
    "gathered_attn",
    "group_tiles",
    "linear_gelu",
    "longest_first",
    "mean_scores",
    "merge_attn",
    "norm_rope",
    "residual_norm",
    "select_share",
    "select_topk",
    "set_workspace_limit",
    "skipping_attn",
    "subblock_scores",
    "tail_attn",
    "workspace_limit",
]

# what users call: calls between the operators and the tests of their folders have no such check
globals().update({name: typed(value) for name, value in globals().items() if name in __all__ and isfunction(value)})

tag_caches(Path(__file__).parent)
