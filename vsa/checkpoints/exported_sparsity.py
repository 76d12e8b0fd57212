"""Sparsity schedule of a run that was converted from an export."""

from __future__ import annotations

from dataclasses import replace

from vsa.attention.denoising import DenoisingPlan, DenoisingTopk, Row, Topk
from vsa.attention.sparsity import ConstantSparsity, SparsityPoint, topk_at
from vsa.checkpoints.sparse_config import SparseAttentionConfig


class ExportedSparsity(ConstantSparsity):
    """The top-k of a `sparse_attention.json` at every step, for a model that was converted into a run.

    Args:
        config: config of the export.
    """

    def __init__(self, config: SparseAttentionConfig):
        # with a top-k, dense layers are expressed by it
        by_topk = config.dense_layers if config.selects else ()
        plan = replace(config.denoising, dense_layers=()) if config.selects else config.denoising
        super().__init__(topk=max(config.grid_topk[0]), dense_layers=by_topk, denoising=plan)
        self._config = config

    def topk_per_layer(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint = "current") -> Topk:
        topk = super().topk_per_layer(step, num_tiles, num_layers, at)
        ranges, steps = self._config.topk_ranges, self._config.step_topk
        # a plan that replaces that of the export takes precedence
        if at == "dense" or isinstance(topk, DenoisingTopk) or not (ranges or steps):
            return topk
        return DenoisingTopk(
            base=topk,
            ranges=tuple((part.start, part.stop, self._exported(part.grid_topk, num_tiles, at)) for part in ranges),
            steps=tuple((part.step, self._exported(part.grid_topk, num_tiles, at)) for part in steps),
        )

    def _row(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint) -> Row:
        self._check_layers(num_layers)
        return self._exported(self._config.grid_topk, num_tiles, at)

    def _ending_at(self, topk: int | None, sparsity: float | None) -> ConstantSparsity:
        plan = DenoisingPlan(rounding=self.denoising.rounding)
        return ConstantSparsity(topk=topk, sparsity=sparsity, dense_layers=self.dense_layers, denoising=plan)

    def _exported(self, grid_topk: tuple[tuple[int, ...], ...], num_tiles: int, at: SparsityPoint) -> Row:
        row = tuple(
            k if layer in self.dense_layers else topk_at(k, num_tiles, at)
            for layer, k in enumerate(self._config.on_grid(grid_topk, num_tiles))
        )
        return row[0] if len(set(row)) == 1 else row
