"""Factorised attention: dense attention inside groups of tokens whose shape depends on the layer.

    spatial     (1, all, all)   the tokens of a frame
    temporal    (all, 1, 1)     the tokens of one position over all frames
    windows     (2, all, all)   pairs of frames; (all, 8, 8): a spatial window over all frames

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.full import dense_attn
from vsa.attention.layout import TileLayout
from vsa.attention.rearrange import rearrange
from vsa.attention.tiling import cube_tiles
from vsa.settings import AtLeastOne, Bound, Count, validated

Extent = AtLeastOne | Literal["all"]


@validated
class GroupedAttention(AttentionMethod):
    """Dense attention among the tokens of a group; layers alternate between the group shapes. `topk` is ignored.

    Args:
        groups: tokens of a group along time, height, width; all: the whole axis. Groups at the far edges are smaller.
            Layer i has `groups[(i + first) % len(groups)]`.
        first: index of the group shape of layer 0.
        **layer: see `AttentionMethod`.

    Source: baselines of the VSA paper, Table 1(a): spatial-temporal, spatial-full, strided window. The paper does not
    state which kind of layer comes first or where the full layer is.
    """

    takes_text = False

    def __init__(
        self,
        *,
        groups: Annotated[Sequence[tuple[Extent, Extent, Extent]], Bound(">=", 1)],
        first: Count = 0,
        **layer: Any,
    ):
        super().__init__(**layer)
        if first >= len(groups):
            raise ValueError(f"first must be an index into the {len(groups)} groups, from 0, got {first}")
        self.groups, self.first = tuple((t, h, w) for t, h, w in groups), first
        self.group = self.groups[(self.layer_idx + first) % len(groups)]

    def prepare(self, layout: TileLayout) -> None:
        # the layers share one layout
        for group in self.groups:
            layout.derive(_make_groups, group)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        groups = self._groups(ctx.layout)
        q, k, v = (rearrange(x, groups.order, groups.inverse) for x in (q, k, v))
        parts, start = [], 0
        for count, size in groups.classes:
            stop = start + count * size
            same = (x[:, start:stop].unflatten(1, (count, size)).flatten(0, 1) for x in (q, k, v))
            parts.append(dense_attn(*same).unflatten(0, (-1, count)).flatten(1, 2))
            start = stop
        return {"out": rearrange(torch.cat(parts, dim=1), groups.inverse, groups.order)}

    def sees(self, tokens: Tensor, layout: TileLayout) -> Tensor:
        groups = self._groups(layout)
        sizes = torch.tensor([size for count, size in groups.classes for _ in range(count)], device=tokens.device)
        group = torch.arange(len(sizes), device=tokens.device).repeat_interleave(sizes)[groups.inverse]
        return group[tokens, None] == group

    def pairs(self, layout: TileLayout, topk: float) -> float:
        return float(sum(count * size**2 for count, size in self._groups(layout).classes))

    def _groups(self, layout: TileLayout) -> _Groups:
        layout.only_video("attention inside groups")
        return layout.derive(_make_groups, self.group)


class _Groups(NamedTuple):
    """Tokens of a raster row sorted by group; groups of one size are adjacent.

    Args:
        order: int64 `[L]`, raster index of each token in this order.
        inverse: int64 `[L]`, the inverse permutation.
        classes: number of groups and tokens per group, for each size.
    """

    order: Tensor
    inverse: Tensor
    classes: tuple[tuple[int, int], ...]


def _make_groups(layout: TileLayout, group: tuple[Extent, Extent, Extent]) -> _Groups:
    grid = layout.only_video("attention inside groups").grid_thw
    t, h, w = (n if extent == "all" else min(extent, n) for n, extent in zip(grid, group, strict=True))
    tiles = cube_tiles(grid, (t, h, w), "raster")
    by_size: dict[int, list[Tensor]] = {}
    for tokens in tiles.order.split(tiles.sizes):
        by_size.setdefault(len(tokens), []).append(tokens)
    order = torch.cat([tokens for same in by_size.values() for tokens in same])
    assert len(order) == math.prod(grid)
    classes = tuple((len(same), size) for size, same in by_size.items())
    return _Groups(order.to(layout.device), order.argsort().to(layout.device), classes)
