"""Dense attention: every token attends to its whole sample.

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.dense import dense_attn, dense_attn_per_sample, text_attn
from vsa.attention.layout import TileLayout

__all__ = ["FullAttention", "dense_attn", "dense_attn_per_sample", "text_attn"]


class FullAttention(AttentionMethod):
    """Dense attention in raster order; `topk` is ignored."""

    is_dense = True
    takes_query_parts = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        return {"out": dense_attn_per_sample(q, k, v, ctx.layout)}

    def pairs(self, layout: TileLayout, topk: float) -> float:
        return float(sum((stop - start) ** 2 for start, stop in layout.sample_spans))
