"""Sparse attention with a pooled tail: every tile that is not selected joins the softmax as one key.

With a tile's mean key km_j, mean value vm_j, n_j tokens and the variance var_j of its keys by channel, s = 1/sqrt(D):

    tail_ij = s q_i km_j + ln n_j                       order 1
            + s^2/2 (q_i^2) var_j                       order 2, the second-order term of log sum_j exp(s q_i k)
    out_i   = softmax over the tokens of selected tiles (s q_i k) and the other tiles (tail_ij) of v and vm_j

It has no parameters. With all tiles selected, or with tiles of one token, it equals dense attention.

B batch, L tokens, N tiles, H / Hkv heads, D head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from vsa_kernels import block_mean_pool, block_sparse_attn

from vsa.attention.context import AttnContext
from vsa.attention.layout import TileLayout
from vsa.attention.scores import per_head, tile_logits
from vsa.attention.selecting import SelectingAttention
from vsa.settings import validated


@validated
class PooledTail(SelectingAttention):
    """Exact attention to the top-k tiles and to the means of all others, in one softmax; for rows of one video.

    Args:
        order: order of the tail's approximation, 1 or 2, see the top of this file; variances are per channel.
            Order 2 is an experiment.
        backend: backend of the fine stage; None chooses by device.
        **layer: see `SelectingAttention`; the score mass has the logits of the tail, of order 2 too.

    Source: order 1 is the forward of Sol-Attn (arXiv 2607.24027, training-free). LLSA (arXiv 2512.16615) trains it on
    images, with the means of all tiles in the softmax, so that selected tiles count twice. SVG-EAR (arXiv 2603.08982)
    lets the centroids of skipped clusters join in the same way; PISA (arXiv 2602.01077) expands exp itself around a
    skipped block's mean, order 2 its logarithm. Ours are the training with selected tiles excluded, whose output with
    all tiles selected is exactly that of dense attention, order 2 and `mass`.
    """

    def __init__(
        self,
        *,
        order: Literal[1, 2] = 1,
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        self.order, self.backend = order, backend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        layout = ctx.layout
        ctx.kept(q)
        layout.only_video("attention with a pooled tail")
        blocks = layout.blocks
        tail = tile_logits(q, k, blocks, self.order)
        ranked = partial(self.scores, q, k, layout, tail)
        index = ctx.select(lambda topk: self.choose(ranked(), topk, layout, logits_of=self.map_logits))
        fine, lse = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=self.backend)
        selected = index.to_dense(blocks.num).repeat_interleave(blocks.sizes, dim=2, output_size=layout.num_tokens)
        others = tail.masked_fill(selected, float("-inf"))
        total = torch.cat((lse[..., None], others), dim=-1).logsumexp(-1, keepdim=True)
        v_mean = per_head(block_mean_pool(v, blocks).transpose(1, 2), q.shape[2])
        rest = ((others - total).exp() @ v_mean).transpose(1, 2).to(fine.dtype)
        fine = fine * (lse[..., None] - total).exp().transpose(1, 2).to(fine.dtype)
        if ctx.recorder is not None:
            logits = self.map_logits(ranked())
            ctx.record(self.layer_idx, index, q=q, k=k, fine=fine, tail=rest, scores=logits)
        return {"out": fine + rest}

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of the selected tiles (exact when tiles are full) and of every token with every tile; the product with
        the variances in order 2 counts as half a pair, and so does one of a score; `mass` takes those of the tail."""
        tiles = layout.num_blocks
        tail = tiles * (1 if self.order == 1 else 1.5)
        pairs = layout.num_tokens * (layout.num_tokens * min(topk, tiles) / tiles + tail)
        return pairs + (0 if self.score == "mass" else self.score_pairs(layout))
