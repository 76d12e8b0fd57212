"""SpargeAttn as self-attention of a layer: training-free, without parameters.

    first stage     selects the kv blocks of each query block, see `vsa.attention.sparge.mask`
    second stage    skips products with values of negligible weight, see `vsa_kernels.skipping_attn`

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, block_sparse_attn, skipping_attn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.full import text_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.attention.scores import with_damage_first
from vsa.attention.selection import RowRule, Shares, sparge_top_p
from vsa.attention.sparge.mask import BlockStatistics, block_statistics, first_stage
from vsa.attention.sparge.tuned import HeadSettings, Tuned, parse_tuned, read_tuned
from vsa.settings import AtLeastOne, NonPositive, PositiveShare, validated

SLICES = 4
"""Slices of a query block that skip separately; the warps of the paper's kernel (c_w)."""


class PerHead(NamedTuple):
    """Hyperparameters of the heads of a layer, one number for all heads or a tensor `[H]`; threshold None: off."""

    rule: RowRule | Shares
    theta: float | Tensor
    threshold: float | Tensor | None


@validated
class SpargeAttention(AttentionMethod):
    """SpargeAttn: query blocks attend to the kv blocks that hold a share tau of the softmax over block means.

    Their number depends on the data, so `topk` and `sparsity` apply with rule=topk only, where a row keeps the best
    `topk` similar blocks. This is the second interface of the paper's code, which keeps max(1, int(share * blocks))
    blocks and ignores similarity; here the count follows from the sparsity settings, ceil((1 - sparsity) * blocks).

    Training-free: the mask is a constant to the gradient. A call that needs gradients is an error unless
    `allow_training` is set, and then skips the second stage.

    Args:
        q_tokens: tokens of a query block.
        kv_tokens: tokens of a kv block; one of the two divides the other. They may differ in rows of one video only.
        order: order of the tokens before they are divided into blocks: raster, or hilbert, a space-filling curve that
            keeps neighbours together.
        rule: selection by share (cdf, with tau) or by count (topk).
        tau: largest share of the softmax that a row keeps; 1 is dense attention. The default is that of the code.
        theta: similarity of a block's tokens below which the block is always computed; negative: never; null: the
            code's 0.6 with rule=cdf, -0.1 with rule=topk.
        threshold: lambda: a slice of a query block's rows skips a kv block's values if all weights there are below
            exp(lambda) times the largest of their row so far; null: nothing is skipped.
        keeps_sum: whether skipped weights stay in the softmax denominator (paper) or not (code).
        tuned: file of `vsa tune-sparge`, or its content: tau, theta and threshold of each layer and head, which replace
            the three above; its blocks and order must equal those given here.
        allow_training: whether gradients are allowed, for which the mask is a constant.
        backend: backend of attention; null chooses by device.
        **layer: see `AttentionMethod`.

    Source: Zhang et al., "SpargeAttn" (arXiv 2502.18137). Not here: its INT8 attention (q and k in INT8 and, on Ada and
    Hopper, v in FP8; here products have the dtype of q, k, v), which is part of the published speed, and causal
    attention.
    """

    training_free = "sparge"
    takes_query_parts = True

    def __init__(
        self,
        *,
        q_tokens: AtLeastOne = 128,
        kv_tokens: AtLeastOne = 64,
        order: Literal["raster", "hilbert"] = "hilbert",
        rule: Literal["cdf", "topk"] = "cdf",
        tau: PositiveShare = 0.98,
        theta: float | None = None,
        threshold: NonPositive | None = None,
        keeps_sum: bool = True,
        tuned: str | Mapping[str, Any] | None = None,
        allow_training: bool = False,
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        if max(q_tokens, kv_tokens) % min(q_tokens, kv_tokens):
            raise ValueError(f"one of q_tokens={q_tokens} and kv_tokens={kv_tokens} must divide the other")
        if (threshold is not None or tuned is not None) and q_tokens % SLICES:
            raise ValueError(f"q_tokens={q_tokens} must be a multiple of {SLICES}, the slices of the second stage")
        if tuned is not None and rule == "topk":
            label = tuned if isinstance(tuned, str) else "..."
            raise ValueError(f"rule=topk has no tau to take from tuned={label}")
        if threshold is not None and backend == "gather":
            raise ValueError(f"threshold={threshold} needs backend reference, triton or null, got gather")
        self.q_tokens, self.kv_tokens, self.order, self.rule = q_tokens, kv_tokens, order, rule
        self.selects, self.predicts = rule == "topk", rule == "cdf"
        self.tau, self.theta = tau, {"cdf": 0.6, "topk": -0.1}[rule] if theta is None else float(theta)
        self.threshold, self.keeps_sum = threshold, keeps_sum
        # a compiled block cannot construct a rule
        self.share = sparge_top_p(tau)
        self.allow_training, self.backend = allow_training, backend
        self.path = tuned if isinstance(tuned, str | None) else "tuned"
        self.places = (Path(tuned),) if isinstance(tuned, str) else ()
        self.file: Tuned | None = None
        if tuned is not None:
            assert self.path is not None
            self.needs_all_heads = f"tuned={self.path}"
            self.file = read_tuned(tuned) if isinstance(tuned, str) else parse_tuned(tuned, self.path)
            blocks = {"q_tokens": q_tokens, "kv_tokens": kv_tokens, "order": order}
            self.file.refuse_other(self.path, **blocks, keeps_sum=keeps_sum)
            skips = any(head.threshold is not None for heads in self.file.found.values() for head in heads)
            if skips and backend == "gather":
                raise ValueError(f"thresholds of {self.path} need backend reference, triton or null, got gather")

    def setting(self, name: str) -> Any:
        if name == "tuned":
            # the content instead of the path, which an export to another place could not follow
            return None if self.file is None else self.file.values()
        return getattr(self, name)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tuned={self.path}"

    def check_model(self, num_layers: int) -> None:
        if self.file is not None:
            assert self.path is not None
            self.file.refuse_other(self.path, layers=num_layers)
            self._tuned()

    def _tuned(self) -> tuple[HeadSettings, ...] | None:
        """Tuned settings of the layer's heads, None without a file."""
        if self.file is None:
            return None
        assert self.path is not None
        self.file.refuse_other(self.path, heads=self.num_heads, head_dim=self.head_dim)
        if self.layer_idx not in self.file.found:
            raise ValueError(
                f"{self.path} has no layer {self.layer_idx}, but {len(self.file.found)} of {self.file.layers}"
            )
        return tuple(self.file.found[self.layer_idx])

    def tiling(self) -> dict[str, Any]:
        partition = "hilbert_run" if self.order == "hilbert" else "raster_run"
        return {"tile_thw": (1, 1, self.q_tokens), "kv_tile_thw": (1, 1, self.kv_tokens), "partition": partition}

    def statistics(self, q: Tensor, k: Tensor, layout: TileLayout) -> BlockStatistics:
        """Scores and similarities of the blocks of a row of tokens q, k `[B, L, H, D]` in the layout's order."""
        return block_statistics(
            layout.take_video(q),
            k,
            layout.video_blocks,
            layout.kv_blocks,
            samples=layout.sample_spans,
            candidates=layout.candidates,
            always=layout.always,
        )

    def sparse(
        self, q: Tensor, k: Tensor, v: Tensor, index: BlockIndex, layout: TileLayout, threshold: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention to the listed blocks.

        Args:
            q: `[B, Lv, H, D]` queries of the video tokens.
            k: `[B, L, Hkv, D]` keys.
            v: `[B, L, Hkv, D]` values.
            index: selection of `first_stage`.
            layout: layout of the row.
            threshold: `[H]` thresholds of the second stage, None without one.

        Returns:
            Output `[B, Lv, H, D]`, and the counts of `skipping_attn`, None without a second stage.
        """
        blocks: dict[str, Any] = {"q_blocks": layout.video_blocks, "kv_blocks": layout.kv_blocks}
        if threshold is None:
            return block_sparse_attn(q, k, v, index, **blocks, backend=self.backend)[0], None
        options: dict[str, Any] = {"slice_rows": self.q_tokens // SLICES, "keeps_sum": self.keeps_sum}
        # skipping_attn has no gather backend: its reference already gathers one block at a time
        return skipping_attn(q, k, v, index, **blocks, thresholds=threshold, **options, backend=self.backend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        layout, training = ctx.layout, self.trains(q, k, v)
        ctx.kept(q)
        per_head = self._per_head(q.device)
        statistics = self.statistics(q, k, layout) if ctx.ranks else None

        def choose(topk: KeptTiles) -> BlockIndex:
            assert statistics is not None
            known = replace(statistics, scores=with_damage_first(statistics.scores, k, v, layout))
            return first_stage(known, topk if self.rule == "topk" else per_head.rule, per_head.theta)

        index = ctx.select(choose)
        threshold = None if training or ctx.dense else _of_heads(per_head.threshold, q)
        video, skipped = self.sparse(layout.take_video(q), k, v, index, layout, threshold)
        out = layout.merge(video, text_attn(q, k, v, layout))
        scores = None if statistics is None else statistics.scores
        ctx.record(self.layer_idx, index, q=q, k=k, fine=out, scores=scores, skipped=skipped)
        return {"out": out}

    @property
    def expected_share(self) -> float:  # type: ignore[override]
        """Share of the blocks that tuned settings kept when they were measured; else all, an upper bound."""
        heads = self._tuned()
        return 1.0 if heads is None else 1 - math.fsum(head.sparsity for head in heads) / len(heads)

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of block means and of attention with `topk` blocks, which is exact with rule=topk when blocks are full
        and none is forced."""
        total = float(layout.video_blocks.num * layout.kv_blocks.num)
        for sample, (start, stop) in enumerate(layout.sample_spans):
            text = sum(b - a for a, b, owner in layout.text_spans if owner == sample)
            video, blocks = stop - start - text, layout.video_tiles[sample]
            share = min(topk, blocks) / blocks if blocks else 1.0
            total += video * (video * share + text) + text * (video + text)
        return total

    def _per_head(self, device: torch.device) -> PerHead:
        heads = self._tuned()
        return PerHead(self.share, self.theta, self.threshold) if heads is None else per_head_tensors(heads, device)


@lru_cache(maxsize=1024)
def per_head_tensors(heads: tuple[HeadSettings, ...], device: torch.device) -> PerHead:
    """Settings of a layer's heads as tensors, cached, because a copy in every call would wait for the device."""
    with torch.inference_mode(False):
        tau, theta = (
            torch.tensor([getattr(head, name) for head in heads], dtype=torch.float64, device=device)
            for name in ("tau", "theta")
        )
        off = all(head.threshold is None for head in heads)
        bars = [-math.inf if head.threshold is None else head.threshold for head in heads]
        bar = None if off else torch.tensor(bars, dtype=torch.float64, device=device)
        return PerHead(Shares(tau), theta, bar)


def _of_heads(threshold: float | Tensor | None, q: Tensor) -> Tensor | None:
    if threshold is None or isinstance(threshold, Tensor):
        return threshold
    return torch.full((q.shape[2],), threshold, dtype=torch.float32, device=q.device)
