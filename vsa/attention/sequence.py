"""Sequence parallelism (Ulysses): some ranks share a sample, and each has some of its tokens.

Between the attentions every rank computes with its own tokens, a run of whole query tiles. For attention, q, k and v
travel: a rank gets some of the heads for all keys, computes these as one process would, and sends what came out back to
the ranks of the tokens. H heads on N ranks make G = gcd(H, N) groups of heads and N / G shards of the queries: 12 heads
on 8 ranks are 4 groups of 3 heads, each for two halves of the query tiles. Rows that share a budget over ranks are
selected on all of them, by the scores of all, which travel.

B batch, L tokens of a sample, l tokens of this rank, n rows that a rank gets in attention, H heads, h heads of a group,
D head dim.

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
    """The tokens of a row of one video among the ranks that share it, for `TileLayout.derive`.

    Not a dataclass: FSDP2 would follow its fields, which lead back to the layout.

    Args:
        layout: layout of the row.
        ranks: the ranks.
        num_heads: H.

    Attributes:
        local: layout of the queries of this rank.
        queries: layout of the queries that it gets in attention, all of them with one shard.
        groups: G.
        rows: rows of each rank by the size of their tiles, None for tokens.

    Raises:
        ValueError: there are fewer query tiles than ranks.
    """

    def __init__(self, layout: TileLayout, ranks: SequenceRanks, num_heads: int):
        spans = token_spans(layout, ranks.size)
        self.ranks, self.groups = ranks, math.gcd(ranks.size, num_heads)
        self.local = layout.derive(part_of, *spans[ranks.rank])
        self.queries, self._tile = layout, layout.tile_thw
        if self.groups < ranks.size:
            shard = [spans[rank] for rank in self._shard]
            self.queries = layout.derive(part_of, shard[0][0], shard[-1][1])
        self.rows: dict[Grid | None, tuple[int, ...]] = {None: tuple(stop - start for start, stop in spans)}
        for tile, blocks in layout.tiles.items():
            runs = [run for span in spans if (run := _run_of(blocks, *span)) is not None]
            # no rows of tiles that a cut divides
            self.rows |= {tile: tuple(map(len, runs))} if len(runs) == len(spans) else {}

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.rows[None][self.ranks.rank]

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
        return x[:, start:stop]

    def gather(self, x: Tensor) -> Tensor:
        """All tokens `[B, L, ...]` of x `[B, l, ...]`, on every rank.

        Every rank goes on with the same tensor, and the gradient of x is the sum of theirs, N times that of one
        process: the mean over all ranks, which sharding takes, is the gradient of a weight.
        """
        size, rows = self.ranks.size, x.transpose(0, 1)
        copies = rows.expand(size, *rows.shape).flatten(0, 1)
        return self.ranks.exchange(copies, send=[len(rows)] * size, receive=self.rows[None]).transpose(0, 1)

    def to_heads(self, x: Tensor, *, keys: bool) -> Tensor:
        """Some heads `[B, n, h, D]` of x `[B, l, H, D]`: for all tokens of keys and values, or for those of `queries`.

        Keys travel to every shard.
        """
        groups, rows = self.groups, self.rows[None]
        x = x.unflatten(2, (groups, -1)).permute(2, 1, 0, 3, 4)
        send = [x.shape[1]] * self.ranks.size
        if keys:
            x = x.repeat(self.ranks.size // groups, 1, 1, 1, 1)
        else:
            send, rows = self._in_shard(send), self._in_shard(rows)
        return self.ranks.exchange(x.flatten(0, 1), send=send, receive=rows).transpose(0, 1).contiguous()

    def to_tokens(self, x: Tensor, tile: Grid | None) -> Tensor:
        """All heads `[B, m, H, D]` of this rank's rows of x `[B, n, h, D]`, one row per token or per tile of a size."""
        rows = self.rows[tile]
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
        tiles = self.rows[self._tile]
        return [sum(tiles[start : start + self.groups]) for start in range(0, self.ranks.size, self.groups)]


def token_spans(layout: TileLayout, ranks: int) -> list[Span]:
    """Runs of whole query tiles with about equally many tokens each, one per rank; of tokens without tiles."""
    layout.only_video("sequence parallelism")
    total = layout.num_tokens
    ends = list(range(total + 1)) if layout.tile_thw is None else layout.blocks.offsets.tolist()
    tiles, cuts = len(ends) - 1, [0]
    if tiles < ranks:
        grid = layout.segments[0].grid_thw
        raise ValueError(f"task.parallel.sequence={ranks}: a sample of {grid} tokens has {tiles} query tiles to divide")
    for rank in range(1, ranks):
        # at least a tile for every rank before and after
        possible = range(cuts[-1] + 1, tiles - (ranks - rank) + 1)
        cuts.append(min(possible, key=lambda tile: abs(ends[tile] * ranks - total * rank)))
    return list(itertools.pairwise([*(ends[cut] for cut in cuts), total]))


def part_of(layout: TileLayout, start: int, stop: int) -> TileLayout:
    """The layout with the queries from token `start` to `stop` and all keys, of a row of one video; for
    `TileLayout.derive`."""
    runs = {tile: _run_of(blocks, start, stop) for tile, blocks in layout.tiles.items()}
    tiles = {
        # masks have as many rows as the largest block of the layout
        tile: replace(Blocks.from_sizes(sizes, layout.device), max_size=layout.tiles[tile].max_size)
        for tile, sizes in runs.items()
        if sizes is not None
    }
    own = tiles[layout.tile_thw] if layout.tile_thw else Blocks.from_sizes([stop - start], layout.device)
    return replace(layout, span=(start, stop), video_blocks=own, query_tiles=tiles, derived={})


def _run_of(blocks: Blocks, start: int, stop: int) -> list[int] | None:
    """Sizes of the blocks from token `start` to `stop`, None where one of these is inside a block."""
    ends = blocks.offsets.tolist()
    if start not in ends or stop not in ends:
        return None
    own = ends[ends.index(start) : ends.index(stop) + 1]
    return [b - a for a, b in itertools.pairwise(own)]
