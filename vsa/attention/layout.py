"""Tile layouts: the order of the tokens of a row and their division into tiles.

B batch, L tokens, N blocks, Nv video blocks. A row is a sequence of segments (a video, an image, a text); the segments
of one sample are adjacent. Raster order is the order of the input; in tile-major order the tokens of a tile are
contiguous, so that a tile is a block for the kernels. A block never crosses a segment.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor
from vsa_kernels.block_index import Blocks

from vsa.attention.rearrange import rearrange
from vsa.attention.tiling import (
    MIN_FILL,
    SUPER_SIZES,
    BlockOrder,
    Grid,
    Partition,
    SegmentTiles,
    chain_of,
    count_tiles,
    cube_tiles,
    nested_tiles,
    propose_tile,
    run_order,
    run_tiles,
)

Span = tuple[int, int]
Made = TypeVar("Made")

VIDEO_KINDS = ("video", "image")
TEXT_KINDS = ("text", "cond")


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one kind.

    Args:
        grid_thw: tokens along time, height, width; text and cond segments of n tokens have (1, 1, n).
        kind: video or image (tiles compete for the top-k), text or cond (visible to every token of the sample).
        sample: number of the sample that the segment belongs to; tokens of different samples never attend to each
            other.
    """

    grid_thw: Grid
    kind: str = "video"
    sample: int = 0

    def __post_init__(self):
        object.__setattr__(self, "grid_thw", tuple(map(int, self.grid_thw)))
        if self.kind not in (*VIDEO_KINDS, *TEXT_KINDS):
            raise ValueError(f"segment kind must be video, image, text or cond, got {self.kind!r}")
        if len(self.grid_thw) != 3 or min(self.grid_thw) < 1:
            raise ValueError(f"grid_thw must be three positive sizes, got {self.grid_thw}")
        if not self.is_video and self.grid_thw[:2] != (1, 1):
            raise ValueError(f"grid_thw of a {self.kind} segment must be (1, 1, n), got {self.grid_thw}")

    @property
    def is_video(self) -> bool:
        return self.kind in VIDEO_KINDS

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid_thw)


@dataclass(frozen=True, kw_only=True, eq=False)
class TileLayout:
    """Token order and blocks of a row: immutable, built by `TileLayout.build`, with tensors on `device`.

    Args:
        segments: the row's segments in order; a segment has the same token range in raster and in tile-major order.
        tile_thw: tile of the video segments; None: raster order, one block per segment.
        kv_tile_thw: tile that a query tile selects; `tile_thw` unless the layout was built with another one.
        partition: cube (cuboid tiles, ragged at the far edges), or runs of exactly tile-volume tokens, only the last
            one shorter: hilbert_run (along a 3-D Hilbert curve), raster_run (in raster order), hilbert2d_run (frame
            after frame along a 2-D curve), block3d_run (cube after cube of 4 x 4 x 4 tokens, raster inside).
        block_order: nested or raster order of cube tiles; runs follow their own order.
        device: device of the tensors.
        num_tokens: L.
        num_blocks: N.
        order: int64 `[L]`, raster index of the i-th tile-major token.
        inverse: int64 `[L]`, tile-major index of the i-th raster token.
        is_identity: whether the two orders are the same.
        blocks: all N blocks over the tile-major tokens.
        tiles: blocks for every tile size of the layout, `blocks` (for `tile_thw`) included.
        kv_blocks: blocks for `kv_tile_thw`.
        video_tiles: number of video kv tiles of each sample, in the order of the samples.
        num_video_tiles: largest number of video kv tiles of a sample, the top-k that keeps all tiles.
        fill: share of the slots of the video tiles that hold a token; a kernel spends a whole tile on a short one.
        super_offsets: int32 `[groups + 1]` block offsets of the aligned groups of 2 (tiles adjacent in height),
            4 (height and width) and 8 (also time) blocks; groups at an edge hold fewer. Empty in raster block order
            and with tiles of several sizes.
        sample_spans: token range of each sample.
        text_spans: token range and sample position of each text or cond segment, among the queries.
        video_spans: token ranges of the video tokens among the queries, adjacent ranges merged.
        video_blocks: the Nv video blocks over the video tokens only; `blocks` itself in a row without text.
        query_tiles: blocks of the queries for every tile size, `tiles` unless the layout has some of the queries only.
        span: token range of the queries, all tokens unless it is a part, and then of the video, see
            `vsa.attention.sequence`.
        candidates: bool `[Nv, Nkv]` over `kv_blocks`, video tiles of the query tile's own sample, which it may select;
            None: it may select all.
        always: bool `[Nv, Nkv]`, text tiles of the query tile's own sample; None in a row without text.
        derived: cache of the results of `derive`.
    """

    segments: tuple[Segment, ...]
    tile_thw: Grid | None
    kv_tile_thw: Grid | None
    partition: Partition
    block_order: BlockOrder
    device: torch.device
    num_tokens: int
    num_blocks: int
    order: Tensor
    inverse: Tensor
    is_identity: bool
    blocks: Blocks
    tiles: Mapping[Grid, Blocks]
    kv_blocks: Blocks
    video_tiles: tuple[int, ...]
    num_video_tiles: int
    fill: float
    super_offsets: Mapping[int, Tensor]
    sample_spans: tuple[Span, ...]
    text_spans: tuple[tuple[int, int, int], ...]
    video_spans: tuple[Span, ...]
    video_blocks: Blocks
    query_tiles: Mapping[Grid, Blocks]
    span: Span
    candidates: Tensor | None
    always: Tensor | None
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def build(
        segments: Sequence[Segment],
        *,
        tile_thw: Sequence[int] | None,
        kv_tile_thw: Sequence[int] | None = None,
        more_tiles: Iterable[Sequence[int]] = (),
        partition: Partition = "cube",
        block_order: BlockOrder = "nested",
        device: torch.device | str | None = None,
    ) -> TileLayout:
        """The layout of a row of segments; equal arguments return the same object while it is cached.

        Warns once per layout when short tiles waste more than a tenth of the slots.

        Args:
            segments: segments, at least one; those of a sample are adjacent.
            tile_thw: tokens per tile along time, height, width; None for raster order.
            kv_tile_thw: tokens per selected tile; None: `tile_thw`. Tiles of several sizes are nested in one token
                order, so each size has to divide the next larger one.
            more_tiles: further tile sizes.
            partition: see `TileLayout`.
            block_order: nested or raster.
            device: device of the tensors; None: cpu.
        """
        segments = tuple(segments)
        if not segments:
            raise ValueError("a layout needs at least one segment, got none")
        tile = None if tile_thw is None else _tile("tile_thw", tile_thw)
        kv_tile = tile if kv_tile_thw is None else _tile("kv_tile_thw", kv_tile_thw)
        sizes = {tile, kv_tile, *(_tile("more_tiles", sides) for sides in more_tiles)}
        chain = chain_of(sides for sides in sizes if sides is not None) if len(sizes) > 1 else ()
        if chain and tile is None:
            raise ValueError(f"tiles of several sizes need a tile_thw, got None with {chain}")
        return _build(segments, tile, kv_tile, chain, partition, block_order, torch.device(device or "cpu"))

    def only_video(self, what: str) -> Segment:
        """The segment of a row that holds a single video or image; `what` starts the message for any other row."""
        if len(self.segments) != 1:
            raise ValueError(f"{what} takes rows of one video, got {[s.kind for s in self.segments]}")
        return self.segments[0]

    def derive(self, make: Callable[..., Made], *arguments: Any) -> Made:
        """The result of `make(layout, *arguments)`, cached.

        Methods also call it in `layout`, because it cannot be computed for the first time inside a compiled block.
        """
        key = (make.__name__, *arguments)
        if key not in self.derived:
            # the first call may come in validation, whose inference tensors a backward cannot save, or while a network
            # is built on the meta device
            with torch.inference_mode(False), torch.device("cpu"):
                self.derived[key] = make(self, *arguments)
        return self.derived[key]

    def permute(self, x: Tensor) -> Tensor:
        """Tile-major copy of x `[B, L, ...]`, or x itself when the orders are the same."""
        return x if self.is_identity else rearrange(x, self.order, self.inverse)

    def unpermute(self, x: Tensor) -> Tensor:
        """Raster copy of a tile-major x `[B, L, ...]`."""
        return x if self.is_identity else rearrange(x, self.inverse, self.order)

    @property
    def num_queries(self) -> int:
        """Tokens of the queries, L unless the layout has some of them only."""
        return sum(stop - start for start, stop, *_ in (*self.video_spans, *self.text_spans))

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """Text and cond tokens of each sample."""
        samples = range(len(self.sample_spans))
        return tuple(sum(b - a for a, b, owner in self.text_spans if owner == sample) for sample in samples)

    def take_video(self, x: Tensor) -> Tensor:
        """Video tokens `[B, Lv, ...]` of a tile-major x `[B, L, ...]`."""
        if not self.text_spans:
            return x
        parts = [x[:, start:stop] for start, stop in self.video_spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def take_texts(self, x: Tensor) -> list[Tensor]:
        """The tokens `[B, S, ...]` of each text segment of a tile-major x `[B, L, ...]`."""
        return [x[:, start:stop] for start, stop, _ in self.text_spans]

    def merge(self, video: Tensor, texts: Sequence[Tensor]) -> Tensor:
        """A whole row `[B, L, ...]` from its video tokens `[B, Lv, ...]` and one tensor per text segment."""
        if not texts:
            return video
        # in the order of the segments: a compiled block cannot sort starts, which may be symbols
        videos, words, pieces, offset = list(self.video_spans), list(texts), [], 0
        for i, segment in enumerate(self.segments):
            if not segment.is_video:
                pieces.append(words.pop(0))
            elif i == 0 or not self.segments[i - 1].is_video:
                start, stop = videos.pop(0)
                pieces.append(video[:, offset : offset + stop - start])
                offset += stop - start
        return torch.cat(pieces, dim=1)

    def tile_to_tokens(self, x: Tensor) -> Tensor:
        """A per-tile x `[B, Nv, ...]` repeated for each token of its tile, `[B, Lv, ...]`."""
        num_tokens = sum(stop - start for start, stop in self.video_spans)
        return x.repeat_interleave(self.video_blocks.sizes, dim=1, output_size=num_tokens)


def video_places(layout: TileLayout) -> Tensor:
    """Places of the video tiles among the query tiles of a row, int64 `[Nv]`, for `TileLayout.derive`."""
    assert layout.tile_thw is not None
    starts = layout.query_tiles[layout.tile_thw].offsets[:-1, None]
    spans = torch.tensor(layout.video_spans, device=layout.device)
    return ((spans[:, 0] <= starts) & (starts < spans[:, 1])).any(1).nonzero().flatten()


def _tile(name: str, sides: Sequence[int]) -> Grid:
    if len(sides) != 3 or min(sides) < 1:
        raise ValueError(f"{name} must be three positive sizes, got {tuple(sides)}")
    return int(sides[0]), int(sides[1]), int(sides[2])


def _tiles(segment: Segment, tile: Grid | None, partition: Partition, block_order: BlockOrder) -> SegmentTiles:
    if tile is None:
        return run_tiles(segment.num_tokens, segment.num_tokens)
    if (order := run_order(segment.grid_thw, _partition(segment, partition))) is not None:
        return run_tiles(segment.num_tokens, math.prod(tile), order)
    return cube_tiles(segment.grid_thw, tile, block_order)


def _partition(segment: Segment, partition: Partition) -> Partition:
    # a text has neither cuboids nor a curve
    return partition if segment.is_video else "raster_run"


def _offsets(sizes: Sequence[int]) -> Iterator[int]:
    return itertools.accumulate(sizes, initial=0)


def _blocks(sizes: Sequence[int], device: torch.device) -> Blocks:
    offsets = torch.tensor(list(_offsets(sizes)), dtype=torch.int32, device=device)
    return Blocks(offsets=offsets, max_size=max(sizes), min_size=min(sizes))


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans in order, with adjacent ones merged."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _fill(segments: Sequence[Segment], parts: Sequence[SegmentTiles], tile: Grid | None, partition: Partition) -> float:
    """Share of the slots of the video tiles that hold a token; warns when another tile or partition wastes less."""
    videos = [(s, p) for s, p in zip(segments, parts, strict=True) if s.is_video]
    if tile is None or not videos:
        return 1.0
    volume = math.prod(tile)
    fill = sum(s.num_tokens for s, _ in videos) / (volume * sum(len(p.sizes) for _, p in videos))
    if fill < MIN_FILL and partition == "cube":
        worst = min(videos, key=lambda item: item[0].num_tokens / len(item[1].sizes))[0].grid_thw
        better = propose_tile(worst, volume)
        hint = "with partition=hilbert_run only the last tile is short"
        if count_tiles(worst, better) < count_tiles(worst, tile):
            hint = f"tile {better} fits grid {worst} better"
        warnings.warn(f"tiles {tile} are {fill:.0%} full, and a short tile costs a whole one: {hint}", stacklevel=6)
    return fill


def _select(
    segments: Sequence[Segment], num_tiles: Sequence[int], num_kv_tiles: Sequence[int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Masks of the candidates and of the always visible tiles of a layout, from the tiles of each segment."""
    has_text = not all(s.is_video for s in segments)
    if not has_text and len({s.sample for s in segments}) == 1:
        return None, None
    queries = [(s.sample, n) for s, n in zip(segments, num_tiles, strict=True) if s.is_video]
    of_query = torch.tensor([sample for sample, n in queries for _ in range(n)], device="cpu")
    keys = [s for s, n in zip(segments, num_kv_tiles, strict=True) for _ in range(n)]
    same = of_query[:, None] == torch.tensor([s.sample for s in keys], device="cpu")
    is_video = torch.tensor([s.is_video for s in keys], device="cpu")
    return (same & is_video).to(device), (same & ~is_video).to(device) if has_text else None


# rows repeat from step to step; the bound keeps a run with many grids from holding all their index tensors
@lru_cache(maxsize=64)
# a layout first built while validating is used in training too, where inference tensors cannot be saved
@torch.inference_mode(False)
@torch.no_grad()
def _build(
    segments: tuple[Segment, ...],
    tile: Grid | None,
    kv_tile: Grid | None,
    chain: tuple[Grid, ...],
    partition: Partition,
    block_order: BlockOrder,
    device: torch.device,
) -> TileLayout:
    if partition not in get_args(Partition):
        raise ValueError(f"partition must be one of {', '.join(get_args(Partition))}, got {partition!r}")
    if block_order not in ("nested", "raster"):
        raise ValueError(f"block_order must be nested or raster, got {block_order!r}")
    owners = [sample for sample, _ in itertools.groupby(s.sample for s in segments)]
    if len(set(owners)) < len(owners):
        raise ValueError(f"segments of one sample must be adjacent, got samples {owners}")
    nested: dict[Grid, list[int]] = {}
    if chain and tile is not None and kv_tile is not None:
        cuts = [nested_tiles(s.grid_thw, chain, _partition(s, partition), block_order) for s in segments]
        nested = {sides: [n for _, sizes in cuts for n in sizes[sides]] for sides in chain}
        parts = [SegmentTiles(order, sizes[tile], {}) for order, sizes in cuts]
        num_kv_tiles = [len(sizes[kv_tile]) for _, sizes in cuts]
    else:
        parts = [_tiles(segment, tile, partition, block_order) for segment in segments]
        num_kv_tiles = [len(part.sizes) for part in parts]
    starts = list(_offsets([s.num_tokens for s in segments]))
    num_tokens = starts[-1]
    rows = list(zip(segments, parts, num_kv_tiles, starts[:-1], starts[1:], strict=True))
    samples = {sample: list(some) for sample, some in itertools.groupby(rows, lambda row: row[0].sample)}
    video_tiles = [sum(n for s, _, n, *_ in some if s.is_video) for some in samples.values()]
    video_sizes = [n for s, p, *_ in rows if s.is_video for n in p.sizes]
    if not video_sizes:
        raise ValueError(f"a row needs at least one video or image segment, got {[s.kind for s in segments]}")
    sizes = [size for part in parts for size in part.sizes]
    order = torch.cat([part.order + start for _, part, _, start, _ in rows])
    identity = torch.arange(num_tokens, device="cpu")
    blocks = _blocks(sizes, device)
    tiles = {sides: _blocks(nested[sides], device) for sides in nested} | ({} if tile is None else {tile: blocks})
    candidates, always = _select(segments, [len(part.sizes) for part in parts], num_kv_tiles, device)
    supers = () if tile is None or nested or (block_order == "raster" and partition == "cube") else SUPER_SIZES
    super_offsets = {
        g: torch.tensor(list(_offsets([n for p in parts for n in p.groups[g]])), dtype=torch.int32, device=device)
        for g in supers
    }
    return TileLayout(
        segments=segments,
        tile_thw=tile,
        kv_tile_thw=kv_tile,
        partition=partition,
        block_order=block_order,
        device=device,
        num_tokens=num_tokens,
        num_blocks=len(sizes),
        order=order.to(device),
        inverse=torch.empty_like(order).scatter_(0, order, identity).to(device),
        is_identity=torch.equal(order, identity),
        blocks=blocks,
        tiles=tiles,
        kv_blocks=blocks if kv_tile is None else tiles[kv_tile],
        video_tiles=tuple(video_tiles),
        num_video_tiles=max(video_tiles),
        fill=_fill(segments, parts, tile, partition),
        super_offsets=super_offsets,
        sample_spans=tuple((some[0][3], some[-1][4]) for some in samples.values()),
        text_spans=tuple((a, b, list(samples).index(s.sample)) for s, *_, a, b in rows if not s.is_video),
        video_spans=_merged([(a, b) for s, *_, a, b in rows if s.is_video]),
        video_blocks=blocks if len(video_sizes) == len(sizes) else _blocks(video_sizes, device),
        query_tiles=tiles,
        span=(0, num_tokens),
        candidates=candidates,
        always=always,
    )
