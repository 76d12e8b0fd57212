"""Neighborhood attention as self-attention of a layer.

    window_thw       stride_thw    dilation_thw
    all of an axis   -             1              no restriction along that axis; along all three: dense attention
    w                1             1              neighborhood attention, each query has its own window
    w                w             1              blocked attention, also called window attention
    k * t, k odd     t             1              sliding tile attention with tiles of t and windows of k tiles
    w                1             d              dilated: every d-th token

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, block_sparse_attn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import INDEX, AttnContext
from vsa.attention.full import dense_attn_per_sample, text_attn
from vsa.attention.layout import BlockOrder, Segment, TileLayout
from vsa.attention.neighborhood.axis import AxisRule, axis_rules
from vsa.attention.neighborhood.mask import Axes, executed_pairs, neighborhood_index, only_clip
from vsa.attention.neighborhood.tile import best_tile
from vsa.attention.tiling import Grid
from vsa.settings import AtLeastOne, PositiveShare, validated

Extent = AtLeastOne | PositiveShare
Rules = tuple[AxisRule, AxisRule, AxisRule]


@validated
class NeighborhoodAttention(AttentionMethod):
    """Neighborhood attention: every token attends to a window of tokens around it; no parameters and no `topk`.

    Windows slide over the grid and are shifted inside at its ends, so that every query has a whole window; `AxisWindow`
    states the rule of an axis, `AxisRule` that of shares. Text and cond tokens are visible to every token of the video
    in the same softmax, and attend to all tokens themselves.

    Args:
        window_thw: visible keys of a query along time, height, width: tokens (an integer), or a share of the grid (a
            number above 0 and at most 1, written with a point: 1 is one token, 1.0 the whole axis).
        stride_thw: neighbouring queries that share a window, in tokens or shares like the window. Where tile sides
            divide the stride and windows start and end between tiles, no pair is computed in vain and no fine mask is
            needed.
        dilation_thw: distance of neighbouring keys along time, height, width.
        causal_thw: whether later keys along this axis are hidden from a query.
        tile_thw: tokens per tile of queries; null: for each grid, the tile of 64 tokens with sides that are powers of
            two that visits the fewest kv tiles.
        kv_tile_thw: tokens per tile of keys and values; null: `tile_thw`. One of the two divides the other.
        block_order: nested or raster, see `TileLayout`.
        backend: backend of `block_sparse_attn`; null chooses by device.
        **layer: see `AttentionMethod`.

    Source: Hassani et al., "Generalized Neighborhood Attention" (arXiv 2504.16922).
    """

    takes_query_parts = True

    def __init__(
        self,
        *,
        window_thw: tuple[Extent, Extent, Extent],
        stride_thw: tuple[Extent, Extent, Extent] = (1, 1, 1),
        dilation_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (1, 1, 1),
        causal_thw: tuple[bool, bool, bool] = (False, False, False),
        tile_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] | None = None,
        kv_tile_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] | None = None,
        block_order: BlockOrder = "nested",
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        if tile_thw is None and kv_tile_thw is not None:
            raise ValueError(f"kv_tile_thw={list(kv_tile_thw)} needs a tile_thw, got null")
        self.window_thw, self.stride_thw = tuple(window_thw), tuple(stride_thw)
        self.dilation_thw, self.causal_thw = tuple(dilation_thw), tuple(causal_thw)
        self.rules: Rules = axis_rules(window_thw, stride_thw, dilation_thw, causal_thw)
        self.tile_thw = None if tile_thw is None else tuple(tile_thw)
        self.kv_tile_thw = None if kv_tile_thw is None else tuple(kv_tile_thw)
        self.block_order: BlockOrder = block_order
        self.backend = backend

    @classmethod
    def refuse_grid(cls, grid: Grid, settings: Mapping[str, Any]) -> None:
        names = ("window_thw", "stride_thw", "dilation_thw", "causal_thw")
        rules: Rules = axis_rules(*(settings[name] for name in names))
        for rule, size in zip(rules, grid, strict=True):
            rule.at(size)

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        axes = _axes(segments, self.rules)
        # dense attention needs no tiles
        tile = None if is_whole(axes) else self.tile_thw or best_tile(axes, even=True)[1]
        layout = TileLayout.build(
            segments,
            tile_thw=tile,
            kv_tile_thw=None if tile is None else self.kv_tile_thw,
            block_order=self.block_order,
            device=device,
        )
        if layout.device.type != "meta":
            self.prepare(layout)
        return layout

    def prepare(self, layout: TileLayout) -> None:
        layout.derive(window_index, self.rules)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        layout = ctx.layout
        index = layout.derive(window_index, self.rules)
        if index is None:
            return {"out": dense_attn_per_sample(q, k, v, layout)}
        q_blocks, kv_blocks, video = layout.video_blocks, layout.kv_blocks, layout.take_video(q)
        video = block_sparse_attn(video, k, v, index, q_blocks=q_blocks, kv_blocks=kv_blocks, backend=self.backend)[0]
        out = layout.merge(video, text_attn(q, k, v, layout))
        ctx.record(self.layer_idx, index, q=q, k=k, fine=out)
        return {"out": out}

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs that are computed: all pairs of visited tiles, also those that a fine mask hides."""
        axes = _axes(layout.segments, self.rules)
        if is_whole(axes):
            return float(layout.num_tokens**2)
        assert layout.tile_thw is not None
        assert layout.kv_tile_thw is not None
        text = sum(stop - start for start, stop, _ in layout.text_spans)
        video = layout.num_tokens - text
        return executed_pairs(axes, layout.tile_thw, layout.kv_tile_thw) + video * text + text * layout.num_tokens


def is_whole(axes: Axes) -> bool:
    """Whether every query sees every key."""
    return all(axis.is_whole for axis in axes)


def window_index(layout: TileLayout, rules: Rules) -> BlockIndex | None:
    """Kv tiles that are visible to each query tile, None where all are visible; for `TileLayout.derive`."""
    axes = _axes(layout.segments, rules)
    if is_whole(axes):
        return None
    index = neighborhood_index(layout, axes)
    if layout.num_queries == layout.num_tokens:
        return index
    # tiles of the video before the part
    places = torch.tensor([layout.video_spans[0][0], layout.span[0]], dtype=torch.int32)
    first = int(torch.searchsorted(layout.blocks.offsets.cpu(), places).diff())
    lists = {name: getattr(index, name) for name in INDEX if name != "mask_bits"}
    rows = slice(first, first + layout.video_blocks.num)
    return replace(index, **{name: x[:, :, rows] for name, x in lists.items() if x is not None})


def _axes(segments: Sequence[Segment], rules: Rules) -> Axes:
    t, h, w = (rule.at(size) for rule, size in zip(rules, only_clip(segments)[0].grid_thw, strict=True))
    return t, h, w
