"""The mask of neighborhood attention as a block index, computed per axis and combined tile by tile.

Along one axis, a query tile and a kv tile have a pattern: the pairs of their tokens that attend, which may be none, all
or some. Tiles of the grid attend where none of the three patterns is empty, and need a fine mask unless all three are
full. The same few patterns repeat over the grid, so no tensor here has the size tokens times tokens.

    entries   [Nq, Et * Eh * Ew]   pairs of tiles, E the largest number of kv tiles of a query tile along an axis
    masks     [M, block_q, block_kv], M the number of distinct triples of patterns

Nq / Nkv query / kv tiles, nq / nkv tiles of one axis, tq / tk tokens of a query / kv tile along it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks

from vsa.attention.layout import Segment, Span, TileLayout
from vsa.attention.neighborhood.axis import AxisWindow
from vsa.attention.tiling import Grid

Axes = tuple[AxisWindow, AxisWindow, AxisWindow]


def neighborhood_index(layout: TileLayout, axes: Axes) -> BlockIndex:
    """Kv tiles that are visible to each query tile of a video, with fine masks for those that are visible in part.

    Text and cond tokens are visible to every query of the video; the rows of the index are the video's query tiles.

    Args:
        layout: cuboid tiles of a row with one video and any text.
        axes: windows along time, height and width of the video's grid.

    Returns:
        `[1, 1, Nq, Kmax]` on the layout's device, rows are all video blocks in order, of a part too, entries are
        indices of `layout.kv_blocks`; without masks where all tiles are visible as a whole.

    Source: Hassani et al., "Generalized Neighborhood Attention" (arXiv 2504.16922), section 3.
    """
    video, (start, stop) = only_clip(layout.segments)
    if layout.tile_thw is None or layout.kv_tile_thw is None or layout.partition != "cube":
        raise ValueError(f"neighborhood attention needs cuboid tiles, got {layout.partition}, {layout.tile_thw}")
    if tuple(axis.size for axis in axes) != video.grid_thw:
        sizes = list(video.grid_thw)
        raise ValueError(f"axes must have the sizes {sizes} of the grid, got {[axis.size for axis in axes]}")
    tiles = tuple(map(axis_tiles, axes, layout.tile_thw, layout.kv_tile_thw))
    place = torch.stack(torch.unravel_index(layout.order[start:stop].cpu() - start, video.grid_thw), dim=-1)
    # offsets of the row's blocks relative to the video's first token
    offsets = layout.kv_blocks.offsets.cpu().long() - start
    inside = (offsets[:-1] >= 0) & (offsets[:-1] < stop - start)
    # of a part of the queries the rows of all
    ends = layout.blocks.offsets.cpu().long() - start
    queries = _Side.of(place, ends[(ends >= 0) & (ends <= stop - start)], layout.tile_thw)
    keys = _Side.of(place, torch.cat([offsets[:-1][inside], torch.tensor([stop - start])]), layout.kv_tile_thw)
    numbers = inside.nonzero()[:, 0]

    kv, visible, full, triple = _entries(tiles, keys)
    others = (~inside).nonzero()[:, 0].expand(len(kv), -1)
    nothing = torch.zeros_like(others)
    kv, triple = torch.cat([numbers[kv], others], 1), torch.cat([triple, nothing], 1)
    visible, full = (torch.cat([x, nothing == 0], 1) for x in (visible, full))
    # full entries first, then masked ones, both ascending, and invisible ones last
    rank = torch.where(full, 0, torch.where(visible, 1, 2)) * len(inside) + kv
    counts, full_counts = visible.sum(1), full.sum(1)
    most, least = int(counts.max()), int(counts.min())
    order = rank.argsort(dim=1)[:, :most]
    # rows in the order in which the query tiles are stored
    rows = queries.number.flatten().argsort()
    kv, triple, counts, full_counts = (
        kv.gather(1, order)[rows],
        triple.gather(1, order)[rows],
        counts[rows],
        full_counts[rows],
    )

    def on_device(x: Tensor) -> Tensor:
        return x.to(torch.int32).contiguous()[None, None].to(layout.device)

    index = BlockIndex(kv_indices=on_device(kv), kv_num_blocks=on_device(counts), max_blocks=most, min_blocks=least)
    if torch.equal(counts, full_counts):
        return index
    slot = torch.arange(most)
    masked = (slot >= full_counts[:, None]) & (slot < counts[:, None])
    triples, number = torch.unique(triple[masked], return_inverse=True)
    ids = torch.zeros_like(kv).masked_scatter_(masked, number)
    bits = _mask_bits(tiles, triples, queries, keys, (layout.video_blocks, layout.kv_blocks))
    return replace(
        index, kv_num_full_blocks=on_device(full_counts), mask_ids=on_device(ids), mask_bits=bits.to(layout.device)
    )


def only_clip(segments: Sequence[Segment]) -> tuple[Segment, Span]:
    """The only video or image of a row and its token range; the row may also hold text and cond segments."""
    starts = itertools.accumulate((segment.num_tokens for segment in segments), initial=0)
    videos = [(s, (start, start + s.num_tokens)) for s, start in zip(segments, starts, strict=False) if s.is_video]
    if len(videos) != 1 or len({segment.sample for segment in segments}) != 1:
        rows = [(segment.kind, segment.sample) for segment in segments]
        raise ValueError(f"neighborhood attention takes rows of one video and its text, got (kind, sample) {rows}")
    return videos[0]


class AxisTiles(NamedTuple):
    """Pairs of query and kv tiles of one axis with their patterns of visibility.

    Args:
        kv: int64 `[nq, E]`, kv tiles that may be visible to each query tile, ascending; the last may not exist.
        pattern: int64 `[nq, E]`, pattern of each pair; -1: nothing is visible.
        bits: bool `[P, tq, tk]`, visible pairs of tokens of each pattern, False past the end of the axis.
        whole: bool `[P]`, whether all existing pairs of tokens are visible.
        short: bool `[P, 2]`, whether the query tile and the kv tile are the short tile at the end of the axis.
    """

    kv: Tensor
    pattern: Tensor
    bits: Tensor
    whole: Tensor
    short: Tensor

    @property
    def seen(self) -> Tensor:
        """bool `[nq, E]`."""
        return self.pattern >= 0

    def pairs(self, size: int) -> int:
        """Pairs of tokens in pairs of visible tiles, whole tiles counted, on this axis of `size` tokens."""
        tq, tk = self.bits.shape[1:]
        q_sizes, kv_sizes = _sizes(size, tq), _sizes(size, tk)
        return int(((kv_sizes[self.kv.clamp(max=len(kv_sizes) - 1)] * self.seen).sum(1) * q_sizes).sum())


def axis_tiles(axis: AxisWindow, q_tile: int, kv_tile: int) -> AxisTiles:
    """Visible pairs of tiles of one axis, of `q_tile` and `kv_tile` tokens."""
    n, d = axis.size, axis.dilation
    low, high = _reach(axis, q_tile)
    inner_low, inner_high = _reach(axis, q_tile, "inner")
    first = low // kv_tile
    kv = first[:, None] + torch.arange(int((high // kv_tile - first).max()) + 1)
    # [nq, E] first tokens, and number of existing tokens
    q_start = (torch.arange(len(kv)) * q_tile)[:, None].expand_as(kv)
    kv_start = kv * kv_tile
    q_size, kv_size = ((n - start).clamp(0, tile) for start, tile in ((q_start, q_tile), (kv_start, kv_tile)))
    # where the windows of all queries cover the whole kv tile, the pattern depends on the phase of the dilation only
    inner = (inner_low[:, None] <= kv_start) & (inner_high[:, None] >= (kv_start + kv_tile).clamp(max=n) - 1)
    short = torch.stack([q_size < q_tile, kv_size < kv_tile], dim=-1)
    phase = ((q_start - kv_start) % d * 2 + short[..., 0]) * 2 + short[..., 1]
    group = torch.where(inner, phase, 4 * d + torch.arange(kv.numel()).view_as(kv))
    # tiles that no query reaches, also those past the end, form one group
    group = torch.where((kv_start <= high[:, None]) & (kv_size > 0), group, -1)
    groups, of_group = torch.unique(group, return_inverse=True)
    representatives = torch.empty_like(groups).scatter_(0, of_group.flatten(), torch.arange(kv.numel()))
    q_start, kv_start, size = (x.flatten()[representatives] for x in (q_start, kv_start, q_size * kv_size))
    # [groups, tq, tk]; tokens past the end see nothing
    query, key = q_start[:, None] + torch.arange(q_tile), kv_start[:, None] + torch.arange(kv_tile)
    start, end = (x[query.clamp(max=n - 1)][..., None] for x in axis.span)
    query, key = query[..., None], key[:, None]
    sees = (key // d >= start) & (key // d < end) & (key % d == query % d) & (key < n) & (query < n)
    count = sees.sum((1, 2))
    rows = torch.cat([sees.flatten(1), short.flatten(0, 1)[representatives]], dim=1)[count > 0]
    patterns, number = torch.unique(rows.to(torch.uint8), dim=0, return_inverse=True)
    pattern = torch.full_like(groups, -1).masked_scatter_(count > 0, number)
    whole = torch.zeros(len(patterns), dtype=torch.bool)
    whole[pattern[(count == size) & (count > 0)]] = True
    bits = patterns[:, :-2].bool().unflatten(1, (q_tile, kv_tile))
    return AxisTiles(kv, pattern[of_group], bits, whole, patterns[:, -2:].bool())


def executed_pairs(axes: Axes, tile: Grid, kv_tile: Grid) -> float:
    """Query-key pairs that are computed: all pairs of two visible tiles, also those that a fine mask hides."""
    parts = zip(axes, tile, kv_tile, strict=True)
    # also called while a network is built on the meta device
    with torch.device("cpu"):
        return float(math.prod(axis_tiles(axis, tq, tk).pairs(axis.size) for axis, tq, tk in parts))


def _reach(axis: AxisWindow, tile: int, which: Literal["outer", "inner"] = "outer") -> tuple[Tensor, Tensor]:
    """First and last token in reach of any query of each tile (outer), or of all of them (inner); int64 `[nq]` each."""
    n, d = axis.size, axis.dilation
    residue, of_tile = torch.arange(n) % d, torch.arange(n) // tile
    first, stop = axis.span
    low, high = first * d + residue, (stop - 1) * d + residue
    least, most = ("amin", "amax") if which == "outer" else ("amax", "amin")
    empty = torch.zeros(-(-n // tile), dtype=torch.int64)
    return (
        empty.scatter_reduce(0, of_tile, low, least, include_self=False),
        empty.scatter_reduce(0, of_tile, high, most, include_self=False),
    )


def _sizes(size: int, tile: int) -> Tensor:
    """Number of tokens of each tile of an axis."""
    return (size - torch.arange(0, size, tile)).clamp(max=tile)


class _Side(NamedTuple):
    """The tiles of the queries or of the keys.

    Args:
        number: int64 `[nt, nh, nw]`, index of the tile's block in the video.
        places: positions int64 `[tokens, 3]` of a tile's tokens inside the tile, in the order in which they are stored;
            the key says along which axes the tile is a short one.
    """

    number: Tensor
    places: dict[tuple[bool, ...], Tensor]

    @classmethod
    def of(cls, place: Tensor, offsets: Tensor, tile: Grid) -> _Side:
        """The tiles of a video from the positions `[Lv, 3]` of its tokens and the offsets of its blocks."""
        grid = (place.amax(0) + 1).tolist()
        corner = place[offsets[:-1]] // torch.tensor(tile)
        counts = [-(-n // c) for n, c in zip(grid, tile, strict=True)]
        number = torch.empty(counts, dtype=torch.int64)
        number[corner.unbind(1)] = torch.arange(len(corner))
        places = {}
        for short in itertools.product((False, True), repeat=3):
            at = tuple(num - 1 if last else 0 for num, last in zip(counts, short, strict=True))
            block = int(number[at])
            places[short] = place[offsets[block] : offsets[block + 1]] % torch.tensor(tile)
        return cls(number, places)


def _entries(tiles: Sequence[AxisTiles], keys: _Side) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kv tile, its visibility, its visibility as a whole, and its triple of patterns; `[Nq, Et * Eh * Ew]` each."""

    def spread(x: Tensor, axis: int) -> Tensor:
        # broadcast a matrix of one axis to the product of all three
        return x.view([x.shape[0] if i == axis else x.shape[1] if i == axis + 3 else 1 for i in range(6)])

    kv = [
        spread(axis.kv.clamp(max=num - 1), i)
        for i, (axis, num) in enumerate(zip(tiles, keys.number.shape, strict=True))
    ]
    visible = [spread(axis.seen, i) for i, axis in enumerate(tiles)]
    whole = [spread(axis.seen & axis.whole[axis.pattern], i) for i, axis in enumerate(tiles)]
    pattern = [spread(axis.pattern, i) for i, axis in enumerate(tiles)]
    num_h, num_w = len(tiles[1].bits), len(tiles[2].bits)
    values = (
        keys.number[tuple(kv)],
        visible[0] & visible[1] & visible[2],
        whole[0] & whole[1] & whole[2],
        (pattern[0] * num_h + pattern[1]) * num_w + pattern[2],
    )
    return tuple(x.flatten(3).flatten(0, 2) for x in values)  # type: ignore[return-value]


def _mask_bits(
    tiles: Sequence[AxisTiles], triples: Tensor, queries: _Side, keys: _Side, blocks: tuple[Blocks, Blocks]
) -> Tensor:
    """Fine masks bool `[M, block_q, block_kv]` of triples of patterns, with tokens in stored order."""
    bits = torch.zeros(len(triples), blocks[0].max_size, blocks[1].max_size, dtype=torch.bool)
    patterns = torch.unravel_index(triples, tuple(len(axis.bits) for axis in tiles))
    # [M, 3, 2]
    short = torch.stack([axis.short[p] for axis, p in zip(tiles, patterns, strict=True)], dim=1)
    for kind in torch.unique(short.flatten(1), dim=0):
        which = (short.flatten(1) == kind).all(1).nonzero()[:, 0]
        q_short, kv_short = (tuple(side) for side in kind.view(3, 2).T.tolist())
        query, key = queries.places[q_short], keys.places[kv_short]
        masks = torch.ones(len(which), len(query), len(key), dtype=torch.bool)
        for i, (axis, pattern) in enumerate(zip(tiles, patterns, strict=True)):
            masks &= axis.bits[pattern[which][:, None, None], query[:, i][:, None], key[:, i]]
        bits[which, : len(query), : len(key)] = masks
    return bits
