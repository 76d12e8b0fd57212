"""FG-Attn as self-attention of a layer: masks of small tiles, computed from the tile means of each q and k.

    A = softmax over kv tiles j of  mean(q of tile i) mean(k of tile j) / sqrt(D)

A query tile of `q_tokens` keeps the smallest set of kv tiles of `kv_tokens` whose mass is at least `top_p`. The matrix
unit needs 128 rows and columns to be efficient: R = 128 / q_tokens query tiles with similar sets are computed together
over the union of their sets, and the keys of the listed tiles are gathered from memory.

B batch, L tokens, H heads, D head dim, Nq / Nkv query / kv tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, TileGroups, block_mean_pool, block_sparse_attn, gathered_attn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.dense import text_attn
from vsa.attention.fine_grained.grouping import Attend, Merge, plan_groups
from vsa.attention.layout import TileLayout
from vsa.attention.scores import per_head, with_damage_first
from vsa.attention.selection import RowRule, select_blocks
from vsa.attention.stats import density
from vsa.settings import PositiveShare, validated

_ROWS = 128
# scores of the heads that are handled at a time; the row rule sorts them and needs several times this memory
_SCORES = 1 << 26


@validated
class FineGrainedAttention(AttentionMethod):
    """FG-Attn: every query tile attends to the fewest kv tiles that hold the share `top_p` of its attention mass.

    Training-free and without parameters; the mask is a constant to the gradient. Text and cond tokens are visible to
    every token of their sample and attend to all of it; the share of a query tile is taken over the video tiles.

    Args:
        q_tokens: consecutive tokens of a query tile; the last tile may be shorter.
        kv_tokens: consecutive tokens of a kv tile.
        top_p: share of the attention mass that is kept, the tile that reaches it included; 1 keeps all tiles.
        merge: grouping of the query tiles, xor or consecutive, see `plan_groups`.
        attended: kv tiles that a query attends to, union or tile, see `plan_groups`.
        order: order of the tokens: raster, as published, or hilbert, along a space-filling curve.
        backend: backend of grouping and attention, reference or triton; null chooses by device.
        allow_training: whether gradients are allowed, computed by `block_sparse_attn` with the mask as a constant.
        **layer: see `AttentionMethod`.

    Source: FG-Attn (arXiv 2509.16518v2), sections 5.2 and 5.3; for order and union of the groups see `plan_groups`.
    """

    predicts = True
    training_free = "fine_grained"

    def __init__(
        self,
        *,
        q_tokens: Literal[16, 32, 64, 128] = 64,
        kv_tokens: Literal[1, 2, 4, 8, 16, 32, 64, 128] = 64,
        top_p: PositiveShare = 0.9,
        merge: Merge = "xor",
        attended: Attend = "union",
        order: Literal["raster", "hilbert"] = "raster",
        backend: Literal["reference", "triton"] | None = None,
        allow_training: bool = False,
        **layer: Any,
    ):
        super().__init__(**layer)
        self.q_tokens, self.kv_tokens = q_tokens, kv_tokens
        self.merge: Merge = merge
        self.attended: Attend = attended
        self.order, self.backend, self.allow_training = order, backend, allow_training
        self.top_p, self.rule = top_p, RowRule(top_p=top_p, crossing="keep")

    def tiling(self) -> dict[str, Any]:
        partition = "hilbert_run" if self.order == "hilbert" else "raster_run"
        return {"tile_thw": (1, 1, self.q_tokens), "kv_tile_thw": (1, 1, self.kv_tokens), "partition": partition}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        layout = ctx.layout
        ctx.kept(q)
        training = self.trains(q, k, v)
        video = layout.take_video(q)
        index = ctx.select(lambda _: self._select(video, k, v, layout))
        groups = self._groups(index, layout)
        how: dict[str, Any] = {"q_blocks": layout.video_blocks, "kv_blocks": layout.kv_blocks}
        if training or ctx.listed is not None:
            attended = groups.tile_index(layout.video_blocks.num, layout.kv_blocks.num)
            ctx.count(attended)
        if training:
            out = block_sparse_attn(video, k, v, attended, **how, backend=self.backend)[0]
        else:
            out = gathered_attn(video, k, v, groups, **how, backend=self.backend)[0]
        out = layout.merge(out, text_attn(q, k, v, layout))
        if ctx.recorder is not None:
            union = replace(groups, kv_members=None).tile_index(layout.video_blocks.num, layout.kv_blocks.num)
            attended = union if self.attended == "union" else index
            shares = {f"{name}_density": density(lists, **how) for name, lists in (("kept", index), ("merged", union))}
            ctx.record(self.layer_idx, attended, q=q, k=k, fine=out, scores=mean_logits(video, k, layout), **shares)
        return {"out": out}

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs with `topk` tiles after merging; all of them is an upper bound, since the number depends on q and k.

        A recorder receives the shares `[B, H]` of all pairs that a call keeps (`kept_density`) and, after merging,
        computes (`merged_density`).
        """
        total, share = 0.0, min(topk / layout.num_video_tiles, 1.0) if layout.num_video_tiles else 1.0
        for sample, (start, stop) in enumerate(layout.sample_spans):
            video = stop - start - sum(b - a for a, b, owner in layout.text_spans if owner == sample)
            total += (stop - start) ** 2 - (1 - share) * video**2
        return total

    def _select(self, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout) -> BlockIndex:
        """The kv tiles that every video query tile keeps, `[B, H, Nq, Nkv]`, computed for some heads at a time."""
        rows = q.shape[0] * layout.video_blocks.num * layout.kv_blocks.num
        group = q.shape[2] // k.shape[2]
        step = max(1, _SCORES // max(1, rows * group))
        parts = []
        for first in range(0, k.shape[2], step):
            some_k, some_v = (x[:, :, first : first + step] for x in (k, v))
            scores = mean_logits(q[:, :, first * group : (first + step) * group], some_k, layout)
            ranked = with_damage_first(scores, some_k, some_v, layout)
            parts.append(select_blocks(ranked, self.rule, candidates=layout.candidates, always=layout.always))
        if len(parts) == 1:
            return parts[0]
        lists, counts = (torch.cat([getattr(x, name) for x in parts], 1) for name in ("kv_indices", "kv_num_blocks"))
        return BlockIndex(kv_indices=lists, kv_num_blocks=counts)

    def _query_tiles(self, layout: TileLayout) -> list[int]:
        """Number of video query tiles of each sample of a row, in order."""
        counts: dict[int, int] = {}
        for segment in layout.segments:
            own = -(-segment.num_tokens // self.q_tokens) if segment.is_video else 0
            counts[segment.sample] = counts.get(segment.sample, 0) + own
        return list(counts.values())

    def _groups(self, index: BlockIndex, layout: TileLayout) -> TileGroups:
        return plan_groups(
            index,
            layout.kv_blocks.num,
            _ROWS // self.q_tokens,
            merge=self.merge,
            attend=self.attended,
            samples=self._query_tiles(layout) if len(layout.sample_spans) > 1 else (),
            backend=self.backend,
        )


def mean_logits(q: Tensor, k: Tensor, layout: TileLayout) -> Tensor:
    """Logits `[B, H, Nq, Nkv]` of the means of video query tiles and of kv tiles, at least fp32, without a gradient.

    Args:
        q: `[B, Lv, H, D]` video queries.
        k: `[B, L, Hkv, D]` keys.
        layout: layout of the row.
    """
    q_mean = block_mean_pool(q.detach(), layout.video_blocks).transpose(1, 2) * q.shape[-1] ** -0.5
    k_mean = block_mean_pool(k.detach(), layout.kv_blocks).transpose(1, 2)
    return q_mean @ per_head(k_mean, q.shape[2]).transpose(-1, -2)
