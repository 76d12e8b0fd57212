"""Sparse attention with a pooled tail: every tile that is not selected joins the softmax as one key.

With a tile's mean key km_j, mean value vm_j, n_j tokens and the variance var_j of its keys by channel, s = 1/sqrt(D):

    tail_ij = s q_i km_j + ln n_j                       order 1
            + s^2/2 (q_i^2) var_j                       order 2, the second-order term of log sum_j exp(s q_i k)
    out_i   = softmax over the tokens of selected tiles (s q_i k) and the tail (tail_ij) of v and vm_j

    tail=excluded       the tail has the tiles that are not selected
    tail=double_count   it has all tiles, so that selected ones count twice
    tail=none           there is none

With levels=2 tiles are selected in two steps, and the tail has two sizes: every tile of nodes, larger tiles, selects as
many nodes as a query tile selects tiles, by products of means, and its query tiles select among the tiles in them. The
tail has these tiles, without selected ones (excluded), and as one key each the other nodes (excluded) or all nodes
(double_count).

It has no parameters. With all tiles selected `excluded` is dense attention, and so it is with one level of tiles of
one token.

B batch, L tokens, N tiles, M nodes, H / Hkv heads, D head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from vsa_kernels import BlockIndex, block_mean_pool, block_sparse_attn

from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.attention.scores import mean_scores, per_head, tile_logits, tiles_inside, with_damage_first
from vsa.attention.selecting import SelectingAttention, Tile, grid_of
from vsa.attention.selection import select_blocks
from vsa.attention.tiling import refuse_no_divisor
from vsa.settings import validated


@validated
class PooledTail(SelectingAttention):
    """Exact attention to the top-k tiles and to the means of others, in one softmax; for rows of one video.

    Args:
        tail: excluded, double_count or none, see the top of this file.
        levels: sizes of tiles in selection and tail, 1 or 2; 2 is eager and saves no time.
        node_thw: tokens per node of two levels along time, height, width, a multiple of the tile; None: its sides
            squared.
        order: order of the tail's approximation, 1 or 2, see the top of this file; variances are per channel.
            Order 2 is an experiment.
        backend: backend of the fine stage; None chooses by device.
        **layer: see `SelectingAttention`; the scores mass and error have the logits of the tail's tiles, of order 2
            too.

    Source: order 1 is the forward of Sol-Attn (arXiv 2607.24027, training-free). LLSA (arXiv 2512.16615) trains it on
    images, as double_count, with one or two levels; its nodes have as many tiles as a tile has tokens. SVG-EAR (arXiv
    2603.08982) lets the centroids of skipped clusters join in the same way; PISA (arXiv 2602.01077) expands exp itself
    around a skipped block's mean, order 2 its logarithm. Ours are the training with selected tiles excluded, whose
    output with all tiles selected is exactly that of dense attention, order 2 and the score mass.
    """

    takes_text = False

    def __init__(
        self,
        *,
        tail: Literal["excluded", "double_count", "none"] = "excluded",
        levels: Literal[1, 2] = 1,
        node_thw: Tile | None = None,
        order: Literal[1, 2] = 1,
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        self.tail, self.levels, self.order, self.backend = tail, levels, order, backend
        self.node_thw = grid_of([n * n for n in self.tile_thw] if node_thw is None else node_thw)
        for name, value in (("order", order), ("levels", levels)):
            if tail == "none" and value == 2:
                raise ValueError(f"{name}={value} needs a tail, got tail={tail}")
        if levels == 2 and self.rule != "topk":
            raise ValueError(f"levels={levels} needs rule=topk, got rule={self.rule}")
        refuse_no_divisor("tile_thw", self.tile_thw, node_thw=self.node_thw)

    def tiling(self) -> dict[str, Any]:
        own = super().tiling()
        return own if self.levels == 1 else own | {"more_tiles": [*own.get("more_tiles", ()), self.node_thw]}

    def prepare(self, layout: TileLayout) -> None:
        if self.levels == 2:
            layout.derive(tiles_inside, self.tile_thw, self.node_thw)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        layout = ctx.layout
        ctx.kept(q)
        layout.only_video("attention with a pooled tail")
        blocks = layout.blocks
        logits = None if self.tail == "none" else tile_logits(q, k, blocks, self.order)
        nodes = self._nodes(q, k, ctx) if self.levels == 2 else None
        inside = None if nodes is None else self._tiles_of(nodes, layout)
        ranked = partial(self.scores, q, k, v, layout, logits)

        def choose(topk: KeptTiles) -> BlockIndex:
            # without a tail the output may lack a tile
            scores = ranked() if logits is not None else with_damage_first(ranked(), k, v, layout)
            return self.choose(scores, topk, layout, logits_of=self.map_logits, candidates=inside)

        index = ctx.select(choose)
        fine, lse = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=self.backend)
        rest = share = None
        if logits is not None:
            others, values = self._tail(q, k, v, logits, index.to_dense(blocks.num), nodes, layout)
            total = torch.cat((lse[..., None], others), dim=-1).logsumexp(-1, keepdim=True)
            rest = ((others - total).exp() @ values).transpose(1, 2).to(fine.dtype)
            share = (lse[..., None] - total).exp().transpose(1, 2)
            fine = fine * share.to(fine.dtype)
        if ctx.recorder is not None:
            scores = self.map_logits(ranked())
            mass = None if share is None else 1 - share
            ctx.record(self.layer_idx, index, q=q, k=k, fine=fine, tail=rest, tail_mass=mass, scores=scores)
        return {"out": fine if rest is None else fine + rest}

    def _tail(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        logits: Tensor,
        selected: Tensor,
        nodes: Tensor | None,
        layout: TileLayout,
    ) -> tuple[Tensor, Tensor]:
        """Logits `[B, H, L, M']` of the pooled keys, -inf for those outside of a query's tail, and their values
        `[B, H, M', D]`, from the logits of the tiles and the selected tiles `[B, H, N, N]`."""
        exclude = self.tail == "excluded"
        absent, of_nodes = selected & exclude, []
        if nodes is not None:
            # a selection of an earlier pass may have tiles of other nodes
            inside = one_hot(self._node_of(layout), nodes.shape[-1])
            nodes = nodes | (selected.to(v.dtype) @ inside.to(v.dtype) > 0)
            larger = layout.tiles[self.node_thw]
            absent = absent | ~self._tiles_of(nodes, layout)
            of_nodes = [(tile_logits(q, k, larger, self.order), larger, nodes & exclude)]
        pooled, rows = [(logits, layout.blocks, absent), *of_nodes], layout.blocks.sizes
        others = [
            logit.masked_fill(missing.repeat_interleave(rows, dim=2, output_size=layout.num_tokens), float("-inf"))
            for logit, _, missing in pooled
        ]
        values = [per_head(block_mean_pool(v, blocks).transpose(1, 2), q.shape[2]) for _, blocks, _ in pooled]
        return torch.cat(others, dim=-1), torch.cat(values, dim=2)

    def _nodes(self, q: Tensor, k: Tensor, ctx: AttnContext) -> Tensor:
        """Nodes among whose tiles each query tile selects, bool `[B, H, N, M]`."""
        nodes = ctx.layout.tiles[self.node_thw]
        chosen = select_blocks(mean_scores(q, k, nodes, nodes), ctx.topk).to_dense(nodes.num)
        return chosen.index_select(2, self._node_of(ctx.layout))

    def _tiles_of(self, nodes: Tensor, layout: TileLayout) -> Tensor:
        """The tiles `[..., N]` in nodes `[..., M]`, as bools."""
        return nodes.index_select(-1, self._node_of(layout))

    def _node_of(self, layout: TileLayout) -> Tensor:
        """The node of each tile, int64 `[N]`."""
        sizes = layout.derive(tiles_inside, self.tile_thw, self.node_thw).sizes
        return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=layout.num_blocks)

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of the selected tiles (exact when tiles are full) and of every token with every tile and node; the
        product with the variances in order 2 counts as half a pair, and so does one of a score; `mass` and `error`
        take the logits of the tail."""
        tokens, tiles = layout.num_tokens, layout.num_blocks
        pooled = tiles + (layout.tiles[self.node_thw].num if self.levels == 2 else 0)
        pooled = 0 if self.tail == "none" else pooled * (1 if self.order == 1 else 1.5)
        shared = tiles / 2 if pooled and self.score in ("mass", "error") else 0
        return tokens * (tokens * min(topk, tiles) / tiles + pooled - shared) + self.score_pairs(layout)
