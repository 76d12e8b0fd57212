"""Sparse attention with a pooled tail: every tile that is not selected joins the softmax as one key.

With a tile's mean key km_j, mean value vm_j, n_j tokens and the variance var_j of its keys by channel, s = 1/sqrt(D):

    tail_ij = s q_i km_j + ln n_j                       order 1
            + s^2/2 (q_i^2) var_j                       order 2, the second-order term of log sum_j exp(s q_i k)
    out_i   = softmax over the tokens of selected tiles (s q_i k) and the other tiles (tail_ij) of v and vm_j

It has no parameters. With all tiles selected, or with tiles of one token, it equals dense attention.

B batch, L tokens, N tiles, H / Hkv heads, D head dim.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from vsa_kernels import block_mean_pool, block_sparse_attn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.layout import BlockOrder, Partition, TileLayout
from vsa.attention.scores import (
    Score,
    mass_scores,
    mean_scores,
    per_head,
    sub_blocks,
    subblock_scores,
    tile_logits,
)
from vsa.attention.selection import select_blocks
from vsa.attention.tiling import Grid, refuse_no_divisor
from vsa.settings import AtLeastOne, validated


@validated
class PooledTail(AttentionMethod):
    """Exact attention to the top-k tiles and to the means of all others, in one softmax; for rows of one video.

    Args:
        tile_thw: tokens per tile along time, height, width.
        partition: cube or a kind of runs, see `TileLayout`.
        block_order: nested or raster, see `TileLayout`.
        order: order of the tail's approximation, 1 or 2, see the top of this file; variances are per channel.
            Order 2 is an experiment.
        score: score that ranks the tiles of a row: mean (mean query times mean key, as in VSA), mass (mean over the
            tile's queries of the softmax of `tail`, the mass that the tail assigns to it) or subblock_lse, see
            `vsa.attention.scores`.
        score_thw: tokens per sub-block of subblock_lse along time, height, width; it divides the tile.
        backend: backend of the fine stage; None chooses by device.
        **layer: see `AttentionMethod`.

    Source: order 1 is the forward of Sol-Attn (arXiv 2607.24027, training-free). LLSA (arXiv 2512.16615) trains it on
    images, with the means of all tiles in the softmax, so that selected tiles count twice. SVG-EAR (arXiv 2603.08982)
    lets the centroids of skipped clusters join in the same way; PISA (arXiv 2602.01077) expands exp itself around a
    skipped block's mean, order 2 its logarithm. Ours are the training with selected tiles excluded, whose output with
    all tiles selected is exactly that of dense attention, order 2 and `mass`.
    """

    selects = True

    def __init__(
        self,
        *,
        tile_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (4, 4, 4),
        partition: Partition = "cube",
        block_order: BlockOrder = "nested",
        order: Literal[1, 2] = 1,
        score: Score = "mean",
        score_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (2, 2, 2),
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        self.tile_thw: Grid = (tile_thw[0], tile_thw[1], tile_thw[2])
        self.partition: Partition = partition
        self.block_order: BlockOrder = block_order
        self.order, self.score, self.backend = order, score, backend
        self.score_thw: Grid = (score_thw[0], score_thw[1], score_thw[2])
        if score == "subblock_lse":
            refuse_no_divisor("score_thw", self.score_thw, tile_thw=self.tile_thw)

    def tiling(self) -> dict[str, Any]:
        own = {"tile_thw": self.tile_thw, "partition": self.partition, "block_order": self.block_order}
        return own | {"more_tiles": [self.score_thw] if self.score == "subblock_lse" else []}

    def prepare(self, layout: TileLayout) -> None:
        if self.score == "subblock_lse":
            layout.derive(sub_blocks, self.score_thw)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        layout = ctx.layout
        ctx.kept(q)
        layout.only_video("attention with a pooled tail")
        blocks = layout.blocks
        tail = tile_logits(q, k, blocks, self.order)
        index = ctx.select(lambda row_topk: select_blocks(self._scores(q, k, tail, layout), row_topk))
        fine, lse = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=self.backend)
        selected = index.to_dense(blocks.num).repeat_interleave(blocks.sizes, dim=2, output_size=layout.num_tokens)
        others = tail.masked_fill(selected, float("-inf"))
        total = torch.cat((lse[..., None], others), dim=-1).logsumexp(-1, keepdim=True)
        v_mean = per_head(block_mean_pool(v, blocks).transpose(1, 2), q.shape[2])
        rest = ((others - total).exp() @ v_mean).transpose(1, 2).to(fine.dtype)
        fine = fine * (lse[..., None] - total).exp().transpose(1, 2).to(fine.dtype)
        if ctx.recorder is not None:
            scores = self._scores(q, k, tail, layout)
            logits = scores * q.shape[-1] ** -0.5 if self.score == "mean" else scores.log()
            ctx.record(self.layer_idx, index, q=q, k=k, fine=fine, tail=rest, scores=logits)
        return {"out": fine + rest}

    def _scores(self, q: Tensor, k: Tensor, tail: Tensor, layout: TileLayout) -> Tensor:
        if self.score == "mass":
            return mass_scores(tail, layout)
        if self.score == "subblock_lse":
            return subblock_scores(q, k, layout, self.score_thw)
        return mean_scores(q, k, layout)

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of the selected tiles (exact when tiles are full) and of every token with every tile; the product with
        the variances in order 2 counts as half a pair."""
        tiles = layout.num_blocks
        tail = tiles * (1 if self.order == 1 else 1.5)
        pairs = layout.num_tokens * (layout.num_tokens * min(topk, tiles) / tiles + tail)
        return pairs + (layout.tiles[self.score_thw].num ** 2 / 2 if self.score == "subblock_lse" else 0)
