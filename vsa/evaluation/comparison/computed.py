"""Token pairs that a method computes, from its recorded lists of tiles.

B batch, L tokens in the layout's order, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext, recorded_index
from vsa.attention.layout import TileLayout
from vsa.attention.stats import density, visible_keys


class Computed(NamedTuple):
    """Token pairs that a method computes.

    Args:
        density: computed token pairs over all pairs, averaged over samples and heads.
        visited: token pairs in visited tiles over all pairs; larger than `density` with fine masks.
        rows: function from int64 query tokens `[n]` of the video to the visible keys of the row, bool
            `[B|1, H|1, n, L]`; None for a method that attends to no tokens (pooled keys only).
    """

    density: float
    visited: float
    rows: Callable[[Tensor], Tensor] | None


def computed_pairs(method: AttentionMethod, layout: TileLayout, recorded: Mapping[str, Tensor] | None) -> Computed:
    """Token pairs that a method computed in a row of one video, with or without text.

    Args:
        method: method of the layer.
        layout: layout of the method.
        recorded: tensors that it passed to a recorder, None without any.
    """
    if recorded is not None and "kv_indices" in recorded:
        return of_lists(recorded_index(recorded), layout)
    # a method without lists selects nothing; its formula counts the computed pairs, pooled keys included
    share = method.expected_pairs(layout) / layout.num_tokens**2
    some = torch.zeros(1, dtype=torch.int64, device=layout.device)
    if share < 1 and method.sees(some, layout) is None:
        return Computed(share, share, None)

    def rows(tokens: Tensor) -> Tensor:
        sees = method.sees(tokens, layout)
        # the formula counts all pairs, so all are visible
        sees = (
            torch.ones(len(tokens), layout.num_tokens, dtype=torch.bool, device=layout.device) if sees is None else sees
        )
        return sees[None, None]

    return Computed(share, share, rows)


def density_of_call(
    method: AttentionMethod, ctx: AttnContext, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor]
) -> float:
    """Computed token pairs over all pairs of one call, made again, which neither reads nor leaves a selection."""
    recorded: dict[str, Tensor] = {}
    apart = replace(ctx, denoising=None, selection=None, recorder=lambda _, tensors: recorded.update(tensors))
    method.attend_combine(q, k, v, extra, apart)
    return computed_pairs(method, ctx.layout, recorded).density


def of_lists(index: BlockIndex, layout: TileLayout) -> Computed:
    """Token pairs of tile lists; see `computed_pairs`."""
    q_blocks, kv_blocks, (start, stop) = layout.video_blocks, layout.kv_blocks, layout.video_spans[0]
    if index.kv_indices.shape[2] != q_blocks.num:
        raise ValueError(
            f"recorded lists must have the {q_blocks.num} query tiles of the layout, got {index.kv_indices.shape[2]}"
        )
    tiles = BlockIndex(kv_indices=index.kv_indices, kv_num_blocks=index.kv_num_blocks)
    # text attends to all tokens
    video = (stop - start) / layout.num_tokens
    visible, visited = (
        float(density(lists, q_blocks, kv_blocks).mean()) * video + (1 - video) for lists in (index, tiles)
    )
    return Computed(visible, visited, lambda tokens: visible_keys(index, tokens - start, q_blocks, kv_blocks))
