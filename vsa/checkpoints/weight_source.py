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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vsa.attention.full import FullAttention
from vsa.attention.sparsity import ConstantSparsity, SparsitySchedule
from vsa.attention.video_sparse import Backend
from vsa.checkpoints.adapter_files import AdaptedWeights, adapted_spec
from vsa.checkpoints.experts import EXPERTS, NoiseRange, expert_range, refuse_experts
from vsa.checkpoints.exported_sparsity import ExportedSparsity
from vsa.checkpoints.held_files import (
    EPS,
    HEAD_DIM,
    PREFIXES,
    WEIGHTS,
    config_of_shapes,
    holds_file,
    unprefixed,
    weights_file,
)
from vsa.checkpoints.network_settings import network_of
from vsa.checkpoints.original_names import Rows, original_rows, own_name
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.run_weights import Group, RunWeights
from vsa.checkpoints.sampling_settings import read_sampling_part
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    SparseAttentionConfig,
    has_sparse_config,
    read_sparse_config,
)
from vsa.checkpoints.wan import (
    Gates,
    attention_of,
    gate_names,
    refuse_other_attention,
)
from vsa.checkpoints.wan_config import CLASS_NAME, named_sizes, transformer_config, video_dit_arguments
from vsa.checkpoints.wan_names import config_of_wan, is_gate, is_unused, wan_to_diffusers
from vsa.checkpoints.weight_files import (
    WeightFiles,
    hub_parts,
    local_folder,
    pretrained_folder,
    read_json,
    some,
)
from vsa.checkpoints.weights import WeightSource
from vsa.data.codecs import vae_kind
from vsa.data.pretrained import weights_digest
from vsa.models.init import without_memory
from vsa.models.network import Network

if TYPE_CHECKING:
    # not imported at run time, since the data module imports the video libraries
    from vsa.data.plan_datamodule import PlanDataModule


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
    """Weights in one file or in a folder, in original or diffusers' names under any prefix.

    Without a `config.json` beside them they are of Wan, and the sizes are those of the shapes.
    """

    def _names(self, keys: list[str]) -> dict[str, str]:
        self._held: dict[str, Rows] = {}
        config = (self._place if self._place.is_dir() else self._place.parent) / "config.json"
        if config.is_file() and read_json(config).get("_class_name") not in (CLASS_NAME, "WanModel", None):
            return self._names_of_class(keys, read_json(config))
        stripped = unprefixed(keys, self.name)
        rename = wan_to_diffusers if "head.head.weight" in stripped else str
        try:
            named = {rename(name): key for name, key in stripped.items()}
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return {name: key for name, key in named.items() if not is_unused(name)}

    def _names_of_class(self, keys: list[str], config: Mapping[str, Any]) -> dict[str, str]:
        with without_memory():
            shapes = {name: tuple(p.shape) for name, p in network_of(config, FullAttention).named_parameters()}
        own, originals = {}, original_rows(shapes, config["_class_name"])
        for prefix in PREFIXES:
            own = {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}
            self._held = {name: rows for name, rows in originals.items() if name not in own and rows.key in own}
            if self._held or own.keys() & shapes.keys():
                break
        # H3's file has a buffer, which its class computes
        used = {rows.key for rows in self._held.values()} | {"rope.inv_freq"}
        others = {own_name(name, config["_class_name"]): key for name, key in own.items() if name not in used}
        return others | {name: own[rows.key] for name, rows in self._held.items()}

    def _read(self, name: str) -> Tensor:
        value = super()._read(name)
        return self._held[name].of(value) if name in self._held else value

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        return self[name][start:stop] if name in self._held else super()._rows(name, start, stop)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().shapes
        sliced = {name: rows for name, rows in self._held.items() if shapes[name][:1] == (rows.total,)}
        return shapes | {name: (rows.stop - rows.start, *shapes[name][1:]) for name, rows in sliced.items()}

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
    return (Path(spec) / "checkpoints").exists() or (Path(spec) / "state.json").is_file()


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
    of_diffusers = not is_wan and weights_file(folder).name.startswith(WEIGHTS)
    return (PretrainedWeights if of_diffusers else FileWeights)(str(spec), folder)


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
