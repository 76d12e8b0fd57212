"""Which token pairs a method computes, from the lists of tiles that it records.

B batch, L tokens in the layout's order, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention.base import AttentionMethod
from vsa.attention.context import recorded_index
from vsa.attention.layout import TileLayout
from vsa.attention.stats import density, visible_keys


class Computed(NamedTuple):
    """What a method attends to token by token.

    Args:
        density: computed token pairs over all pairs, the mean over samples and heads.
        visited: token pairs in the tiles that are visited over all pairs; more than `density` with fine masks.
        rows: bool `[B|1, H|1, n, L]` of int64 query tokens `[n]`; None: attends to no tokens (pooled keys alone).
    """

    density: float
    visited: float
    rows: Callable[[Tensor], Tensor] | None


def computed_pairs(method: AttentionMethod, layout: TileLayout, recorded: Mapping[str, Tensor] | None) -> Computed:
    """What a method computed in a row of one video.

    Args:
        method: of the layer.
        layout: its layout.
        recorded: what it handed a recorder, None when nothing.

    Raises:
        ValueError: recorded lists are of other tiles than the layout's.
    """
    if recorded is not None and "kv_indices" in recorded:
        return of_lists(recorded_index(recorded), layout)
    # a method without lists selects nothing: its formula counts what it computes, pooled keys among them
    share = method.pairs(layout, layout.num_video_tiles) / layout.num_tokens**2
    some = torch.zeros(1, dtype=torch.int64, device=layout.device)
    if share < 1 and method.sees(some, layout) is None:
        return Computed(share, share, None)

    def rows(tokens: Tensor) -> Tensor:
        sees = method.sees(tokens, layout)
        # as many pairs as there are, so all of them
        sees = (
            torch.ones(len(tokens), layout.num_tokens, dtype=torch.bool, device=layout.device) if sees is None else sees
        )
        return sees[None, None]

    return Computed(share, share, rows)


def of_lists(index: BlockIndex, layout: TileLayout) -> Computed:
    """Pairs of tile lists; see `computed_pairs`."""
    q_blocks, kv_blocks = layout.blocks, layout.kv_blocks
    if index.kv_indices.shape[2] != q_blocks.num:
        raise ValueError(
            f"recorded are lists of {index.kv_indices.shape[2]} query tiles, the method's layout has {q_blocks.num}"
        )
    tiles = BlockIndex(kv_indices=index.kv_indices, kv_num_blocks=index.kv_num_blocks)
    visible, visited = (float(density(lists, q_blocks, kv_blocks).mean()) for lists in (index, tiles))
    return Computed(visible, visited, lambda tokens: visible_keys(index, tokens, q_blocks, kv_blocks))
