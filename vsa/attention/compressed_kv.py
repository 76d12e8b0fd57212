"""Attention to compressed keys and values, one per tile. B batch, L tokens, N tiles, H heads, D head dim."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vsa_kernels import block_mean_pool

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.full import dense_attn
from vsa.attention.layout import TileLayout
from vsa.settings import AtLeastOne, validated


@validated
class CompressedKV(AttentionMethod):
    """Softmax attention to the mean key km and mean value vm of each tile, `softmax(q km^T / sqrt(D)) vm`; no `topk`.

    A tile counts as one key whatever its size, as in VSA's coarse stage.

    Args:
        pool_thw: tokens per tile along time, height, width.
        **layer: see `AttentionMethod`.

    Source: baseline of the VSA paper, Table 1(a), with tiles of 2 x 2 x 2.
    """

    takes_text = False
    takes_query_parts = True

    def __init__(self, *, pool_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (2, 2, 2), **layer: Any):
        super().__init__(**layer)
        self.pool_thw = tuple(pool_thw)

    def tiling(self) -> dict[str, Any]:
        return {"tile_thw": self.pool_thw}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        ctx.layout.only_video("attention to pooled keys")
        k, v = (block_mean_pool(x, ctx.layout.blocks).to(q.dtype) for x in (k, v))
        return {"out": dense_attn(q, k, v)}

    def pairs(self, layout: TileLayout, topk: float) -> float:
        return float(layout.num_tokens * layout.num_blocks)
