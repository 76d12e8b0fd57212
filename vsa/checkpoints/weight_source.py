"""Sources of weights for training, sampling, conversion and merging.

`open_weights` distinguishes a run or checkpoint folder, a folder or Hugging Face id in diffusers' layout (FastVideo's
is the same, with gates that no file describes) and a folder in Wan's original layout. A new layout is one class here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import ConstantSparsity, SparsitySchedule
from vsa.attention.video_sparse import Backend
from vsa.checkpoints.adapter_files import AdaptedWeights, adapted_spec
from vsa.checkpoints.experts import EXPERTS, NoiseRange, expert_range, refuse_experts
from vsa.checkpoints.exported_sparsity import ExportedSparsity
from vsa.checkpoints.held_files import EPS, HEAD_DIM, config_of_shapes, holds_file, unprefixed
from vsa.checkpoints.lora import LoRA, merged_tensor, plain_names
from vsa.checkpoints.network_settings import network_of
from vsa.checkpoints.run_checkpoint import Checkpoint, resolve_checkpoint
from vsa.checkpoints.sampling_settings import read_sampling_part, sampling_of
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    SparseAttentionConfig,
    denoising_fields,
    has_sparse_config,
    read_sparse_config,
)
from vsa.checkpoints.wan import (
    Gates,
    attention_of,
    gate_names,
    refuse_other_attention,
    sparse_settings,
)
from vsa.checkpoints.wan_config import CLASS_NAME, named_sizes, transformer_config, video_dit_arguments
from vsa.checkpoints.wan_names import config_of_wan, is_gate, is_unused, wan_to_diffusers
from vsa.checkpoints.weight_files import WeightFiles, hub_parts, local_folder, pretrained_folder, read_json, some
from vsa.checkpoints.weights import WeightSource
from vsa.data.codecs import vae_kind
from vsa.data.pretrained import weights_digest
from vsa.models.init import without_memory
from vsa.models.network import Network

if TYPE_CHECKING:
    # not imported at run time, since the data module imports the video libraries
    from vsa.data.plan_datamodule import PlanDataModule

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
        sparse = self._exported
        if sparse is None and (any(map(is_gate, self)) or self._is_sparse):
            sparse = self._described()
        return sparse if sparse is None or self.step_list is None else sparse.sampled_at(self.step_list)

    @property
    def _is_sparse(self) -> bool:
        """Whether its config has another attention than dense attention."""
        return {"model", "attention"} <= self.run_config.keys() and not self._meta.is_dense

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

        self.require_config("model", "attention")
        check_targets(self.run_config)
        return model_factory(self.run_config)(**options)

    def require_config(self, *keys: str) -> None:
        """Raise ValueError if the config lacks one of `keys`."""
        for key in keys:
            if key not in self.run_config:
                raise ValueError(f"checkpoint {self.source} has no config for {key}")

    def refuse_other_architecture(self, model: Network) -> None:
        refuse_other_sizes(model, self.checkpoint)


class PretrainedWeights(WeightSource):
    """Weights in diffusers' Wan layout.

    Args:
        source: folder of a pipeline or of a transformer, or a Hugging Face id.
        place: folder of the transformer, downloaded if necessary, or its file.
    """

    group: Group = "model"

    def __init__(self, source: str, place: Path):
        self._place = place
        files = WeightFiles(place)
        folder = files.folder
        state = read_sampling_part(folder) or {}
        self._sparse = read_sparse_config(folder) if has_sparse_config(folder) else None
        if self._sparse is not None:
            state["step_list"] = self._sparse.step_list
        super().__init__(source, files, self._names(files.keys), state)

    def _names(self, keys: list[str]) -> dict[str, str]:
        return {key: key for key in keys if not is_unused(key)}

    def __str__(self) -> str:
        return self.name

    @property
    def digest(self) -> str:
        return weights_digest(self.folder)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return read_json(self.folder / "config.json")

    @property
    def sparse(self) -> SparseAttentionConfig | None:
        return self._sparse

    @property
    def schedule(self) -> SparsitySchedule:
        """The exported top-k at every step."""
        return ConstantSparsity(sparsity=0.0) if self.sparse is None else ExportedSparsity(self.sparse)

    @property
    def _described(self) -> SparseAttentionConfig | None:
        """Description of the gates; ValueError if there are gates without a description."""
        return read_sparse_config(self.folder) if any(map(is_gate, self)) else self.sparse

    def network(self, **options: Any) -> Network:
        backend = options.pop("backend", None)
        attention: Callable[..., Any] = options.pop("attention", None) or attention_of(self._described, backend)
        config = self.config
        try:
            return network_of(config, attention)
        except ValueError as error:
            raise ValueError(f"{self.described_by}: {error}") from None

    @property
    def noise_range(self) -> NoiseRange | None:
        return expert_range(self._place, self.config)

    @property
    def described_by(self) -> str:
        """The file that says the sizes, for messages."""
        return str(self.folder / "config.json")

    def refuse_other_architecture(self, model: Network) -> None:
        try:
            theirs, ours = self._settings(self.config), self._settings(transformer_config(model))
        except ValueError as error:
            raise ValueError(f"{self.described_by}: {error}") from None
        pairs = {key: (value, ours.get(key)) for key, value in theirs.items()}
        other = [f"{key}={value}, the model has {mine}" for key, (value, mine) in pairs.items() if value != mine]
        if other:
            fitting = named_sizes(theirs)
            fits = f"model={fitting} has" if fitting else "model=from_checkpoint takes"
            raise ValueError(f"{self.described_by} has {'; '.join(other)}; {fits} the sizes of init_from")
        sparse = self._described
        if sparse is not None and (odd := set(sparse.gate_keys) ^ {name for name in self if is_gate(name)}):
            raise ValueError(
                f"{self.name}: the weights do not hold the gates that {SPARSE_CONFIG} names, they differ in {some(odd)}"
            )

    def _settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config with the defaults of its class."""
        if config.get("_class_name") == CLASS_NAME:
            return {"_class_name": CLASS_NAME, **video_dit_arguments(config)}
        with without_memory():
            # lists and tuples are equal
            return json.loads(json.dumps(transformer_config(network_of(config, FullAttention))))

    def check(self, model: Network, gates: Gates) -> None:
        super().check(model, gates)
        if gates == "required" and self._sparse is not None:
            refuse_other_attention(model, self._sparse, str(self.folder / SPARSE_CONFIG))

    def check_data(self, data: PlanDataModule) -> None:
        super().check_data(data)
        if self.statistics is None and data.codec.statistics is not None:
            # a VAE with statistics comes from a Wan pipeline, whose models expect them and zero-padded captions
            for key, ours, expected in (("stats", data.stats, "codec"), ("text_padding", data.text_padding, "zeros")):
                if ours != expected:
                    raise ValueError(f"{self.source} was trained with data.{key}={expected}, the data have {ours}")
        vae = self.folder.parent / "vae"
        if self.folder.name not in EXPERTS or not (vae / "config.json").is_file():
            return
        # for a Hugging Face id only the config of the VAE was downloaded, not its weights
        source = str(vae) if Path(self.source).exists() else hub_parts(self.source)[0]
        theirs = vae_kind(source)(source)
        if theirs.hash != data.codec.hash:
            raise ValueError(
                f"{self.source} has the VAE {theirs.id} (hash {theirs.hash}), "
                f"data.codec is {data.codec.id} (hash {data.codec.hash})"
            )


class FileWeights(PretrainedWeights):
    """Weights of a Wan model in one file or in a folder, in Wan's own or diffusers' names under any prefix.

    Without a `config.json` beside them, the sizes are those of the shapes.
    """

    def _names(self, keys: list[str]) -> dict[str, str]:
        stripped = unprefixed(keys, self.name)
        rename = wan_to_diffusers if "head.head.weight" in stripped else str
        try:
            named = {rename(name): key for name, key in stripped.items()}
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return {name: key for name, key in named.items() if not is_unused(name)}

    @property
    def name(self) -> str:
        return str(self._place)

    @property
    def described_by(self) -> str:
        path = self.folder / "config.json"
        return str(path) if path.is_file() else f"{self.name}, without config.json"

    @property
    def digest(self) -> str:
        return weights_digest(self.folder, self.files.names)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        path = self.folder / "config.json"
        theirs = read_json(path) if path.is_file() else None
        if theirs is not None and theirs.get("_class_name") != "WanModel":
            return theirs
        try:
            if theirs is not None:
                return config_of_wan(theirs, self.shapes)
            config = config_of_shapes(self.shapes)
        except ValueError as error:
            raise ValueError(f"{self.described_by}: {error}") from None
        warnings.warn(
            f"{self.name} has no config.json: its shapes give the sizes, and Wan's published values are taken for what "
            f"they do not determine (attention_head_dim={HEAD_DIM}, eps={EPS})",
            stacklevel=2,
        )
        return config


def is_run(spec: str | Path) -> bool:
    """Whether `spec` is a run folder or a checkpoint folder."""
    return (Path(spec) / "checkpoints").is_dir() or (Path(spec) / "state.json").is_file()


def open_weights(spec: str | Path, group: Group | None = None) -> WeightSource:
    """The weights of a run (its newest checkpoint), a checkpoint folder, another folder, a file or a Hugging Face id.

    Args:
        spec: the source, see `pretrained_folder` and `FileWeights`; `BASE+ADAPTERS` merges a file of adapters into one.
        group: see `RunWeights`.

    Raises:
        ValueError: there are no weights, or a group is requested from a source that is not a run.
    """
    if (parts := adapted_spec(spec)) is not None:
        return AdaptedWeights(open_weights(parts[0], group), parts[1])
    folder = local_folder(spec)
    if is_run(folder):
        return RunWeights(resolve_checkpoint(folder), group)
    if group is not None:
        raise ValueError(f"--weights {group} applies to training runs only; {spec} is not a run folder")
    refuse_experts(spec, folder)
    if holds_file(folder):
        return FileWeights(str(spec), folder)
    folder = pretrained_folder(folder)
    is_wan = read_json(folder / "config.json").get("_class_name") == "WanModel"
    return (FileWeights if is_wan else PretrainedWeights)(str(spec), folder)


def open_network(
    spec: str | Path, *, device: torch.device | str = "cpu", backend: Backend | None = None
) -> tuple[Network, WeightSource]:
    """The network of a weights folder in float32 with its weights, and their source.

    Args:
        spec: folder or Hugging Face id in diffusers' or Wan's layout.
        device: device of the parameters.
        backend: backend of the sparse attention; None: default of the device.

    Raises:
        ValueError: an architecture that `VideoDiT` does not support, or weights that do not fit it.
    """
    if is_run(spec):
        pretrained_folder(spec)
    source = open_weights(spec)
    with without_memory():
        model = source.network(backend=backend)
    gates: Gates = "required" if gate_names(model) else "absent"
    source.check(model, gates)
    source.load(model.to_empty(device=device), gates)
    return model, source


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
