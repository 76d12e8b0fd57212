"""Sparsity schedule of a run that was converted from an export."""

from __future__ import annotations

from dataclasses import replace

from vsa.attention.denoising import DenoisingPlan
from vsa.attention.kept_tiles import Budget, KeptTiles
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

    def topk_per_layer(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint = "current") -> KeptTiles:
        topk = super().topk_per_layer(step, num_tiles, num_layers, at)
        # a plan that replaces that of the export takes precedence
        return topk if at == "dense" or topk.changes else self._exported(num_tiles, at)

    def _layers(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint) -> tuple[float, ...]:
        self._check_layers(num_layers)
        return self._exported(num_tiles, at).layers

    def _ending_at(self, end: Budget) -> ConstantSparsity:
        plan = DenoisingPlan(rounding=self.denoising.rounding)
        return ConstantSparsity(**end._asdict(), dense_layers=self.dense_layers, denoising=plan)

    def _exported(self, num_tiles: int, at: SparsityPoint) -> KeptTiles:
        def layers(counts: tuple[float, ...]) -> tuple[float, ...]:
            dense = self.dense_layers
            counts = tuple(k if i in dense else topk_at(int(k), num_tiles, at) for i, k in enumerate(counts))
            return counts[:1] if len(set(counts)) == 1 else counts

        return self._config.kept_on(num_tiles).map(layers)
