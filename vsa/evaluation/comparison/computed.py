"""Which token pairs a method computes, from the lists of tiles that it records.

B batch, L tokens in the layout's order, H heads, Nq / Nkv query / kv tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from vsa_kernels import BlockIndex
from vsa_kernels.block_index import token_places

from vsa.attention.base import AttentionMethod
from vsa.attention.layout import TileLayout

LISTS = ("kv_indices", "kv_num_blocks", "kv_num_full_blocks", "mask_ids", "mask_bits")


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
        return of_lists(index_of(recorded), layout)
    # a method without lists selects nothing: its formula counts what it computes, pooled keys among them
    density = method.pairs(layout, layout.num_video_tiles) / layout.num_tokens**2
    some = torch.zeros(1, dtype=torch.int64, device=layout.device)
    if density < 1 and method.sees(some, layout) is None:
        return Computed(density, density, None)

    def rows(tokens: Tensor) -> Tensor:
        sees = method.sees(tokens, layout)
        # as many pairs as there are, so all of them
        sees = (
            torch.ones(len(tokens), layout.num_tokens, dtype=torch.bool, device=layout.device) if sees is None else sees
        )
        return sees[None, None]

    return Computed(density, density, rows)


def index_of(recorded: Mapping[str, Tensor]) -> BlockIndex:
    """Recorded lists with their fine masks; the host knows their bounds, so no backend has to ask for them."""
    counts = recorded["kv_num_blocks"]
    return BlockIndex(
        kv_indices=recorded["kv_indices"],
        kv_num_blocks=counts,
        kv_num_full_blocks=recorded.get("kv_num_full_blocks"),
        mask_ids=recorded.get("mask_ids"),
        mask_bits=recorded.get("mask_bits"),
        max_blocks=int(counts.max()),
        min_blocks=int(counts.min()),
    )


def of_lists(index: BlockIndex, layout: TileLayout) -> Computed:
    """Pairs of tile lists; see `computed_pairs`."""
    q_blocks, kv_blocks = layout.blocks, layout.kv_blocks
    if index.kv_indices.shape[2] != q_blocks.num:
        raise ValueError(
            f"recorded are lists of {index.kv_indices.shape[2]} query tiles, the method's layout has {q_blocks.num}"
        )
    q_sizes, kv_sizes = q_blocks.sizes.double(), kv_blocks.sizes.double()
    bits = torch.ones(0, 1, 1, dtype=torch.bool, device=layout.device) if index.mask_bits is None else index.mask_bits
    full, none = len(bits), len(bits) + 1
    # row of `bits` of every pair of tiles; behind the fine masks one that sees all and one that sees nothing
    bits = torch.cat([bits, bits.new_ones(1, *bits.shape[1:]), bits.new_zeros(1, *bits.shape[1:])])
    codes = _codes(index, kv_blocks.num, full=full, none=none)
    pairs = (codes != none).double()
    all_pairs = layout.num_tokens**2
    visited = float((q_sizes @ pairs.mean((0, 1)) @ kv_sizes) / all_pairs)
    density = visited
    (q_tile, q_place), (kv_tile, kv_place) = (token_places(x, layout.num_tokens) for x in (q_blocks, kv_blocks))
    if index.mask_bits is None:
        q_place, kv_place = torch.zeros_like(q_place), torch.zeros_like(kv_place)
    else:
        # a mask may say anything of the places behind a short tile: sums up to the last place that there is
        sums = bits.cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32)
        places = (q_blocks.sizes - 1)[:, None].long(), (kv_blocks.sizes - 1)[None].long()
        density = float(sums[codes, places[0], places[1]].double().mean((0, 1)).sum() / all_pairs)

    def rows(tokens: Tensor) -> Tensor:
        of_tokens = codes[:, :, q_tile[tokens]][..., kv_tile]
        return bits[of_tokens, q_place[tokens][:, None], kv_place]

    return Computed(density, visited, rows)


def _codes(index: BlockIndex, num_kv: int, *, full: int, none: int) -> Tensor:
    """int32 `[B|1, H|1, Nq, Nkv]`: the fine mask of a pair of tiles, `full` or `none`."""
    place = torch.arange(index.kv_indices.shape[-1], device=index.kv_indices.device)
    counts = index.kv_num_blocks[..., None]
    # entries past the count are never read: send them to a spare column
    columns = torch.where(place < counts, index.kv_indices, num_kv).long()
    values = torch.full_like(columns, full, dtype=torch.int32)
    if index.mask_ids is not None and index.kv_num_full_blocks is not None:
        values = torch.where(place < index.kv_num_full_blocks[..., None], values, index.mask_ids)
    codes = torch.full((*columns.shape[:-1], num_kv + 1), none, dtype=torch.int32, device=columns.device)
    return codes.scatter_(-1, columns, values)[..., :num_kv]
