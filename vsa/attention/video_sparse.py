"""Video sparse attention (VSA): a coarse stage over tiles selects the tiles that the fine stage attends to.

B batch, L query tokens, S kv tokens, H heads, D head dim, Nq / Nkv query / kv tiles, C = H * D model width.

    scores = mean_tile(q) mean_tile(k)^T / sqrt(D)
    coarse = softmax(scores) mean_tile(v)                       one row per query tile
    fine   = softmax(q k^T / sqrt(D)) v                         over the tokens of the top-k tiles of `scores`, or of
                                                                another score of `vsa.attention.scores`
    out    = G_c * coarse + G_f * fine                          gates: linear in the block's hidden states

The selection is a constant to the gradient. Means are over the existing tokens of a tile, and every tile counts as one
key in the coarse softmax whatever its size.

Source: "VSA: Faster Video Diffusion with Trainable Sparse Attention" (arXiv 2505.13389), sections 2.2 and 2.3; where
its text and its published code differ, the code decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vsa_kernels import block_sparse_attn
from vsa_kernels.coarse_fine import coarse_attn, coarse_fine_attn, combine

from vsa.attention.context import AttnContext
from vsa.attention.dense import dense_attn_per_sample, dense_index, text_attn
from vsa.attention.layout import Segment, TileLayout, video_places
from vsa.attention.scores import with_damage_first
from vsa.attention.selecting import SelectingAttention
from vsa.attention.tiling import Grid
from vsa.settings import validated

Backend = Literal["reference", "gather", "triton", "cudnn"]


@validated
class VideoSparseAttention(SelectingAttention):
    """VSA as self-attention of a layer, with gates on the coarse and the fine output.

    Text and cond tokens attend densely to their sample, and every video token attends to them in addition to the
    selected tiles. If all tiles are kept, the fine stage is dense attention.

    Args:
        fine_gate: whether the fine output has a gate (off for finetuning); the coarse output always has one.
        gate_bias: whether gates have a bias; those of FastVideo's MiniMax-H3 checkpoints have none.
        coarse_text: whether the tiles of text and cond tokens are queries and keys of the coarse stage too, as in
            FastVideo's `video_sparse_attn_h3.py`; otherwise these tokens have no coarse output. It never selects them.
        gate_init: initial gates: identity (G_c = 0 and G_f = 1 for any input, so that a layer starts as plain sparse
            attention) or model (weights as the model initialises its linear layers; biases 0 for the coarse and 1 for
            the fine gate). The paper zero-initialises the coarse gate for finetuning and does not state an
            initialisation from scratch.
        gate_activation: none, or tanh of the coarse gate (VSA2), which is then below 1 and still starts at 0.
        backend: backend of `coarse_fine_attn`; None chooses by device, never cudnn, whose results differ in their
            last bits from run to run.
        **layer: see `SelectingAttention`; the paper's best tile_thw is (4, 4, 4).
    """

    def __init__(
        self,
        *,
        fine_gate: bool = True,
        gate_bias: bool = True,
        coarse_text: bool = False,
        gate_init: Literal["identity", "model"] = "identity",
        gate_activation: Literal["none", "tanh"] = "none",
        backend: Backend | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        if fine_gate and not gate_bias:
            raise ValueError("gate_bias=False needs fine_gate=False: without a bias a fine gate cannot start at 1")
        self.fine_gate, self.gate_init, self.gate_activation = fine_gate, gate_init, gate_activation
        self.gate_bias, self.coarse_text, self.backend = gate_bias, coarse_text, backend
        width = self.num_heads * self.head_dim
        self.to_gate_compress = nn.Linear(self.dim, width, bias=gate_bias)
        self.to_gate_fine = nn.Linear(self.dim, width) if fine_gate else None
        self.reset_extra_parameters()

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        layout = super().layout(segments, device)
        if self._has_coarse_text(layout):
            if len(layout.sample_spans) > 1:
                raise ValueError(f"coarse_text takes rows of one sample, got {len(layout.sample_spans)}")
            if layout.device.type != "meta":
                self.prepare(layout)
        return layout

    def prepare(self, layout: TileLayout) -> None:
        super().prepare(layout)
        if self._has_coarse_text(layout):
            layout.derive(video_places)

    def _has_coarse_text(self, layout: TileLayout) -> bool:
        return self.coarse_text and bool(layout.text_spans)

    def extra_modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {"to_gate_compress": self.to_gate_compress}
        if self.to_gate_fine is not None:
            modules["to_gate_fine"] = self.to_gate_fine
        return modules

    def reset_extra_parameters(self) -> None:
        gates = [(self.to_gate_compress, 0.0)] + ([(self.to_gate_fine, 1.0)] if self.to_gate_fine is not None else [])
        for gate, start in gates:
            if gate.bias is not None:
                nn.init.constant_(gate.bias, start)
            if self.gate_init == "identity":
                nn.init.zeros_(gate.weight)

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """Gates `[B, L, H, D]` from x `[B, L, C]`; no RoPE."""
        heads = (self.num_heads, self.head_dim)
        gate = self.to_gate_compress(x)
        gates = {"gate_compress": (gate.tanh() if self.gate_activation == "tanh" else gate).unflatten(-1, heads)}
        if self.to_gate_fine is not None:
            gates["gate_fine"] = self.to_gate_fine(x).unflatten(-1, heads)
        return gates

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """`fine` `[B, L, H, D]` per token and `coarse` `[B, Nv, H, D]` per video tile, with `coarse_text` per tile."""
        layout, topk = ctx.layout, ctx.kept(q)
        video, index = layout.take_video(q), None
        tiles: dict[str, Any] = {"q_blocks": layout.video_blocks, "kv_blocks": layout.blocks}
        if self._has_coarse_text(layout):
            q_blocks = layout.query_tiles[self.tile_thw]
            coarse, logits = coarse_attn(q, k, v, q_blocks=q_blocks, kv_blocks=layout.blocks)
            of_video, candidates = layout.derive(video_places), layout.candidates
            assert candidates is not None
            logits = logits.index_select(2, of_video).masked_fill(~candidates, -math.inf)
            coarse_of_video = coarse.index_select(1, of_video)
        else:
            coarse, logits = coarse_attn(video, k, v, **tiles, candidates=layout.candidates)
            coarse_of_video = coarse
        if ctx.dense or (self.selects and ctx.topk.samples is None and topk >= layout.num_video_tiles):
            fine = dense_attn_per_sample(q, k, v, layout)
            ctx.count_all(q)
        else:
            # ranked by logits, not by probabilities: the same order, without ties where the softmax underflows
            scores, logits_of = logits, lambda scores: scores
            if self.score != "mean" and ctx.ranks:
                scores = self.scores(q, k, v, layout)
                logits, logits_of = self.map_logits(scores), self.map_logits
            how: dict[str, Any] = {"candidates": layout.candidates, "always": layout.always, "logits_of": logits_of}
            index = ctx.select(lambda topk: self.choose(with_damage_first(scores, k, v, layout), topk, ctx, **how))
            fine, _ = block_sparse_attn(video, k, v, index, **tiles, backend=self.backend)
            fine = layout.merge(fine, text_attn(q, k, v, layout))
        if ctx.recorder is not None:
            index = dense_index(layout) if index is None else index
            ctx.record(self.layer_idx, index, q=q, k=k, fine=fine, coarse=coarse_of_video, scores=logits)
        return {"fine": fine, "coarse": coarse}

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        layout, fine = ctx.layout, parts["fine"]
        if "gate_fine" in extra:
            fine = fine * extra["gate_fine"]
        if self._has_coarse_text(layout):
            return combine(fine, parts["coarse"], extra["gate_compress"], None, layout.query_tiles[self.tile_thw])
        video, gate = layout.take_video(fine), layout.take_video(extra["gate_compress"])
        video = combine(video, parts["coarse"], gate, None, layout.video_blocks)
        return layout.merge(video, layout.take_texts(fine))

    def attend_combine(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        """`combine(attend(...))` as one call of the fused operator where possible: unless all tiles are kept, another
        score than `mean` ranks them, another rule selects them, the parts are recorded, text has a coarse output, or
        the selection comes from another pass or differs by sample."""
        ctx = ctx.also_recording(extra)
        layout, topk = ctx.layout, ctx.kept(q)
        fused = self.score == "mean" and self.row_rule is None and ctx.plain_topk and ctx.recorder is None
        if not fused or self._has_coarse_text(layout) or topk >= layout.num_video_tiles:
            return super().attend_combine(q, k, v, extra, ctx)
        gate_fine = extra.get("gate_fine")
        video = coarse_fine_attn(
            layout.take_video(q),
            k,
            v,
            layout.take_video(extra["gate_compress"]),
            None if gate_fine is None else layout.take_video(gate_fine),
            q_blocks=layout.video_blocks,
            kv_blocks=layout.blocks,
            topk=topk,
            candidates=layout.candidates,
            always=layout.always,
            backend=self.backend,
        ).out
        texts = text_attn(q, k, v, layout)
        if gate_fine is not None:
            texts = [text * gate for text, gate in zip(texts, layout.take_texts(gate_fine), strict=True)]
        return layout.merge(video, texts)

    def rows_of(self, part: str) -> Grid | None:
        return self.tile_thw if part == "coarse" else None

    def dense_parts(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        return self.attend(q, k, v, ctx)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        """Output of a dense layer, with the coarse output and the gates."""
        return self.attend_combine(q, k, v, extra, ctx)

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of the fine stage (exact when the tiles are full), of the coarse stage and of another score."""
        rows = layout.blocks if self._has_coarse_text(layout) else layout.video_blocks
        coarse = float(rows.num * layout.blocks.num)
        return coarse + self.score_pairs(layout) + self.kept_pairs(layout, topk)
