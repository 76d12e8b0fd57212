"""Base of the attention methods whose query tiles select kv tiles by a score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vsa.attention import scores
from vsa.attention.layout import BlockOrder, Partition, Segment, TileLayout
from vsa.attention.ruled import RuledAttention
from vsa.attention.scores import Score
from vsa.attention.tiling import Grid, refuse_no_divisor
from vsa.settings import AtLeastOne, Seed, validated

Tile = tuple[AtLeastOne, AtLeastOne, AtLeastOne]


@validated
class SelectingAttention(RuledAttention):
    """Attention whose query tiles select kv tiles by a score.

    Args:
        tile_thw: tokens per tile along time, height, width.
        partition: cube or a kind of runs, see `TileLayout`.
        block_order: nested or raster, see `TileLayout`.
        score: score that ranks the tiles: mean, subblock_softmax, subblock_lse, mass or error, see
            `vsa.attention.scores`. For comparisons: oracle (exact mass, at the cost of dense attention: the most
            recall, not the least error) or random. Rows with text or of several videos have the first three.
        score_seed: seed of the score random; layers always differ.
        score_thw: tokens per sub-block of the sub-block scores along time, height, width; divides the tile.
        **layer: see `RuledAttention`.
    """

    def __init__(
        self,
        *,
        tile_thw: Tile = (4, 4, 4),
        partition: Partition = "cube",
        block_order: BlockOrder = "nested",
        score: Score = "mean",
        score_seed: Seed = 0,
        score_thw: Tile = (2, 2, 2),
        **layer: Any,
    ):
        super().__init__(**layer)
        self.tile_thw, self.score_thw = grid_of(tile_thw), grid_of(score_thw)
        self.partition: Partition = partition
        self.block_order: BlockOrder = block_order
        self.score: Score = score
        self.score_seed = score_seed
        if score != "mean" and self.sub_thw is None:
            self.takes_text = False
        if score == "random":
            # its values are those of the number of the head
            self.needs_all_heads = f"score={score}"
        if self.sub_thw is not None:
            refuse_no_divisor("score_thw", self.sub_thw, tile_thw=self.tile_thw)

    @property
    def sub_thw(self) -> Grid | None:
        """Tokens per sub-block of the score; None for another score."""
        return self.score_thw if self.score.startswith("subblock_") else None

    def tiling(self) -> dict[str, Any]:
        more = {} if self.sub_thw is None else {"more_tiles": [self.sub_thw]}
        return {"tile_thw": self.tile_thw, "partition": self.partition, "block_order": self.block_order, **more}

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        layout = super().layout(segments, device)
        if layout.device.type != "meta":
            SelectingAttention.prepare(self, layout)
        return layout

    def prepare(self, layout: TileLayout) -> None:
        if self.sub_thw is not None:
            layout.derive(scores.sub_blocks, self.sub_thw)

    def scores(self, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, tail: Tensor | None = None) -> Tensor:
        """Scores `[B, H, Nv, Nkv]` of the kv tiles for every video query tile.

        Args:
            q, k, v: tile-major `[B, L, H, D]`, `[B, L, Hkv, D]` for k and v.
            layout: a layout of this method.
            tail: logits `[B, H, L, Nkv]` of every query for the tiles as one key each; None: those of order 1.
        """
        if self.sub_thw is not None:
            form = "lse" if self.score == "subblock_lse" else "softmax"
            return scores.subblock_scores(q, k, layout, self.sub_thw, form=form)
        if self.score == "mean":
            return scores.mean_scores(layout.take_video(q), k, layout.video_blocks, layout.kv_blocks)
        layout.only_video(f"score={self.score}")
        if self.score == "oracle":
            return scores.oracle_scores(q, k, layout)
        if self.score == "random":
            return scores.random_scores(q, layout, self.score_seed * 1009 + self.layer_idx)
        tail = scores.tile_logits(q.detach(), k.detach(), layout.kv_blocks) if tail is None else tail
        if self.score == "error":
            return scores.error_scores(tail, q, k, v, layout)
        return scores.mass_scores(tail, layout)

    def map_logits(self, ranked: Tensor) -> Tensor | None:
        """Logits of the attention map that `scores` predict, None where they predict none."""
        if self.score == "mean":
            return ranked * self.head_dim**-0.5
        if self.score in ("error", "random"):
            return None
        return ranked if self.score == "subblock_lse" else ranked.log()

    def kept_pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of the selected tiles and of the text and cond tokens of each sample."""
        total = 0.0
        for (start, stop), tiles, text in zip(layout.sample_spans, layout.video_tiles, layout.text_tokens, strict=True):
            video = stop - start - text
            selected_keys = video * min(topk, tiles) / tiles if tiles else 0.0
            total += video * (selected_keys + text) + text * (video + text)
        return total

    def score_pairs(self, layout: TileLayout) -> float:
        """Pairs of the score, half a pair for each product of a query and a key; those of `mean` are not counted."""
        if self.sub_thw is not None:
            return layout.tiles[self.sub_thw].num ** 2 / 2
        tiles, tokens = layout.kv_blocks.num, layout.num_tokens
        return tokens * {"mass": tiles, "error": 2 * tiles, "oracle": tokens}.get(self.score, 0) / 2


def grid_of(tile: Sequence[int]) -> Grid:
    """A tile as a tuple of three."""
    return tile[0], tile[1], tile[2]
