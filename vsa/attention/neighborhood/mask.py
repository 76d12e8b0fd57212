"""The mask of neighborhood attention as an index of blocks: what a product over axes is, tile by tile.

Along one axis a query tile and a kv tile have a pattern, which of their tokens see each other: none, all, or some.
Tiles in space see each other where none of the three patterns is empty, and need a fine mask unless all three are
whole. The same few patterns repeat all over the grid, so nothing here is as large as tokens times tokens.

    entries   [Nq, Et * Eh * Ew]   pairs of tiles, E the kv tiles that a query tile sees along an axis at most
    masks     [M, block_q, block_kv], M the distinct triples of patterns

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
    """Kv tiles that each query tile of a video sees, with fine masks where it does not see all of one.

    Text and cond tokens of the row are visible to every query of the video, whose tiles are the only rows of the index.

    Args:
        layout: of cuboid tiles; a row of one video, with any text beside it.
        axes: along time, height, width of the video's grid.

    Returns:
        `[1, 1, Nq, Kmax]` on the layout's device, rows in the order of `layout.video_blocks`, entries counting
        `layout.kv_blocks`; no masks at all where whole tiles are all there is.

    Raises:
        ValueError: a row of something else, tiles that are no cuboids, axes of another grid.

    Source: Hassani et al., "Generalized Neighborhood Attention" (arXiv 2504.16922), section 3.
    """
    video, (start, stop) = only_clip(layout.segments)
    if layout.tile_thw is None or layout.kv_tile_thw is None or layout.partition != "cube":
        raise ValueError(f"neighborhood attention needs cuboid tiles, got {layout.partition}, {layout.tile_thw}")
    if tuple(axis.size for axis in axes) != video.grid_thw:
        raise ValueError(f"axes of {[axis.size for axis in axes]} tokens do not fit the grid {list(video.grid_thw)}")
    tiles = tuple(map(axis_tiles, axes, layout.tile_thw, layout.kv_tile_thw))
    place = torch.stack(torch.unravel_index(layout.order[start:stop].cpu() - start, video.grid_thw), dim=-1)
    # blocks of the row from the video's first token on
    offsets = layout.kv_blocks.offsets.cpu().long() - start
    inside = (offsets[:-1] >= 0) & (offsets[:-1] < stop - start)
    queries = _Side.of(place, layout.video_blocks.offsets.cpu().long(), layout.tile_thw)
    keys = _Side.of(place, torch.cat([offsets[:-1][inside], torch.tensor([stop - start])]), layout.kv_tile_thw)
    numbers = inside.nonzero()[:, 0]

    kv, seen, full, triple = _entries(tiles, keys)
    others = (~inside).nonzero()[:, 0].expand(len(kv), -1)
    nothing = torch.zeros_like(others)
    kv, triple = torch.cat([numbers[kv], others], 1), torch.cat([triple, nothing], 1)
    seen, full = (torch.cat([x, nothing == 0], 1) for x in (seen, full))
    # full entries first, masked ones behind them, both ascending, what is not seen last
    rank = torch.where(full, 0, torch.where(seen, 1, 2)) * len(inside) + kv
    counts, full_counts = seen.sum(1), full.sum(1)
    most, least = int(counts.max()), int(counts.min())
    order = rank.argsort(dim=1)[:, :most]
    # rows as the query tiles are stored
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
        index,
        kv_num_full_blocks=on_device(full_counts),
        mask_ids=on_device(ids),
        mask_bits=bits.to(layout.device),
    )


def only_clip(segments: Sequence[Segment]) -> tuple[Segment, Span]:
    """The one video or image of a row and its tokens; text and cond may stand beside it.

    Raises:
        ValueError: several of them, none, or several samples.
    """
    starts = itertools.accumulate((segment.num_tokens for segment in segments), initial=0)
    videos = [(s, (start, start + s.num_tokens)) for s, start in zip(segments, starts, strict=False) if s.is_video]
    if len(videos) != 1 or len({segment.sample for segment in segments}) != 1:
        rows = [(segment.kind, segment.sample) for segment in segments]
        raise ValueError(f"neighborhood attention takes rows of one video and its text, got (kind, sample) {rows}")
    return videos[0]


class AxisTiles(NamedTuple):
    """Which tiles of one axis see each other.

    Args:
        kv: int64 `[nq, E]`, kv tiles that may be seen by each query tile, ascending; numbers at the end may not exist.
        pattern: int64 `[nq, E]`, what of them is seen; -1: nothing.
        bits: bool `[P, tq, tk]`, pairs of tokens that see each other by pattern, False behind the end of the axis.
        whole: bool `[P]`, all tokens that exist see each other.
        short: bool `[P, 2]`, the query tile, the kv tile is the short one at the end of the axis.
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
        """Pairs of tokens in tiles that see each other, whole tiles counted, on this axis of `size` tokens."""
        tq, tk = self.bits.shape[1:]
        q_sizes, kv_sizes = _sizes(size, tq), _sizes(size, tk)
        return int(((kv_sizes[self.kv.clamp(max=len(kv_sizes) - 1)] * self.seen).sum(1) * q_sizes).sum())


def axis_tiles(axis: AxisWindow, q_tile: int, kv_tile: int) -> AxisTiles:
    """Tiles of one axis that see each other, of `q_tile` and `kv_tile` tokens."""
    n, d = axis.size, axis.dilation
    low, high = _reach(axis, q_tile)
    inner_low, inner_high = _reach(axis, q_tile, "inner")
    first = low // kv_tile
    kv = first[:, None] + torch.arange(int((high // kv_tile - first).max()) + 1)
    # [nq, E] first tokens, and tokens that exist
    q_start = (torch.arange(len(kv)) * q_tile)[:, None].expand_as(kv)
    kv_start = kv * kv_tile
    q_size, kv_size = ((n - start).clamp(0, tile) for start, tile in ((q_start, q_tile), (kv_start, kv_tile)))
    # where all queries reach over the whole kv tile, dilation alone decides: one look for each phase of it
    inner = (inner_low[:, None] <= kv_start) & (inner_high[:, None] >= (kv_start + kv_tile).clamp(max=n) - 1)
    short = torch.stack([q_size < q_tile, kv_size < kv_tile], dim=-1)
    phase = ((q_start - kv_start) % d * 2 + short[..., 0]) * 2 + short[..., 1]
    group = torch.where(inner, phase, 4 * d + torch.arange(kv.numel()).view_as(kv))
    # tiles that no query reaches, those behind the end among them, are one group too
    group = torch.where((kv_start <= high[:, None]) & (kv_size > 0), group, -1)
    groups, of_group = torch.unique(group, return_inverse=True)
    chosen = torch.empty_like(groups).scatter_(0, of_group.flatten(), torch.arange(kv.numel()))
    q_start, kv_start, size = (x.flatten()[chosen] for x in (q_start, kv_start, q_size * kv_size))
    # [groups, tq, tk]; tokens behind the end see nothing
    query, key = q_start[:, None] + torch.arange(q_tile), kv_start[:, None] + torch.arange(kv_tile)
    start, end = (x[query.clamp(max=n - 1)][..., None] for x in axis.span)
    query, key = query[..., None], key[:, None]
    sees = (key // d >= start) & (key // d < end) & (key % d == query % d) & (key < n) & (query < n)
    count = sees.sum((1, 2))
    rows = torch.cat([sees.flatten(1), short.flatten(0, 1)[chosen]], dim=1)[count > 0]
    patterns, number = torch.unique(rows.to(torch.uint8), dim=0, return_inverse=True)
    pattern = torch.full_like(groups, -1).masked_scatter_(count > 0, number)
    whole = torch.zeros(len(patterns), dtype=torch.bool)
    whole[pattern[(count == size) & (count > 0)]] = True
    bits = patterns[:, :-2].bool().unflatten(1, (q_tile, kv_tile))
    return AxisTiles(kv, pattern[of_group], bits, whole, patterns[:, -2:].bool())


def executed_pairs(axes: Axes, tile: Grid, kv_tile: Grid) -> float:
    """Query-key pairs that are computed: all of every two tiles that see each other, whatever a fine mask hides."""
    parts = zip(axes, tile, kv_tile, strict=True)
    # also asked while a network without memory is built
    with torch.device("cpu"):
        return float(math.prod(axis_tiles(axis, tq, tk).pairs(axis.size) for axis, tq, tk in parts))


def _reach(axis: AxisWindow, tile: int, which: Literal["outer", "inner"] = "outer") -> tuple[Tensor, Tensor]:
    """The first and the last token in reach of any query of each tile, or of all of them (inner); int64 `[nq]` each."""
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
    """Tokens of the tiles of an axis."""
    return (size - torch.arange(0, size, tile)).clamp(max=tile)


class _Side(NamedTuple):
    """The tiles of queries, or those of keys.

    Args:
        number: int64 `[nt, nh, nw]`, which block of the video a tile is.
        places: by whether a tile is a short one along each axis, int64 `[tokens, 3]` where its tokens are inside it, in
            the order that they are stored in.
    """

    number: Tensor
    places: dict[tuple[bool, ...], Tensor]

    @classmethod
    def of(cls, place: Tensor, offsets: Tensor, tile: Grid) -> _Side:
        """The tiles of a video from where its tokens are, `[Lv, 3]`, and the offsets of its blocks."""
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
    """Kv tile, whether it is seen, whether as a whole, number of its triple of patterns; `[Nq, Et * Eh * Ew]` each."""

    def spread(x: Tensor, axis: int) -> Tensor:
        # a matrix of one axis in the product of all three
        return x.view([x.shape[0] if i == axis else x.shape[1] if i == axis + 3 else 1 for i in range(6)])

    kv = [
        spread(axis.kv.clamp(max=num - 1), i)
        for i, (axis, num) in enumerate(zip(tiles, keys.number.shape, strict=True))
    ]
    seen = [spread(axis.seen, i) for i, axis in enumerate(tiles)]
    whole = [spread(axis.seen & axis.whole[axis.pattern], i) for i, axis in enumerate(tiles)]
    pattern = [spread(axis.pattern, i) for i, axis in enumerate(tiles)]
    num_h, num_w = len(tiles[1].bits), len(tiles[2].bits)
    values = (
        keys.number[tuple(kv)],
        seen[0] & seen[1] & seen[2],
        whole[0] & whole[1] & whole[2],
        (pattern[0] * num_h + pattern[1]) * num_w + pattern[2],
    )
    return tuple(x.flatten(3).flatten(0, 2) for x in values)  # type: ignore[return-value]


def _mask_bits(
    tiles: Sequence[AxisTiles], triples: Tensor, queries: _Side, keys: _Side, blocks: tuple[Blocks, Blocks]
) -> Tensor:
    """Fine masks of triples of patterns, bool `[M, block_q, block_kv]`, by the places that tokens are stored in."""
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
