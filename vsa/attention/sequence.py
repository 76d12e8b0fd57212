"""Sequence parallelism (Ulysses): some ranks share a sample, and each has some of its tokens.

Between the attentions every rank computes with its own tokens, a run of whole query tiles. For attention, q, k and v
travel: a rank gets some of the heads for all keys, computes these as one process would, and sends what came out back to
the ranks of the tokens. H heads on N ranks make G = gcd(H, N) groups of heads and N / G shards of the queries: 12 heads
on 8 ranks are 4 groups of 3 heads, each for two halves of the query tiles. Rows that share a budget over ranks are
selected on all of them, by the scores of all, which travel.

Text beside the video is on every rank, which computes all of it but, in attention, the queries of other heads: those
travel. The ranks' losses are equal, and the gradient on a rank is its part of that of their sum, of text too.

B batch, L tokens of a sample, l tokens of this rank, text included, n rows that a rank gets in attention, H heads, h
heads of a group, D head dim.

Source: DeepSpeed-Ulysses (arXiv 2309.14509); shards of queries, and cuts at ragged tiles, are ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd.function import once_differentiable
from vsa_kernels.block_index import BlockIndex, Blocks

from vsa.attention.layout import Span, TileLayout
from vsa.attention.tiling import Grid


@dataclass(frozen=True, kw_only=True)
class SequenceRanks:
    """The ranks that share a sample, as one of them sees them.

    Args:
        group: name of their process group.
        size: N.
        rank: place of this one, from 0.
    """

    group: str
    size: int
    rank: int

    def shards(self, num_heads: int) -> int:
        """Number of shards of the queries, 1 where the ranks divide the heads."""
        return self.size // math.gcd(self.size, num_heads)

    def enter(self, x: Tensor) -> Tensor:
        """x, which all ranks have, for a computation that each of them does for some tokens; its gradient is whole."""
        return _Enter.apply(x, self) if torch.is_grad_enabled() and x.requires_grad else x  # type: ignore[return-value]

    def exchange(self, rows: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send runs of rows to the ranks, in their order, and receive as many from each as `receive` says."""
        return collectives.all_to_all_single_autograd(rows.contiguous(), list(receive), list(send), self.group)  # type: ignore[arg-type]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        # each rank has N times the share of its tokens, see `Division.gather`
        return collectives.all_reduce(gradient, "sum", ctx.ranks.group) / ctx.ranks.size, None


class Division:
    """The tokens of a row of one video, beside its text, among the ranks that share it, for `TileLayout.derive`.

    Not a dataclass: FSDP2 would follow its fields, which lead back to the layout.

    Args:
        layout: layout of the row.
        ranks: the ranks.
        num_heads: H.

    Attributes:
        local: layout of the queries of this rank.
        queries: layout of the queries that it gets in attention, all of them with one shard.
        groups: G.
        rows: rows of the video of each rank by the size of their tiles, None for tokens.
        before: rows of text before the video, by the same.

    Raises:
        ValueError: there are fewer query tiles than ranks.
    """

    def __init__(self, layout: TileLayout, ranks: SequenceRanks, num_heads: int):
        spans = token_spans(layout, ranks.size)
        self.ranks, self.groups = ranks, math.gcd(ranks.size, num_heads)
        self.local = layout.derive(part_of, *spans[ranks.rank])
        self.row = self.queries = layout
        if self.groups < ranks.size:
            shard = [spans[rank] for rank in self._shard]
            self.queries = layout.derive(part_of, shard[0][0], shard[-1][1])
        self.rows: dict[Grid | None, tuple[int, ...]] = {None: tuple(stop - start for start, stop in spans)}
        self.before: dict[Grid | None, int] = {None: spans[0][0]}
        for tile, blocks in layout.tiles.items():
            runs = [run for span in spans if (run := _run_of(blocks, *span)) is not None]
            # no rows of tiles that a cut divides
            self.rows |= {tile: tuple(map(len, runs))} if len(runs) == len(spans) else {}
            self.before[tile] = blocks.offsets.tolist().index(spans[0][0])

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.rows[None][self.ranks.rank] + sum(self.row.text_tokens)

    @property
    def _shard(self) -> range:
        """The ranks whose queries this one gets in attention."""
        first = self.ranks.rank // self.groups * self.groups
        return range(first, first + self.groups)

    def _in_shard(self, counts: Sequence[int]) -> list[int]:
        return [count if rank in self._shard else 0 for rank, count in enumerate(counts)]

    def pairs(self, num_heads: int) -> int:
        """Query-key pairs of this rank with dense attention; those of all ranks add up to those of the row."""
        start, stop = self.queries.span
        return num_heads // self.groups * (stop - start) * self.queries.num_tokens

    def cut(self, x: Tensor) -> Tensor:
        """The tokens `[B, l, ...]` of this rank of x `[B, L, ...]`, in the layout's order, which all ranks have."""
        start, stop = self.local.span
        return self.local.merge(x[:, start:stop], self.row.take_texts(x))

    def gather(self, x: Tensor) -> Tensor:
        """All tokens `[B, L, ...]` of x `[B, l, ...]`, on every rank.

        Every rank goes on with the same tensor, and the gradient of x is the sum of theirs, N times that of one
        process: the mean over all ranks, which sharding takes, is the gradient of a weight.
        """
        size, rows = self.ranks.size, self.local.take_video(x).transpose(0, 1)
        copies = rows.expand(size, *rows.shape).flatten(0, 1)
        video = self.ranks.exchange(copies, send=[len(rows)] * size, receive=self.rows[None]).transpose(0, 1)
        return self.row.merge(video, self.local.take_texts(x))

    def to_heads(self, x: Tensor, *, keys: bool) -> Tensor:
        """Some heads `[B, n, h, D]` of x `[B, l, H, D]`: for all tokens of keys and values, or for those of `queries`.

        Keys travel to every shard.
        """
        groups, rows = self.groups, self.rows[None]
        x = x.unflatten(2, (groups, -1))
        texts = [text[:, :, self.ranks.rank % groups] for text in self.local.take_texts(x)]
        x = self.local.take_video(x).permute(2, 1, 0, 3, 4)
        send = [x.shape[1]] * self.ranks.size
        if keys:
            x = x.repeat(self.ranks.size // groups, 1, 1, 1, 1)
        else:
            send, rows = self._in_shard(send), self._in_shard(rows)
        video = self.ranks.exchange(x.flatten(0, 1), send=send, receive=rows).transpose(0, 1)
        return (self.row if keys else self.queries).merge(video, texts).contiguous()

    def to_tokens(self, x: Tensor, tile: Grid | None) -> Tensor:
        """All heads `[B, m, H, D]` of this rank's rows of x `[B, n, h, D]`, one row per token or per tile of a size;
        rows of tiles may leave out those of text."""
        rows = [self.rows[tile][rank] for rank in self._shard]
        if text := x.shape[1] - sum(rows):
            before = self.before[tile]
            first, video, last = x.split((before, sum(rows), text - before), dim=1)
            # to every rank that gets rows of the video
            x = torch.cat([part for run in video.split(rows, dim=1) for part in (first, run, last)], dim=1)
        rows = [count + text for count in self.rows[tile]]
        own = rows[self.ranks.rank]
        received = self._in_shard([own] * self.ranks.size)
        x = self.ranks.exchange(x.transpose(0, 1), send=self._in_shard(rows), receive=received)
        return x.unflatten(0, (self.groups, own)).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def of_all(self, x: Tensor) -> Tensor:
        """Rows `[B, H, Nq, M]` of all heads and query tiles, on every rank, of x `[B, h, n, M]`; no gradient."""
        size, batch, heads, *_ = self.ranks.size, *x.shape
        rows = x.detach().flatten(0, 2)
        receive = [batch * heads * tiles for tiles in self._shard_tiles for _ in range(self.groups)]
        received = self.ranks.exchange(rows.repeat(size, 1), send=[len(rows)] * size, receive=receive)
        parts = [part.unflatten(0, (batch, heads, -1)) for part in received.split(receive)]
        shards = (torch.cat(parts[start : start + self.groups], dim=1) for start in range(0, size, self.groups))
        return torch.cat(list(shards), dim=2)

    def own_lists(self, index: BlockIndex) -> BlockIndex:
        """The lists of this rank's heads and query tiles, of an index `[B, H, Nq, Nkv]` of all."""
        heads = index.kv_num_blocks.shape[1] // self.groups
        first, start = self.ranks.rank % self.groups * heads, sum(self._shard_tiles[: self.ranks.rank // self.groups])
        stop = start + self._shard_tiles[self.ranks.rank // self.groups]
        own = (slice(None), slice(first, first + heads), slice(start, stop))
        lists = {name: getattr(index, name)[own].contiguous() for name in ("kv_indices", "kv_num_blocks")}
        return replace(index, **lists)

    @property
    def _shard_tiles(self) -> list[int]:
        """Query tiles of each shard of the queries."""
        tiles = self.rows[self.row.tile_thw]
        return [sum(tiles[start : start + self.groups]) for start in range(0, self.ranks.size, self.groups)]


def token_spans(layout: TileLayout, ranks: int) -> list[Span]:
    """Runs of whole query tiles of a row's video with about equally many tokens each, one per rank; of tokens without
    tiles."""
    grid, *others = (segment.grid_thw for segment in layout.segments if segment.is_video)
    if others:
        raise ValueError(f"sequence parallelism takes rows of one video, got {[s.kind for s in layout.segments]}")
    [(first, last)] = layout.video_spans
    total = last - first
    ends = list(range(total + 1)) if layout.tile_thw is None else layout.video_blocks.offsets.tolist()
    tiles, cuts = len(ends) - 1, [0]
    if tiles < ranks:
        raise ValueError(f"task.parallel.sequence={ranks}: a sample of {grid} tokens has {tiles} query tiles to divide")
    for rank in range(1, ranks):
        # at least a tile for every rank before and after
        possible = range(cuts[-1] + 1, tiles - (ranks - rank) + 1)
        cuts.append(min(possible, key=lambda tile: abs(ends[tile] * ranks - total * rank)))
    return list(itertools.pairwise([*(first + ends[cut] for cut in cuts), last]))


def part_of(layout: TileLayout, start: int, stop: int) -> TileLayout:
    """The layout with the queries from token `start` to `stop` of the video, those of all text and all keys, of a row
    of one video; for `TileLayout.derive`."""
    [(first, last)] = layout.video_spans

    def some(sizes: Sequence[int], blocks: Blocks) -> Blocks:
        # masks have as many rows as the largest block of the layout
        return replace(Blocks.from_sizes(sizes, layout.device), max_size=blocks.max_size)

    tiles = {}
    for tile, blocks in layout.tiles.items():
        runs = [_run_of(blocks, *span) for span in ((0, first), (start, stop), (last, layout.num_tokens))]
        if None not in runs:
            tiles[tile] = some([size for run in runs if run for size in run], blocks)
    rows, own = slice(1), Blocks.from_sizes([stop - start], layout.device)
    if layout.tile_thw is not None:
        ends = (first + layout.video_blocks.offsets).tolist()
        rows = slice(ends.index(start), ends.index(stop))
        own = some(layout.video_blocks.sizes[rows].tolist(), layout.video_blocks)
    left_out = last - first - (stop - start)
    texts = [(a, b, i) if b <= first else (a - left_out, b - left_out, i) for a, b, i in layout.text_spans]
    return replace(
        layout,
        span=(start, stop),
        video_spans=((first, first + stop - start),),
        text_spans=tuple(texts),
        video_blocks=own,
        query_tiles=tiles,
        candidates=None if layout.candidates is None else layout.candidates[rows],
        always=None if layout.always is None else layout.always[rows],
        derived={},
    )


def _run_of(blocks: Blocks, start: int, stop: int) -> list[int] | None:
    """Sizes of the blocks from token `start` to `stop`, None where one of these is inside a block."""
    ends = blocks.offsets.tolist()
    if start not in ends or stop not in ends:
        return None
    own = ends[ends.index(start) : ends.index(stop) + 1]
    return [b - a for a, b in itertools.pairwise(own)]
