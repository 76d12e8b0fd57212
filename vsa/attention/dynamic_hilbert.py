"""Dynamic sparse attention along a Hilbert curve (DFSAttn): blocks of the curve select blocks by scores of sub-blocks.

With mean queries qm and keys km of sub-blocks, s = 1/sqrt(D), a query block i and a key block j:

    A[u, w] = softmax over all sub-blocks w of  s qm_u km_w
    S[i, j] = sum of A[u, w] over the sub-blocks u of i and w of j
    out     = softmax(q k^T / sqrt(D)) v                            over the tokens of the top-k blocks of S

Sub-blocks resolve differences that the mean of a whole block averages out; with one sub-block per block, S ranks blocks
like the product of their means. The paper's budget, refreshes and dense first steps are a denoising plan:
`denoising=dfs`.

B batch, L tokens, H heads, D head dim, Nv / N video / all blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, block_sparse_attn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.dense import dense_attn_per_sample, dense_index, text_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Partition, Segment, TileLayout
from vsa.attention.scores import padded_sub_blocks, sub_blocks, subblock_scores, with_damage_first
from vsa.attention.selection import select_blocks
from vsa.attention.tiling import Grid
from vsa.settings import AtLeastOne, validated

Order = Literal["raster", "block3d", "hilbert2d", "hilbert"]
_PARTITIONS: dict[Order, Partition] = {
    "raster": "raster_run",
    "block3d": "block3d_run",
    "hilbert2d": "hilbert2d_run",
    "hilbert": "hilbert_run",
}


@validated
class DynamicHilbertAttention(AttentionMethod):
    """DFSAttn as self-attention of a layer: training-free, without parameters.

    Blocks are runs of `tokens` tokens of a video, of which only the last may be shorter; `topk` counts blocks. Text and
    cond tokens have their own blocks, which are visible to every video query, and attend densely to their sample.

    Args:
        tokens: tokens of a block of queries or keys.
        sub_tokens: tokens of a sub-block, divides `tokens`; the same number as `tokens` means no sub-blocks. The paper
            tries 16, 32 and 64.
        order: order of the tokens: hilbert (3-D curve), hilbert2d (frame after frame along a 2-D curve), block3d (cubes
            of 4 x 4 x 4 tokens, raster inside) or raster.
        padding: scores of a short last block: masked (means over the existing tokens, empty sub-blocks left out) or
            zeros (the block is padded with zero tokens, which shrink the means and take part in the softmax, as in the
            paper's code). Attention itself never sees padding.
        text_budget: within (text blocks count among the `topk`, which leaves at least one video block; with several
            samples in a row, the largest number of text blocks of a sample counts) or exempt (text blocks are extra).
        allow_training: whether gradients are allowed, for which the selection is a constant.
        backend: backend of `block_sparse_attn`; null chooses by device.
        **layer: see `AttentionMethod`.

    Source: DFSAttn, eqs. 11 and 12 and its public code. VSA2 (arXiv 2609.32882) ranks cubes by this score, up to a
    factor. The code's curve is Skilling's, which jumps except in cubes of 2^n; here it is gilbert3d's, whose
    consecutive tokens touch in any box (`vsa.attention.hilbert`). In the code a block may begin in the video and end in
    the text, and the budget is a share of all blocks; here it is a share of the video blocks.
    """

    selects = True
    training_free = "dynamic_hilbert"
    takes_query_parts = True

    def __init__(
        self,
        *,
        tokens: AtLeastOne = 128,
        sub_tokens: AtLeastOne = 16,
        order: Order = "hilbert",
        padding: Literal["masked", "zeros"] = "masked",
        text_budget: Literal["within", "exempt"] = "within",
        allow_training: bool = False,
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        if tokens % sub_tokens:
            raise ValueError(f"sub_tokens={sub_tokens} must divide tokens={tokens}")
        self.tokens, self.sub_tokens = tokens, sub_tokens
        self.order: Order = order
        self.padding: Literal["masked", "zeros"] = padding
        self.text_budget = text_budget
        self.allow_training = allow_training
        self.backend = backend

    def tiling(self) -> dict[str, Any]:
        partition = _PARTITIONS[self.order]
        return {"tile_thw": (1, 1, self.tokens), "more_tiles": [self._sub_thw], "partition": partition}

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        layout = super().layout(segments, device)
        if layout.device.type != "meta":
            self.prepare(layout)
        return layout

    def prepare(self, layout: TileLayout) -> None:
        layout.derive(sub_blocks, self._sub_thw)
        layout.derive(padded_sub_blocks, self._sub_thw)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        self.trains(q, k, v)
        layout, topk = ctx.layout, ctx.kept(q)
        scores = None
        if ctx.topk.samples is None and topk >= layout.num_video_tiles:
            out = dense_attn_per_sample(q, k, v, layout)
            index = dense_index(layout) if ctx.recorder is not None else None
        else:
            scores = ranked = self.scores(q, k, layout) if ctx.ranks else None
            index = ctx.select(lambda topk: self._select(with_damage_first(ranked, k, v, layout), topk, layout))
            blocks: dict[str, Any] = {"q_blocks": layout.video_blocks, "kv_blocks": layout.blocks}
            video = block_sparse_attn(layout.take_video(q), k, v, index, **blocks, backend=self.backend)[0]
            out = layout.merge(video, text_attn(q, k, v, layout))
        if index is not None:
            ctx.record(self.layer_idx, index, q=q, k=k, fine=out, scores=None if scores is None else scores.log())
        return {"out": out}

    def scores(self, q: Tensor, k: Tensor, layout: TileLayout) -> Tensor:
        """Scores `[B, H, Nv, N]`: S of the top of this file as a mean over the sub-blocks of i; 0 for text blocks.

        Args:
            q, k: tile-major `[B, L, H, D]`, `[B, L, Hkv, D]`.
            layout: a layout of this method.
        """
        return subblock_scores(q, k, layout, self._sub_thw, self.padding)

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of the selected blocks (exact when they are full) and of text, plus half the pairs of sub-blocks."""
        topk = self._video_topk(KeptTiles.of(topk), layout).count
        total = 0.0
        for sample, (start, stop) in enumerate(layout.sample_spans):
            text = sum(b - a for a, b, owner in layout.text_spans if owner == sample)
            video, tiles = stop - start - text, layout.video_tiles[sample]
            selected_keys = video * min(topk, tiles) / tiles if tiles else 0.0
            total += video * (selected_keys + text) + text * (video + text)
        return total + layout.tiles[self._sub_thw].num ** 2 / 2

    @property
    def _sub_thw(self) -> Grid:
        return 1, 1, self.sub_tokens

    def _select(self, scores: Tensor, topk: KeptTiles, layout: TileLayout) -> BlockIndex:
        return select_blocks(scores, self._video_topk(topk, layout), candidates=layout.candidates, always=layout.always)

    def _video_topk(self, topk: KeptTiles, layout: TileLayout) -> KeptTiles:
        """Video blocks of a top-k; a top-k of all blocks is not reduced by the text."""
        return topk.less(self._text_tiles(layout), all_tiles=layout.num_video_tiles)

    def _text_tiles(self, layout: TileLayout) -> int:
        """Text blocks that count among the top-k."""
        if self.text_budget == "exempt":
            return 0
        own = [0] * len(layout.sample_spans)
        for start, stop, sample in layout.text_spans:
            own[sample] += -(-(stop - start) // self.tokens)
        return max(own)
