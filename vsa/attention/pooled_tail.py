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
from vsa_kernels import BlockIndex, block_mean_pool, block_sparse_attn, tail_attn

from vsa.attention.context import AttnContext
from vsa.attention.dense import dense_attn_per_sample, text_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.attention.scores import mean_scores, per_head, tile_logits, tiles_inside, with_damage_first
from vsa.attention.selecting import SelectingAttention, Tile, grid_of
from vsa.attention.selection import select_blocks
from vsa.attention.tiling import refuse_no_divisor
from vsa.settings import validated


@validated
class PooledTail(SelectingAttention):
    """Exact attention to the top-k tiles and to the means of others, in one softmax.

    Text and cond tokens attend densely to their sample, and every video token attends to them in addition to the
    selected tiles.

    Args:
        tail: excluded, double_count or none, see the top of this file.
        levels: sizes of tiles in selection and tail, 1 or 2; 2 is eager, for rows of one video, and saves no time.
        node_thw: tokens per node of two levels along time, height, width, a multiple of the tile; None: its sides
            squared.
        order: order of the tail's approximation, 1 or 2, see the top of this file; variances are per channel.
            Order 2 is an experiment: eager, for rows of one video.
        backend: backend of `tail_attn`; None chooses by device.
        **layer: see `SelectingAttention`; the scores mass and error have the logits of an eager tail's tiles, of order
            2 too.

    Source: order 1 is the forward of Sol-Attn (arXiv 2607.24027, training-free). LLSA (arXiv 2512.16615) trains it on
    images, as double_count, with one or two levels; its nodes have as many tiles as a tile has tokens. SVG-EAR (arXiv
    2603.08982) lets the centroids of skipped clusters join in the same way; PISA (arXiv 2602.01077) expands exp itself
    around a skipped block's mean, order 2 its logarithm. Ours are the training with selected tiles excluded, whose
    output with all tiles selected is exactly that of dense attention, order 2 and the score mass.
    """

    operator = "tail_attn"

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
        self.eager = order == 2 or levels == 2
        if self.eager:
            self.takes_text = self.takes_query_parts = False
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
        super().prepare(layout)
        if self.levels == 2:
            layout.derive(tiles_inside, self.tile_thw, self.node_thw)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        layout, topk = ctx.layout, ctx.kept(q)
        if self.eager:
            return self._attend_eager(q, k, v, ctx)
        every = ctx.dense or (self.rule == "topk" and ctx.topk.samples is None and topk >= layout.num_video_tiles)
        if every and self.tail != "double_count" and ctx.recorder is None:
            ctx.count_all(q)
            return {"out": dense_attn_per_sample(q, k, v, layout)}
        video, texts = layout.take_video(q), text_attn(q, k, v, layout)
        tiles: dict[str, Any] = {"q_blocks": layout.video_blocks, "kv_blocks": layout.blocks, "backend": self.backend}
        masks: dict[str, Any] = {"candidates": layout.candidates, "always": layout.always}

        def choose(topk: KeptTiles) -> BlockIndex:
            scores = self.scores(q, k, v, layout)
            # without a tail the output may lack a tile
            scores = with_damage_first(scores, k, v, layout) if self.tail == "none" else scores
            return self.choose(scores, topk, ctx, logits_of=self.map_logits, **masks)

        index, rest, mass = ctx.select(choose), None, None
        if self.tail == "none":
            fine, _ = block_sparse_attn(video, k, v, index, **tiles)
            out = fine
        else:
            exclude = self.tail == "excluded"
            out, total = tail_attn(video, k, v, index, **tiles, candidates=layout.candidates, exclude=exclude)
            if ctx.recorder is not None:
                fine, lse = block_sparse_attn(video, k, v, index, **tiles)
                share = (lse - total).exp().transpose(1, 2)[..., None]
                fine = fine * share.to(fine.dtype)
                rest = layout.merge(out - fine, [torch.zeros_like(text) for text in texts])
                mass = layout.merge(1 - share, [torch.zeros_like(text[..., :1]) for text in texts])
        if ctx.recorder is not None:
            tensors = {"fine": layout.merge(fine, texts), "tail": rest, "tail_mass": mass}
            scores = self.map_logits(self.scores(q, k, v, layout))
            ctx.record(self.layer_idx, index, q=q, k=k, scores=scores, **tensors)
        return {"out": layout.merge(out, texts)}

    def _attend_eager(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """Tails of order 2 and of two levels, by logits `[B, H, L, N]`."""
        layout = ctx.layout
        layout.only_video(f"a pooled tail of order {self.order} and {self.levels} levels")
        blocks = layout.blocks
        logits = tile_logits(q, k, blocks, self.order)
        nodes = self._nodes(q, k, ctx) if self.levels == 2 else None
        inside = None if nodes is None else self._tiles_of(nodes, layout)
        ranked = partial(self.scores, q, k, v, layout, logits)
        how: dict[str, Any] = {"logits_of": self.map_logits, "candidates": inside}
        index = ctx.select(lambda topk: self.choose(ranked(), topk, ctx, **how))
        fine, lse = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=self.backend)
        others, values = self._tail(q, k, v, logits, index.to_dense(blocks.num), nodes, layout)
        total = torch.cat((lse[..., None], others), dim=-1).logsumexp(-1, keepdim=True)
        rest = ((others - total).exp() @ values).transpose(1, 2).to(fine.dtype)
        share = (lse[..., None] - total).exp().transpose(1, 2)
        fine = fine * share.to(fine.dtype)
        if ctx.recorder is not None:
            tensors = {"fine": fine, "tail": rest, "tail_mass": 1 - share, "scores": self.map_logits(ranked())}
            ctx.record(self.layer_idx, index, q=q, k=k, **tensors)
        return {"out": fine + rest}

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
        """Pairs of the selected tiles (exact when tiles are full) and of every video token with every tile of its
        sample and node; the product with the variances in order 2 counts as half a pair, and so does one of a score.
        In an eager tail `mass` and `error` take its logits."""
        total = self.kept_pairs(layout, topk) + self.score_pairs(layout)
        if self.tail == "none":
            return total
        nodes = layout.tiles[self.node_thw].num if self.levels == 2 else 0
        for (start, stop), tiles, text in zip(layout.sample_spans, layout.video_tiles, layout.text_tokens, strict=True):
            shared = tiles / 2 if self.eager and self.score in ("mass", "error") else 0
            total += (stop - start - text) * ((tiles + nodes) * (1 if self.order == 1 else 1.5) - shared)
        return total
