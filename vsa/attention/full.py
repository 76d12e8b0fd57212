"""Dense attention: every token attends to its whole sample.

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.dense import dense_attn, dense_attn_per_sample, text_attn
from vsa.attention.layout import Segment, TileLayout

__all__ = ["FullAttention", "dense_attn", "dense_attn_per_sample", "text_attn"]


class FullAttention(AttentionMethod):
    """Dense attention in raster order; `topk` is ignored."""

    is_dense = True

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        return TileLayout.build(segments, tile_thw=None, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        return {"out": dense_attn_per_sample(q, k, v, ctx.layout)}

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        return parts["out"]

    def pairs(self, layout: TileLayout, topk: float) -> float:
        return float(sum((stop - start) ** 2 for start, stop in layout.sample_spans))
