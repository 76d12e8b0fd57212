"""Weights of a training run: those of a checkpoint, with the schedule and the settings of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import SparsitySchedule
from vsa.checkpoints.exported_sparsity import ExportedSparsity
from vsa.checkpoints.lora import LoRA, merged_tensor, plain_names
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.sampling_settings import sampling_of
from vsa.checkpoints.sparse_config import SparseAttentionConfig, denoising_fields
from vsa.checkpoints.wan import sparse_settings
from vsa.checkpoints.wan_config import transformer_config
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weights import WeightSource
from vsa.files import check_kind
from vsa.models.init import without_memory
from vsa.models.network import Network

Group = Literal["ema", "model"]


class RunWeights(WeightSource):
    """Weights of a training run.

    Args:
        checkpoint: checkpoint to read.
        group: "ema" or "model"; None: the averaged weights if there are any.

    Raises:
        ValueError: the checkpoint does not have these weights.
    """

    def __init__(self, checkpoint: Checkpoint, group: Group | None = None):
        self.checkpoint = checkpoint
        self.group = checkpoint.choose_weights(group)
        files = checkpoint.open(self.group)
        super().__init__(str(checkpoint.path), files, plain_names(files.keys), checkpoint.state)
        node = (self.run_config.get("task") or {}).get("lora") or {}
        self.lora = LoRA(**{key: value for key, value in node.items() if key != "_target_"}) if node else None

    def __str__(self) -> str:
        return f"{self.source} ({self.group} weights)"

    def _read(self, name: str) -> Tensor:
        key = self.keys_in_files[name]
        return self.files.read(key) if self.lora is None else merged_tensor(self.files.read, key, self.lora)

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        return super()._rows(name, start, stop) if self.lora is None else self[name][start:stop]

    @property
    def run_config(self) -> Mapping[str, Any]:
        return self.checkpoint.config

    @property
    def digest(self) -> str:
        return self.checkpoint.digest(self.group)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return transformer_config(self._meta)

    @cached_property
    def _meta(self) -> Network:
        with without_memory():
            return self.network()

    @property
    def schedule(self) -> SparsitySchedule:
        """The schedule of the run at its step, or that of an export which was converted into the run."""
        if (exported := self._exported) is not None:
            return ExportedSparsity(exported)
        # hydra is imported only where a config is built, not with every training module
        from vsa.config import build

        schedule: SparsitySchedule = build(self.run_config["sparsity"])
        schedule.load_state_dict(self.state.get("sparsity_state", {}))
        return schedule

    @property
    def _exported(self) -> SparseAttentionConfig | None:
        values = self.state.get("sparse_attention")
        return None if values is None else SparseAttentionConfig.from_json(json.dumps(values))

    @cached_property
    def sparse(self) -> SparseAttentionConfig | None:
        sparse, named = self._exported, {"model", "attention"} <= self.run_config.keys()
        if sparse is None and (any(map(is_gate, self)) or (named and not self._meta.is_dense)):
            sparse = self._described()
        return sparse if sparse is None or self.step_list is None else sparse.sampled_at(self.step_list)

    def _described(self) -> SparseAttentionConfig:
        """Description from schedule and state; the largest grid of the training is the reference."""
        model, schedule, state = self._meta, self.schedule, self.state
        shapes = sorted({tuple(shape) for shape in state["latent_shapes"]}, key=lambda s: (-s[1] * s[2] * s[3], s))
        num_tiles = [model.layout_for(shape, "cpu").num_video_tiles for shape in shapes]
        layers = len(model.blocks)
        if model.selects:
            topks = [schedule.topk_after(state["step"], n, layers) for n in num_tiles]
            budget, by_topk = schedule.budget, schedule.dense_layers
        else:
            # the schedule does not apply
            topks, budget, by_topk = [KeptTiles((n,)) for n in num_tiles], "fraction", ()
        # only an explicit sampling shift describes how to sample the model; the training shift is a different setting
        sampling = sampling_of(self.run_config)
        sampling = sampling if "flow_shift" in sampling else {}
        return SparseAttentionConfig(
            **sparse_settings(model),
            **denoising_fields(topks, schedule.denoising, layers),
            num_tiles=tuple(num_tiles),
            grids=tuple(model.grid(shape) for shape in shapes),
            budget=budget,
            dense_layers=tuple(sorted({*by_topk, *schedule.denoising.dense_layers})),
            flow_shift=sampling.get("flow_shift"),
            guidance_scale=sampling.get("guidance"),
        )

    def network(self, **options: Any) -> Network:
        from vsa.config import check_targets, model_factory

        self.require_config(model=dict, attention=dict)
        check_targets(self.run_config)
        return model_factory(self.run_config)(**options)

    def require_config(self, **kinds: Any) -> None:
        """Raise ValueError for a config without one of these parts, or with one of another kind, see `check_kind`."""
        check_kind(self.run_config, kinds, f"the config of checkpoint {self.source}")

    def refuse_other_architecture(self, model: Network) -> None:
        refuse_other_sizes(model, self.checkpoint)


def refuse_other_sizes(model: Network, checkpoint: Checkpoint) -> None:
    """Raise ValueError if a run's config contradicts the model in settings that shapes do not determine clearly."""
    theirs_by_key = checkpoint.state.get("config", {}).get("model", {})
    # a network of diffusers has its sizes one level below
    nested = {f"config.{key}": value for key, value in theirs_by_key.get("config", {}).items()}
    theirs_by_key = {**theirs_by_key, **nested}
    mine = {key: (theirs_by_key.get(key, value), value) for key, value in model.fixed_settings().items()}
    other = [f"model.{key}={theirs}, the model has {ours}" for key, (theirs, ours) in mine.items() if theirs != ours]
    if other:
        raise ValueError(f"{checkpoint.path} has {'; '.join(other)}")
