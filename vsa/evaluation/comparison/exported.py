"""The compared model of a sparse export in a diffusers Wan pipeline, as it is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vsa.attention.base import AttentionMethod
from vsa.attention.denoising import DenoisingPlan
from vsa.attention.tiling import Grid
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.wan import attention_of
from vsa.data.codecs import WanVAE
from vsa.evaluation.comparison.methods import AS_TRAINED, Method
from vsa.evaluation.comparison.pipelines import PipelineModel
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.integrations.diffusers import remove
from vsa.integrations.diffusers.pipeline import clip_settings, trained_settings


@dataclass(frozen=True, kw_only=True)
class ExportedMethod(Method):
    """The method of an export, with its gates and top-k.

    Args:
        export: settings of the export.
    """

    export: SparseAttentionConfig

    def make(self, *, dim: int, num_heads: int, head_dim: int, layer_idx: int) -> AttentionMethod:
        return attention_of(self.export)(dim=dim, num_heads=num_heads, head_dim=head_dim, layer_idx=layer_idx)


def as_trained(export: SparseAttentionConfig) -> Method:
    """The method of an export, for the model that holds its weights."""
    return ExportedMethod(label=AS_TRAINED, family=AS_TRAINED, config={}, trained=True, export=export)


class ExportedModel(PipelineModel):
    """Sparse transformers in a pipeline: as trained, against dense attention with the same weights.

    Its q, k and v are those of the model as it was trained.

    Args:
        pipe: pipeline from `open_pipeline` with the sparse transformers.
        codec: its VAE.
        sparse: folder or hub id of each sparse transformer, by its name in the pipeline.
        latents: latent frames, rows and columns of a clip.
    """

    def __init__(self, pipe: Any, codec: WanVAE, *, sparse: Mapping[str, str], latents: Grid):
        export = trained_settings(pipe)
        assert export is not None
        self.sparse, self._guidance = sparse, clip_settings(pipe).guidance
        for name in sparse:
            # dense between two runs; the gates are read again for each
            remove(getattr(pipe, name))
        super().__init__(pipe, codec, source=" and ".join(dict.fromkeys(sparse.values())), latents=latents)
        # not empty: captures have the top-k of the model
        self.attention, self.own = {"method": export.method}, [as_trained(export)]

    def prepare(self, methods: Sequence[Method], asked: CompareSettings) -> DenoisingPlan:
        guidance = self._guidance if asked.guidance is None else asked.guidance
        return super().prepare(methods, replace(asked, guidance=guidance))
