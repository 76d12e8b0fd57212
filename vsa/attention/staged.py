"""The stages of VSA taken apart: coarse output (C), fine stage on selected tiles (F), fixed window of tiles (L).

    l        window alone                          c_l      coarse + window
    f        selected tiles alone                  c_f      coarse + selected tiles: VSA
    c_f_l    coarse + selected + window, three gates
    c_f_l_e  the same, tiles of the window cannot be selected
    c_fl     coarse + one fine stage over selected tiles and window

B batch, L query tokens, H heads, D head dim, N tiles, C = H * D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vsa_kernels import BlockIndex, block_sparse_attn
from vsa_kernels.coarse_fine import combine

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.layout import BlockOrder, Segment, TileLayout
from vsa.attention.pooling import Pooling, TilePool, token_places
from vsa.attention.selection import RowRule, select_blocks
from vsa.attention.tiling import Grid
from vsa.settings import AtLeastOne, checked

Stages = Literal["l", "f", "c_l", "c_f", "c_f_l", "c_f_l_e", "c_fl"]
Edge = Literal["clamp", "truncate"]


@checked
class StagedAttention(AttentionMethod):
    """Any combination of VSA's stages with a fixed local window, for rows of one video.

    Args:
        stages: see the top of this file.
        tile_thw: tokens per tile along time, height, width.
        block_order: nested or raster, see `TileLayout`.
        window_thw: tiles of the window along time, height, width, around the query's tile.
        window_edge: clamp (the window is shifted inside the grid and always whole) or truncate (what lies outside is
            missing). The paper does not say which.
        window_budget: of c_fl: union (the window comes on top of the selected tiles) or within (its tiles take the
            first places of the top-k).
        pooling: of queries, keys and values in the coarse stage: mean, max or conv, see `TilePool`.
        fine_gate: False leaves the output of the selected tiles as it is.
        gate_init: identity (coarse 0, fine 1, window 0 beside selected tiles) or model (weights as the model
            initialises its linear layers, biases as in identity).
        backend: of the fine stages; None picks by device.
        **layer: see `AttentionMethod`.

    Source: VSA (arXiv 2505.13389), Table 1(b), experiments 7 to 13, and 1(e).
    """

    def __init__(
        self,
        *,
        stages: Stages = "c_f",
        tile_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (4, 4, 4),
        block_order: BlockOrder = "nested",
        window_thw: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (3, 3, 3),
        window_edge: Edge = "clamp",
        window_budget: Literal["union", "within"] = "union",
        pooling: Pooling = "mean",
        fine_gate: bool = True,
        gate_init: Literal["identity", "model"] = "identity",
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        self.stages: Stages = stages
        self.tile_thw: Grid = (tile_thw[0], tile_thw[1], tile_thw[2])
        self.block_order: BlockOrder = block_order
        self.window_thw: Grid = (window_thw[0], window_thw[1], window_thw[2])
        self.window_edge: Edge = window_edge
        self.window_budget = window_budget
        self.gate_init, self.backend = gate_init, backend
        self.has_coarse, self.selects, self.has_window = "c" in stages, "f" in stages, "l" in stages
        starts = {"compress": 0.0} if self.has_coarse else {}
        if fine_gate:
            starts["fine"] = 1.0
        if stages in ("c_f_l", "c_f_l_e"):
            starts["window"] = 0.0
        self._gate_starts = starts
        self.gates = nn.ModuleDict({f"to_gate_{name}": nn.Linear(self.dim, self.dim) for name in starts})
        self.pool: nn.ModuleDict | None = None
        if self.has_coarse or self.selects:
            self.pool = nn.ModuleDict({name: TilePool(pooling, self.head_dim, self.tile_thw) for name in "qkv"})
        self.reset_extra_parameters()

    def extra_repr(self) -> str:
        return f"stages={self.stages}, tile_thw={self.tile_thw}, window_thw={self.window_thw}"

    def extra_modules(self) -> dict[str, nn.Module]:
        pools = {} if self.pool is None else {f"to_pool_{name}": pool for name, pool in self.pool.items()}
        return {**self.gates, **{name: pool for name, pool in pools.items() if list(pool.parameters())}}

    def reset_extra_parameters(self) -> None:
        for name, start in self._gate_starts.items():
            gate: Any = self.gates[f"to_gate_{name}"]
            nn.init.constant_(gate.bias, start)
            if self.gate_init == "identity":
                nn.init.zeros_(gate.weight)

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        return TileLayout.build(segments, tile_thw=self.tile_thw, block_order=self.block_order, device=device)

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """Gates `[B, L, H, D]` from x `[B, L, C]`."""
        heads = (self.num_heads, self.head_dim)
        return {name: self.gates[f"to_gate_{name}"](x).unflatten(-1, heads) for name in self._gate_starts}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """Of `fine`, `window` `[B, L, H, D]` per token and `coarse` `[B, N, H, D]` per tile what the stages have."""
        layout, parts = ctx.layout, {}
        window = self._window(layout) if self.has_window else None
        scores = None
        if self.pool is not None:
            pooled = (self.pool[name](x, layout).transpose(1, 2) for name, x in zip("qkv", (q, k, v), strict=True))
            coarse, scores = _coarse(*pooled)
            if self.has_coarse:
                parts["coarse"] = coarse.transpose(1, 2).to(q.dtype)
        if scores is not None and self.selects:
            parts["fine"] = self._fine(q, k, v, layout, self._select(scores, ctx.kept(q), window))
        if window is not None and self.stages != "c_fl":
            name = "window" if self.selects else "fine"
            parts[name] = self._fine(q, k, v, layout, BlockIndex.from_dense(window[None, None]))
        return parts

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        out = parts["fine"] * extra["fine"] if "fine" in extra else parts["fine"]
        if "window" in parts:
            out = torch.addcmul(out, parts["window"], extra["window"])
        if "coarse" in parts:
            out = combine(out, parts["coarse"], extra["compress"], None, ctx.layout.blocks)
        return out

    def pairs(self, layout: TileLayout, topk: int) -> float:
        """Pairs of the coarse stage and of every fine stage; of a union as if no selected tile were in the window."""
        tiles, kept = layout.num_blocks, min(topk, layout.num_blocks)
        total = float(tiles**2) if self.pool is not None else 0.0
        window = layout.blocks.sizes.double() @ self._window(layout).double() if self.has_window else None
        local = 0.0 if window is None else float(window @ layout.blocks.sizes.double())
        selected = layout.num_tokens**2 * kept / tiles
        if self.stages == "c_fl":
            both = selected if self.window_budget == "within" else min(selected + local, layout.num_tokens**2)
            return total + both
        return total + local + (selected if self.selects else 0.0)

    def _select(self, scores: Tensor, topk: int, window: Tensor | None) -> BlockIndex:
        rule = RowRule(topk=topk)
        if self.stages == "c_f_l_e":
            assert window is not None
            return select_blocks(scores, rule, candidates=~window)
        if self.stages == "c_fl":
            within = self.window_budget == "within"
            return select_blocks(scores, rule, first=window if within else None, union=None if within else window)
        return select_blocks(scores, rule)

    def _fine(self, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, index: BlockIndex) -> Tensor:
        blocks = layout.blocks
        return block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=self.backend)[0]

    def _window(self, layout: TileLayout) -> Tensor:
        return window_mask(layout, self.window_thw, self.window_edge)


def _coarse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output `[B, H, N, D]` and logits `[B, H, N, N]` of attention between pooled q, k, v `[B, H, N, D]`."""
    if (group := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return scores.softmax(-1) @ v, scores


@lru_cache(maxsize=64)
def window_mask(layout: TileLayout, window_thw: Grid, edge: Edge) -> Tensor:
    """Bool `[N, N]`: kv tiles in the window around each query tile, for a row of one video cut into cuboids."""
    tile: Any = layout.tile_thw
    first = token_places(layout)[layout.blocks.offsets[:-1].long().cpu()]
    # [N, 3]
    tiles = first // torch.tensor(tile)
    counts = tiles.amax(0) + 1
    size = torch.minimum(torch.tensor(window_thw), counts) if edge == "clamp" else torch.tensor(window_thw)
    start = tiles - torch.tensor(window_thw) // 2
    if edge == "clamp":
        start = start.clamp(min=torch.zeros_like(counts), max=counts - size)
    inside = (tiles[None] >= start[:, None]) & (tiles[None] < (start + size)[:, None])
    with torch.inference_mode(False):
        return inside.all(-1).to(layout.device)
