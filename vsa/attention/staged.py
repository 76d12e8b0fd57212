"""VSA in separate stages, for ablations: coarse output (C), fine stage on selected tiles (F), local window (L).

    l        window only                           c_l      coarse + window
    f        selected tiles only                   c_f      coarse + selected tiles: VSA
    c_f_l    coarse + selected + window, three gates
    c_f_l_e  like c_f_l, but tiles of the window cannot be selected
    c_fl     coarse + one fine stage over selected tiles and window
    fl       that fine stage alone: with rule=top_p NABLA

Three tile sizes may differ: query tiles of the fine stage, kv tiles that they select, and tiles of the coarse stage.

    tile_thw    kv_tile_thw  pool_thw
    (4, 4, 4)   (2, 4, 2)    -            queries in 64s select keys in 16s (Table 1d, "16x64"); or the other way round
    (4, 8, 8)   -            (4, 4, 4)    coarse map in 64s, its means over 2 x 2 tiles select 256s (experiment 16)
    (4, 8, 4)   (4, 4, 4)    (4, 4, 4)    two tiles of 64 rows share the list selected by the mean of their scores

They are nested in one token order, so tokens are permuted only once.

B batch, L query tokens, H heads, D head dim, Nq / Nkv tiles of queries / keys in the fine stage, Np / Np' in the coarse
one, C = H * D model width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vsa_kernels import BlockIndex, block_sparse_attn
from vsa_kernels.coarse_fine import combine

from vsa.attention.context import AttnContext
from vsa.attention.dense import dense_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.attention.pooling import ConvSharing, Pooling, make_pools, pool_modules
from vsa.attention.scores import map_scores, per_head, tiles_inside, with_damage_first
from vsa.attention.selecting import SelectingAttention, Tile, grid_of
from vsa.attention.tiling import Grid, chain_of, refuse_no_divisor
from vsa.attention.window import Edge, Window, tile_window
from vsa.settings import validated

Stages = Literal["l", "f", "c_l", "c_f", "c_f_l", "c_f_l_e", "c_fl", "fl"]


@validated
class StagedAttention(SelectingAttention):
    """Any combination of VSA's stages with a fixed local window, for rows of one video.

    Args:
        stages: see the top of this file.
        tile_thw: tokens per tile of queries along time, height, width.
        kv_tile_thw: tokens per tile of keys and values, the tiles that the top-k counts; None: `tile_thw`. One of the
            two divides the other.
        pool_thw: tokens per tile of the coarse stage; divides both. None: queries are pooled by `tile_thw`, keys by
            `kv_tile_thw`.
        pooled_map: map that is averaged where tiles of the coarse stage are smaller: probabilities (its softmax) or
            logits. The paper says "predicted attention map".
        partition: cube or a kind of runs, see `TileLayout`; a window and conv pooling need cubes.
        window_thw: tiles of the window along time, height, width around the query's tile; counted in the larger tile
            where query and kv tiles differ.
        window_edge: clamp (the window is shifted inside the grid and always whole) or truncate (the part outside is
            missing). The paper does not say which.
        window_budget: union (the window is added to the selected tiles) or within (in c_fl and fl its tiles take the
            first places of the rule; in c_f_l and c_f_l_e the top-k is reduced by a whole window, to at least 1).
            The paper does not say which.
        window_gate: gate of the window in c_f_l and c_f_l_e: own, or fine (the gate of the selected tiles). The paper
            does not say which.
        pooling: pooling of queries, keys and values in the coarse stage: mean, max or conv, see `TilePool`.
        conv_sharing: sharing of the convolutions of conv pooling, see `make_pools`.
        fine_gate: whether the output of the selected tiles has a gate.
        gate_init: identity (coarse 0, fine 1, window 0 next to selected tiles; conv pooling starts as the mean) or
            model (weights as the model initialises its linear layers, biases as in identity).
        backend: backend of the fine stages; None chooses by device.
        **layer: see `SelectingAttention`; the coarse output has the means whatever the score, and rules other than topk
            need stages without a window of its own (f, c_f, c_fl, fl).

    Source: VSA (arXiv 2505.13389), Table 1(b), experiments 7 to 13, 1(c), 1(d) and 1(e); fl: NABLA (arXiv 2507.13546).
    """

    takes_text = False

    def __init__(
        self,
        *,
        stages: Stages = "c_f",
        kv_tile_thw: Tile | None = None,
        pool_thw: Tile | None = None,
        pooled_map: Literal["probabilities", "logits"] = "probabilities",
        window_thw: Tile = (3, 3, 3),
        window_edge: Edge = "clamp",
        window_budget: Literal["union", "within"] = "union",
        window_gate: Literal["own", "fine"] = "own",
        pooling: Pooling = "mean",
        conv_sharing: ConvSharing = "heads",
        fine_gate: bool = True,
        gate_init: Literal["identity", "model"] = "identity",
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        self.stages: Stages = stages
        self.kv_tile_thw: Grid = self.tile_thw if kv_tile_thw is None else grid_of(kv_tile_thw)
        self.q_pool = self.tile_thw if pool_thw is None else grid_of(pool_thw)
        self.kv_pool = self.kv_tile_thw if pool_thw is None else grid_of(pool_thw)
        self.pooled_map = pooled_map
        self.window_thw: Grid = grid_of(window_thw)
        self.window_edge: Edge = window_edge
        self.window_budget = window_budget
        self.gate_init, self.backend = gate_init, backend
        self.has_coarse, self.has_fine, self.has_window = "c" in stages, "f" in stages, "l" in stages
        # selected tiles and window in one fine stage
        self.joined = stages in ("c_fl", "fl")
        if self.row_rule is not None and (not self.has_fine or (self.measured and self.has_window > self.joined)):
            others = "stages f, c_f, fl or c_fl" if self.measured else "stages with f"
            raise ValueError(f"rule={self.rule} over={self.over} needs {others}, got stages={stages}")
        self.selects = self.selects and self.has_fine
        self.takes_query_parts = False
        if pooling == "conv" and conv_sharing == "none":
            self.needs_all_heads = f"conv_sharing={conv_sharing}"
        self._check_tiles(pool=pool_thw, conv=pooling == "conv")
        starts = {"compress": 0.0} if self.has_coarse else {}
        if fine_gate:
            starts["fine"] = 1.0
        if stages in ("c_f_l", "c_f_l_e") and window_gate == "own":
            starts["window"] = 0.0
        self._gate_starts = starts
        # settings that are not kept as they were given
        self._given = {"pool_thw": pool_thw, "window_gate": window_gate, "fine_gate": fine_gate}
        self._given |= {"pooling": pooling, "conv_sharing": conv_sharing}
        self.gates = nn.ModuleDict({f"to_gate_{name}": nn.Linear(self.dim, self.dim) for name in starts})
        self.pool: nn.ModuleDict | None = None
        if self.has_coarse or (self.has_fine and self.score == "mean"):
            tiles = {"q": self.q_pool, "k": self.kv_pool, "v": self.kv_pool}
            self.pool = make_pools(pooling, tiles, self.head_dim, self.num_heads, conv_sharing)
        self.reset_extra_parameters()

    def setting(self, name: str) -> Any:
        return self._given[name] if name in self._given else super().setting(name)

    def extra_modules(self) -> dict[str, nn.Module]:
        return {**self.gates, **({} if self.pool is None else pool_modules(self.pool))}

    def reset_extra_parameters(self) -> None:
        for name, start in self._gate_starts.items():
            gate: Any = self.gates[f"to_gate_{name}"]
            nn.init.constant_(gate.bias, start)
            if self.gate_init == "identity":
                nn.init.zeros_(gate.weight)
        if self.gate_init == "identity" and self.pool is not None:
            for pool in pool_modules(self.pool).values():
                pool.start_as_mean()

    def tiling(self) -> dict[str, Any]:
        more = [tile for tile in (self.q_pool, self.kv_pool, self.sub_thw) if tile is not None]
        return super().tiling() | {"kv_tile_thw": self.kv_tile_thw, "more_tiles": more}

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """Gates `[B, L, H, D]` from x `[B, L, C]`."""
        heads = (self.num_heads, self.head_dim)
        return {name: self.gates[f"to_gate_{name}"](x).unflatten(-1, heads) for name in self._gate_starts}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """Outputs of the stages in use: per token `fine`, `window` `[B, L, H, D]`, per tile `coarse` `[B, Np, H, D]`.

        A stage that is not in use has no entry."""
        layout, parts = ctx.layout, {}
        layout.only_video("attention in stages")
        window = self._window(layout) if self.has_window else None
        logits, scores, index = None, None, None
        if self.pool is not None:
            pooled = (self.pool[name](x, layout).transpose(1, 2) for name, x in zip("qkv", (q, k, v), strict=True))
            coarse, logits = _coarse(*pooled)
            if self.has_coarse:
                parts["coarse"] = coarse.transpose(1, 2).to(q.dtype)
        if ctx.dense:
            parts["fine"] = dense_attn(q, k, v)
            ctx.count_all(q)
            # all tiles include the window; it is needed only if it has its own gate
            window = window if "window" in self._gate_starts else None
            index = BlockIndex.from_dense(q.new_ones(1, 1, layout.blocks.num, layout.kv_blocks.num, dtype=torch.bool))
        elif self.has_fine:
            ctx.kept(q)
            scores = ranked = self._ranked(q, k, v, logits, layout) if ctx.ranks else None
            index = ctx.select(lambda topk: self._select(with_damage_first(ranked, k, v, layout), topk, window, ctx))
            parts["fine"] = self._fine(q, k, v, layout, index)
        if window is not None and not self.joined:
            name, local = "window" if self.has_fine else "fine", BlockIndex.from_dense(window.tiles[None, None])
            parts[name] = self._fine(q, k, v, layout, local)
            index = local if index is None else index
        if ctx.recorder is not None:
            assert index is not None
            coarse = parts.get("coarse")
            if coarse is not None:
                # per token, because tiles of the coarse stage may have another size
                coarse = coarse.repeat_interleave(layout.tiles[self.q_pool].sizes, 1, output_size=layout.num_tokens)
            tensors = {"coarse": coarse, "scores": self._as_logits(scores, logits, layout)}
            ctx.record(self.layer_idx, index, q=q, k=k, fine=parts["fine"], **tensors)
        return parts

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        out, window = parts["fine"], parts.get("window")
        if window is not None and "window" not in extra:
            out, window = out + window, None
        out = out * extra["fine"] if "fine" in extra else out
        if window is not None:
            out = torch.addcmul(out, window, extra["window"])
        if "coarse" in parts:
            out = combine(out, parts["coarse"], extra["compress"], None, ctx.layout.query_tiles[self.q_pool])
        return out

    def rows_of(self, part: str) -> Grid | None:
        return self.q_pool if part == "coarse" else None

    def dense_parts(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """Parts of a dense layer: every tile replaces the window, with the coarse output in use."""
        return self.attend(q, k, v, ctx)

    def attend_combine(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        gates = {f"gate_{name}": gate for name, gate in extra.items()}
        return super().attend_combine(q, k, v, extra, ctx.also_recording(gates))

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of the coarse stage and of every fine stage; a union counts as if no selected tile were in the window.

        A selected tile counts with the mean tile size, so the number is exact when tiles are full. Scores, which need a
        product of queries and keys only, count as half a pair.
        """
        tokens, sizes, kv_sizes = layout.num_tokens, layout.blocks.sizes.double(), layout.kv_blocks.sizes.double()
        total = 0.0 if self.pool is None else float(layout.tiles[self.q_pool].num * layout.tiles[self.kv_pool].num)
        window = self._window(layout) if self.has_window else None
        local = 0.0 if window is None else float(sizes @ window.tiles.double() @ kv_sizes)
        if not self.has_fine:
            return total + local
        total += self.score_pairs(layout)
        selected_tiles, tiles = max(min(1, topk), topk - self._fewer(window)), layout.kv_blocks.num
        tile_visits = float(tokens * min(selected_tiles, tiles))
        if window is not None and self.stages == "c_f_l_e":
            tile_visits = float(sizes @ (tiles - window.tiles.sum(1)).clamp(max=selected_tiles).double())
        selected = tile_visits * tokens / tiles
        if self.joined:
            # where lists are counted apart, they hold the window
            local = local if topk else 0.0
            return total + (selected if self.window_budget == "within" else min(selected + local, tokens**2))
        return total + local + selected

    def _ranked(self, q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None, layout: TileLayout) -> Tensor:
        """Scores `[B, H, Nq, Nkv]`; `mean` uses the logits `[B, H, Np, Np']` of the coarse stage."""
        if self.score != "mean":
            return self.scores(q, k, v, layout)
        assert logits is not None
        return map_scores(logits, layout, self.q_pool, self.kv_pool, self.pooled_map)

    def _as_logits(self, scores: Tensor | None, logits: Tensor | None, layout: TileLayout) -> Tensor | None:
        """Logits `[B, H, Nq, Nkv]` of the predicted attention map, None where there is none."""
        same = (self.q_pool, self.kv_pool) == (layout.tile_thw, layout.kv_tile_thw)
        if scores is None:
            return logits if same else None
        if self.score != "mean":
            return self.map_logits(scores)
        return scores if same or self.pooled_map == "logits" else scores.log()

    def _select(self, scores: Tensor, topk: KeptTiles, window: Window | None, ctx: AttnContext) -> BlockIndex:
        topk = topk.less(self._fewer(window))
        choose = partial(self.choose, scores, topk, ctx, logits_of=lambda x: self._as_logits(x, None, ctx.layout))
        if window is not None and self.stages == "c_f_l_e":
            return choose(candidates=~window.tiles)
        if window is not None and self.joined:
            within = self.window_budget == "within"
            first, union = (window.tiles, None) if within else (None, window.tiles)
            return choose(first=first, union=union)
        return choose()

    def _fewer(self, window: Window | None) -> int:
        """Number of tiles by which a window inside the budget reduces the top-k."""
        lowered = self.window_budget == "within" and self.stages in ("c_f_l", "c_f_l_e")
        return window.largest if lowered and window is not None else 0

    def _fine(self, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, index: BlockIndex) -> Tensor:
        q_blocks, kv_blocks = layout.blocks, layout.kv_blocks
        return block_sparse_attn(q, k, v, index, q_blocks=q_blocks, kv_blocks=kv_blocks, backend=self.backend)[0]

    def _window(self, layout: TileLayout) -> Window:
        return layout.derive(tile_window, self.window_thw, self.window_edge)

    def prepare(self, layout: TileLayout) -> None:
        super().prepare(layout)
        if self.has_window:
            self._window(layout)
        for pool in [] if self.pool is None else pool_modules(self.pool).values():
            pool.prepare(layout)
        for small, large in ((self.q_pool, self.tile_thw), (self.kv_pool, self.kv_tile_thw)):
            layout.derive(tiles_inside, small, large)

    def _check_tiles(self, *, pool: Tile | None, conv: bool) -> None:
        larger = {"tile_thw": self.tile_thw, "kv_tile_thw": self.kv_tile_thw}
        if pool is not None:
            refuse_no_divisor("pool_thw", self.q_pool, **larger)
        if self.sub_thw is not None:
            refuse_no_divisor("score_thw", self.sub_thw, **larger)
        tiles = (*larger.values(), self.q_pool, self.kv_pool, self.sub_thw)
        chain_of(tile for tile in tiles if tile is not None)
        if self.partition != "cube" and (self.has_window or conv):
            what = f"stages={self.stages}" if self.has_window else "pooling=conv"
            raise ValueError(f"{what} needs partition=cube, got {self.partition}: its tiles have no grid positions")


def _coarse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output `[B, H, Np, D]` and logits `[B, H, Np, Np']` of attention between pooled q, k, v `[B, H, Np, D]`."""
    scores = (q * q.shape[-1] ** -0.5) @ per_head(k, q.shape[1]).transpose(-1, -2)
    return scores.softmax(-1) @ per_head(v, q.shape[1]), scores
