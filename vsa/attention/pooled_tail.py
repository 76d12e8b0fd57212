"""Sparse attention with a pooled tail: every tile that is not selected joins the softmax as one key.

With a tile's mean key km_j, mean value vm_j, n_j tokens and the variance var_j of its keys by channel, s = 1/sqrt(D):

    tail_ij = s q_i km_j + ln n_j                       order 1
            + s^2/2 (q_i^2) var_j                       order 2, what is left of the logarithm of sum_j exp(s q_i k)
    out_i   = softmax over the tokens of selected tiles (s q_i k) and the other tiles (tail_ij) of v and vm_j

There are no parameters; with all tiles selected it is dense attention, and so it is with tiles of one token.

B batch, L tokens, N tiles, H / Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from vsa_kernels import block_mean_pool, block_sparse_attn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.layout import BlockOrder, Partition, Segment, TileLayout
from vsa.attention.selection import RowRule, select_blocks
from vsa.attention.tiling import Grid
from vsa.settings import AtLeastOne, checked


@checked
class PooledTail(AttentionMethod):
    """Top-k tiles exactly, all others by their mean, in one softmax; for rows of one video.

    Args:
        tile_thw: tokens per tile along time, height, width.
        partition: cube or hilbert_run, see `TileLayout`.
        block_order: nested or raster, see `TileLayout`.
        order: 1 or 2, see the top of this file; the variance is that of each channel alone.
        score: what ranks the tiles of a row: mean (mean query times mean key, as VSA) or mass (the mean over the tile's
            queries of the softmax of `tail`, the mass that the tail would give it).
        backend: of the fine stage; None picks by device.
        **layer: see `AttentionMethod`.

    Source: forward of Sol-Attn (arXiv 2607.24027) for order 1; its training, order 2 and `mass` are ours.
    """

    def __init__(
        self,
        *,
        tile_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (4, 4, 4),
        partition: Partition = "cube",
        block_order: BlockOrder = "nested",
        order: Literal[1, 2] = 1,
        score: Literal["mean", "mass"] = "mean",
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        self.tile_thw: Grid = (tile_thw[0], tile_thw[1], tile_thw[2])
        self.partition: Partition = partition
        self.block_order: BlockOrder = block_order
        self.order, self.score, self.backend = order, score, backend

    def extra_repr(self) -> str:
        return f"tile_thw={self.tile_thw}, order={self.order}, score={self.score}"

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        return TileLayout.build(
            segments,
            tile_thw=self.tile_thw,
            partition=self.partition,
            block_order=self.block_order,
            device=device,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        layout, topk = ctx.layout, ctx.kept(q)
        layout.only_video("attention with a pooled tail")
        blocks = layout.blocks
        tail = self._tail(q, k, layout)
        if self.score == "mass":
            scores = block_mean_pool(tail.detach().softmax(-1).transpose(1, 2), blocks).transpose(1, 2)
        else:
            q_mean, k_mean = (block_mean_pool(x.detach(), blocks).transpose(1, 2) for x in (q, k))
            scores = q_mean @ _per_head(k_mean, q.shape[2]).transpose(-1, -2)
        index = select_blocks(scores, RowRule(topk=topk))
        fine, lse = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=self.backend)
        selected = index.to_dense(blocks.num).repeat_interleave(blocks.sizes, dim=2, output_size=layout.num_tokens)
        tail = tail.masked_fill(selected, float("-inf"))
        total = torch.cat((lse[..., None], tail), dim=-1).logsumexp(-1, keepdim=True)
        v_mean = _per_head(block_mean_pool(v, blocks).transpose(1, 2), q.shape[2])
        rest = (tail - total).exp() @ v_mean
        out = fine * (lse[..., None] - total).exp().transpose(1, 2).to(fine.dtype) + rest.transpose(1, 2).to(fine.dtype)
        return {"out": out}

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        return parts["out"]

    def pairs(self, layout: TileLayout, topk: int) -> float:
        """Pairs of the selected tiles (exact when tiles are full) and of every token with every tile."""
        tiles = layout.num_blocks
        return layout.num_tokens * (layout.num_tokens * min(topk, tiles) / tiles + tiles)

    def _tail(self, q: Tensor, k: Tensor, layout: TileLayout) -> Tensor:
        """Logits `[B, H, L, N]` of every tile as one key, at least fp32."""
        blocks, scale = layout.blocks, q.shape[-1] ** -0.5
        k_mean = block_mean_pool(k, blocks)
        queries = q.to(k_mean.dtype).transpose(1, 2) * scale
        logits = queries @ _per_head(k_mean.transpose(1, 2), q.shape[2]).transpose(-1, -2)
        if self.order == 2:
            spread = block_mean_pool(k.to(k_mean.dtype).square(), blocks) - k_mean.square()
            spread = _per_head(spread.clamp(min=0).transpose(1, 2), q.shape[2])
            logits = logits + (queries.square() / 2) @ spread.transpose(-1, -2)
        return logits + blocks.sizes.to(logits.dtype).log()


def _per_head(x: Tensor, heads: int) -> Tensor:
    # kv heads `[B, Hkv, N, D]` once for each query head of their group
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
