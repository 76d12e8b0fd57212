"""Video sparse attention (VSA): a coarse stage over tiles chooses the tiles that the fine stage attends to.

B batch, L query tokens, S kv tokens, H heads, D head dim, Nq / Nkv query / kv tiles, C = H * D model width.

    scores = mean_tile(q) mean_tile(k)^T / sqrt(D)
    coarse = softmax(scores) mean_tile(v)                       one row per query tile
    fine   = softmax(q k^T / sqrt(D)) v                         over the tokens of the top-k tiles of `scores`
    out    = G_c * coarse + G_f * fine                          gates: linear in the block's hidden states

The selection is a constant to the gradient. Means are over the tokens a tile really has, and every tile has one
vote in the coarse softmax whatever its size.

Source: "VSA: Faster Video Diffusion with Trainable Sparse Attention" (arXiv 2505.13389), sections 2.2 and 2.3; where
its text and its published code differ, the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn, select_topk
from vsa_kernels.coarse_fine import coarse_attn, coarse_fine_attn
from vsa_kernels.dispatch import resolve_backend

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext, Recorder
from vsa.attention.full import dense_attn, dense_attn_per_sample
from vsa.attention.layout import BlockOrder, Partition, Segment, TileLayout, TileSelection
from vsa.settings import AtLeastOne, checked


class VideoSparseOutput(NamedTuple):
    """Result of `video_sparse_attn`.

    Args:
        fine: `[B, L, H, D]` output per query token.
        coarse: `[B, Nq, H, D]` output per query tile.
        scores: `[B, H, Nq, Nkv]` coarse logits.
        index: the selected tiles; None when all of them are kept.
    """

    fine: Tensor
    coarse: Tensor
    scores: Tensor
    index: BlockIndex | None


def video_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    topk: int,
    scale: float | None = None,
    backend: str | None = None,
) -> VideoSparseOutput:
    """Coarse and fine stage of VSA where every kv tile may be selected; L and S may differ.

    With `topk` at or above the number of kv tiles the fine stage is dense attention.

    Args:
        q: `[B, L, H, D]` queries, tile-major, RoPE and qk-norm applied.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        q_blocks: query tiles.
        kv_blocks: kv tiles.
        topk: kv tiles per query tile and head.
        scale: factor on the scores; None: `1 / sqrt(D)`.
        backend: of `block_sparse_attn`; None picks by device.

    Raises:
        ValueError: topk below 1.

    Source: VSA, section 2.2.
    """
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    coarse, scores = coarse_attn(q, k, v, q_blocks=q_blocks, kv_blocks=kv_blocks, scale=scale)
    if topk >= kv_blocks.num:
        return VideoSparseOutput(dense_attn(q, k, v, scale), coarse, scores, None)
    # scores, not probabilities: the same order without ties where the softmax underflows
    index = select_topk(scores, topk)
    fine, _ = block_sparse_attn(q, k, v, index, q_blocks=q_blocks, kv_blocks=kv_blocks, scale=scale, backend=backend)
    return VideoSparseOutput(fine, coarse, scores, index)


@checked
class VideoSparseAttention(AttentionMethod):
    """VSA as a layer's self-attention, with gates on the coarse and the fine output.

    Text and cond tokens have no coarse output and attend densely to their sample; every video token sees them on
    top of the tiles it selects. With as many tiles kept as there are, the fine stage is dense attention.

    Args:
        dim: model width C, equal to num_heads * head_dim.
        num_heads: H.
        head_dim: D.
        layer_idx: position of the layer in the model.
        tile_thw: tokens per tile along time, height, width; the paper's best is (4, 4, 4).
        partition: cube or hilbert_run, see `TileLayout`.
        block_order: nested or raster, see `TileLayout`.
        fine_gate: False leaves the fine output as it is (finetuning); the coarse gate is always there.
        gate_init: identity (G_c = 0 and G_f = 1 for any input: a layer starts as plain sparse attention) or model
            (weights as the model initialises its linear layers; biases 0 for the coarse and 1 for the fine gate).
            The paper zero-initialises the coarse gate to finetune and does not say how to start from scratch.
        backend: of `block_sparse_attn`; None picks by device. With `triton` the layer is one op, but for a row with
            text or several samples, a recorder, or all tiles kept.

    Raises:
        ValueError: dim is not num_heads * head_dim, or an unknown gate_init.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        head_dim: int,
        layer_idx: int = 0,
        tile_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (4, 4, 4),
        partition: Partition = "cube",
        block_order: BlockOrder = "nested",
        fine_gate: bool = True,
        gate_init: Literal["identity", "model"] = "identity",
        backend: Literal["reference", "gather", "triton"] | None = None,
    ):
        super().__init__(dim=dim, num_heads=num_heads, head_dim=head_dim, layer_idx=layer_idx)
        if dim != num_heads * head_dim:
            raise ValueError(f"dim must be num_heads * head_dim, got {dim} and {num_heads} * {head_dim}")
        self.tile_thw = tuple(tile_thw)
        self.partition: Partition = partition
        self.block_order: BlockOrder = block_order
        self.gate_init = gate_init
        self.backend = backend
        self.to_gate_compress = nn.Linear(dim, dim)
        self.to_gate_fine = nn.Linear(dim, dim) if fine_gate else None
        self.reset_extra_parameters()

    def extra_repr(self) -> str:
        return f"tile_thw={self.tile_thw}, partition={self.partition}, block_order={self.block_order}"

    def extra_modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {"to_gate_compress": self.to_gate_compress}
        if self.to_gate_fine is not None:
            modules["to_gate_fine"] = self.to_gate_fine
        return modules

    def reset_extra_parameters(self) -> None:
        gates = [(self.to_gate_compress, 0.0)] + ([(self.to_gate_fine, 1.0)] if self.to_gate_fine is not None else [])
        for gate, start in gates:
            nn.init.constant_(gate.bias, start)
            if self.gate_init == "identity":
                nn.init.zeros_(gate.weight)

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        return TileLayout.build(
            segments,
            tile_thw=self.tile_thw,
            partition=self.partition,
            block_order=self.block_order,
            device=device,
        )

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """Gates `[B, L, H, D]` from x `[B, L, C]`; no activation, no RoPE."""
        heads = (self.num_heads, self.head_dim)
        gates = {"gate_compress": self.to_gate_compress(x).unflatten(-1, heads)}
        if self.to_gate_fine is not None:
            gates["gate_fine"] = self.to_gate_fine(x).unflatten(-1, heads)
        return gates

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """`fine` `[B, L, H, D]` per token and `coarse` `[B, Nv, H, D]` per video tile."""
        layout, topk = ctx.layout, _checked_topk(q, ctx)
        if layout.selection is None:
            blocks = layout.blocks
            out = video_sparse_attn(q, k, v, q_blocks=blocks, kv_blocks=blocks, topk=topk, backend=self.backend)
        else:
            out = self._attend_mixed(q, k, v, layout, layout.selection, topk)
        if ctx.recorder is not None:
            self._record(q, k, out, ctx)
        return {"fine": out.fine, "coarse": out.coarse}

    def _attend_mixed(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, rule: TileSelection, topk: int
    ) -> VideoSparseOutput:
        """Rows with text or several samples: restricted selection, dense text queries."""
        q_video, q_blocks, kv_blocks = layout.take_video(q), layout.video_blocks, layout.blocks
        coarse, scores = coarse_attn(q_video, k, v, q_blocks=q_blocks, kv_blocks=kv_blocks, candidates=rule.candidates)
        if topk >= layout.num_video_tiles:
            return VideoSparseOutput(dense_attn_per_sample(q, k, v, layout), coarse, scores, None)
        # a row of a smaller sample keeps all of its candidates
        index = select_topk(scores, topk, candidates=rule.candidates, always=rule.always)
        fine, _ = block_sparse_attn(q_video, k, v, index, q_blocks=q_blocks, kv_blocks=kv_blocks, backend=self.backend)
        texts = []
        for start, stop, sample in layout.text_spans:
            first, last = layout.sample_spans[sample]
            texts.append(dense_attn(q[:, start:stop], k[:, first:last], v[:, first:last]))
        return VideoSparseOutput(layout.merge(fine, texts), coarse, scores, index)

    def _record(self, q: Tensor, k: Tensor, out: VideoSparseOutput, ctx: AttnContext) -> None:
        index, rule = out.index, ctx.layout.selection
        if index is None:
            num = ctx.layout.num_blocks
            seen = torch.ones(num, num, dtype=torch.bool, device=out.fine.device)
            if rule is not None:
                seen = rule.candidates if rule.always is None else rule.candidates | rule.always
            index = BlockIndex.from_dense(seen[None, None])
        assert ctx.recorder is not None
        # references, not copies: what a recorder keeps stays in memory
        tensors = {"q": q, "k": k, "fine": out.fine, "coarse": out.coarse, "scores": out.scores}
        ctx.recorder(
            self.layer_idx,
            {
                **{name: tensor.detach() for name, tensor in tensors.items()},
                "kv_indices": index.kv_indices,
                "kv_num_blocks": index.kv_num_blocks,
            },
        )

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        layout, fine, coarse = ctx.layout, parts["fine"], parts["coarse"]
        if "gate_fine" in extra:
            fine = fine * extra["gate_fine"]
        video, gate = layout.take_video(fine), layout.take_video(extra["gate_compress"])
        if layout.video_slots is None:
            # equal tiles: broadcast, so that backward keeps one coarse row per tile and not one per token
            tiles = (-1, layout.video_blocks.max_size)
            video = torch.addcmul(video.unflatten(1, tiles), gate.unflatten(1, tiles), coarse[:, :, None]).flatten(1, 2)
        else:
            video = torch.addcmul(video, gate, layout.tile_to_tokens(coarse))
        return layout.merge(video, [fine[:, start:stop] for start, stop, _ in layout.text_spans])

    def attend_combine(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        """`combine(attend(...))`, as one op where a GPU runs it and nobody wants to see the parts."""
        if ctx.recorder is not None:
            gates = {name: gate.detach() for name, gate in extra.items()}
            ctx = replace(ctx, recorder=partial(_record_with, ctx.recorder, gates))
        layout, topk = ctx.layout, _checked_topk(q, ctx)
        plain = layout.selection is None and ctx.recorder is None and topk < layout.num_blocks
        if not plain or resolve_backend(self.backend, q.device, q.dtype, self.head_dim) != "triton":
            return super().attend_combine(q, k, v, extra, ctx)
        gates = (extra["gate_compress"], extra.get("gate_fine"))
        blocks = layout.blocks
        return coarse_fine_attn(q, k, v, *gates, q_blocks=blocks, kv_blocks=blocks, topk=topk, backend="triton").out

    def pairs(self, layout: TileLayout, topk: int) -> float:
        """Pairs of the fine stage (exact when the tiles are full) and of the coarse stage."""
        total = float(layout.video_blocks.num * layout.blocks.num)
        for sample, (start, stop) in enumerate(layout.sample_spans):
            text = sum(b - a for a, b, owner in layout.text_spans if owner == sample)
            video, tiles = stop - start - text, layout.video_tiles[sample]
            kept = video * min(topk, tiles) / tiles if tiles else 0.0
            total += video * (kept + text) + text * (video + text)
        return total


def _record_with(recorder: Recorder, more: dict[str, Tensor], layer_idx: int, tensors: dict[str, Tensor]) -> None:
    # `attend` does not see the gates, the recorder gets them together with what it does see
    recorder(layer_idx, {**tensors, **more})


def _checked_topk(q: Tensor, ctx: AttnContext) -> int:
    # the layer's top-k, once it fits
    if isinstance(ctx.topk, tuple):
        raise ValueError(f"a layer needs one top-k, got {ctx.topk}: take ctx.layer(index)")
    if ctx.topk < 1:
        raise ValueError(f"topk must be at least 1, got {ctx.topk}")
    if q.shape[1] != ctx.layout.num_tokens:
        raise ValueError(f"layout has {ctx.layout.num_tokens} tokens, q has {q.shape[1]}")
    return ctx.topk
