"""Common interface of all sources of weights, see `vsa.checkpoints.weight_source.open_weights`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from vsa.checkpoints.lora import own_parameters
from vsa.checkpoints.sampling_settings import sampling_part
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.wan import Gates, gate_names, refuse_other_gates, refuse_random_gates
from vsa.checkpoints.wan_config import CLASS_NAME
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import TensorFiles, finite, refuse_other_tensors
from vsa.diffusion.sampler import step_list
from vsa.models.network import Network
from vsa.models.sharding import fill

if TYPE_CHECKING:
    # not imported at run time, since the data module imports the video libraries
    from vsa.data.plan_datamodule import PlanDataModule


class WeightSource(Mapping[str, Tensor], ABC):
    """Tensors of a network by parameter name, with adapters merged, read one at a time; opening reads headers only.

    A tensor with NaN or infinity is a ValueError where it is read.

    Args:
        source: specification that opens the weights again: a checkpoint folder, another folder or a Hugging Face id.
        files: files with the tensors.
        keys: names in the files by parameter name.
        state: known facts about the weights, under the keys of a run's `state.json`.
    """

    def __init__(self, source: str, files: TensorFiles, keys: Mapping[str, str], state: Mapping[str, Any]):
        self.source, self.files, self.keys_in_files, self.state = source, files, keys, state

    def __getitem__(self, name: str) -> Tensor:
        return finite(self._read(name), name, self.name)

    def _read(self, name: str) -> Tensor:
        return self.files.read(self.keys_in_files[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_in_files)

    def __len__(self) -> int:
        return len(self.keys_in_files)

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def places(self) -> list[Path]:
        """Folders and files that were opened."""
        return [self.folder, *(self.folder / name for name in self.files.names)]

    @property
    def name(self) -> str:
        """Name for messages."""
        return str(self.folder)

    def __str__(self) -> str:
        return self.name

    @property
    def class_name(self) -> str:
        """Class of the transformer in diffusers whose parameters these are."""
        # a run may have no counterpart in diffusers, but has the parameters of Wan then
        model = self.run_config.get("model")
        return (self.config.get("_class_name") if model is None else model.get("class_name")) or CLASS_NAME

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.files.shapes[key] for name, key in self.keys_in_files.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self.files.dtype(key) for name, key in self.keys_in_files.items()}

    @property
    def run_config(self) -> Mapping[str, Any]:
        """The config of a run, or the part of it that an export contains."""
        return self.state.get("config") or {}

    @property
    def statistics(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation `[C]` of the training latents; None if unknown."""
        return (self.state["latent_mean"], self.state["latent_std"]) if "latent_mean" in self.state else None

    @property
    def step_list(self) -> tuple[float, ...] | None:
        """Timesteps of a few-step generator; None for a model that is sampled with many steps."""
        steps = self.state.get("step_list")
        return None if steps is None else step_list(steps)

    @property
    def sampling(self) -> dict[str, Any] | None:
        """See `vsa.checkpoints.sampling_settings`; None if unknown."""
        return sampling_part(self.state)

    @property
    def noise_range(self) -> tuple[float, float] | None:
        """Noise levels that an expert is for; None: all, or unknown."""
        bounds = (self.run_config.get("task", {}).get("objective") or {}).get("noise_range")
        return None if bounds is None or list(bounds) == [0, 1] else (bounds[0], bounds[1])

    @property
    @abstractmethod
    def digest(self) -> str:
        """Digest that identifies the weights."""

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """`config.json` of the equivalent `WanTransformer3DModel`."""

    @property
    @abstractmethod
    def sparse(self) -> SparseAttentionConfig | None:
        """Description of the sparse attention; None without gates or windows, or if no file describes them."""

    @abstractmethod
    def network(self, **options: Any) -> Network:
        """A network for these weights, without values; `attention` replaces its attention."""

    @abstractmethod
    def refuse_other_architecture(self, model: Network) -> None:
        """Raise ValueError if settings differ from the model's that shapes do not determine, or not clearly."""

    def check(self, model: Network, gates: Gates) -> None:
        """Refuse weights that do not fit; nothing is copied, so the model may be on the meta device.

        Args:
            model: model with or without adapters.
            gates: required (sparse weights into a model with the same gates), initial (dense weights into a sparse
                model, whose gates get their documented initial values, which must be the identity), or absent (dense
                weights into a dense model).

        Raises:
            ValueError: names the config key, tensor or file, with both values if two differ.
        """
        if gates not in get_args(Gates):
            raise ValueError(f"gates must be required, initial or absent, got {gates!r}")
        self.refuse_other_architecture(model)
        ours = set(gate_names(model))
        refuse_other_gates(ours, {name for name in self if is_gate(name) or name in ours}, gates, self.name)
        if gates == "initial":
            refuse_random_gates(model)
        left_out = set() if gates == "required" else ours
        expected = {name: tuple(p.shape) for name, p in own_parameters(model).items() if name not in left_out}
        refuse_other_tensors(expected, self.shapes, self.name)

    def check_data(self, data: PlanDataModule) -> None:
        """Refuse data that do not fit the weights, as far as known.

        Raises:
            ValueError: names the setting with both values.
        """
        for key, ours in (("codec", data.codec), ("text_encoder", data.text_encoder)):
            theirs = self.state.get(key)
            if theirs is not None and theirs["hash"] != ours.hash:
                raise ValueError(
                    f"{self.source} was trained with {key} {theirs['id']} (hash {theirs['hash']}), "
                    f"data.{key} is {ours.id} (hash {ours.hash})"
                )
        node = self.run_config.get("data")
        padding = data.text_padding if node is None else node.get("text_padding", "mask")
        if padding != data.text_padding:
            raise ValueError(f"{self.source} has data.text_padding={padding}, the data have {data.text_padding}")

    @torch.no_grad()
    def load(self, model: Network, gates: Gates) -> None:
        """Fill every parameter that does not belong to an adapter, one at a time; each rank reads its own rows.

        Args:
            model: model on real devices, which may be sharded; a model on the meta device needs `to_empty` first.
            gates: see `check`.

        Raises:
            ValueError: the weights do not fit (`check`), or a parameter is still on the meta device.
        """
        self.check(model, gates)
        parameters = own_parameters(model)
        for name, parameter in parameters.items():
            if parameter.is_meta:
                raise ValueError(f"{name} is on the meta device: move the model with to_empty first")
        for name, parameter in parameters.items():
            if name in self.keys_in_files:
                fill(parameter, partial(self._rows, name))
        if gates == "initial":
            for method in model.attention_layers:
                method.reset_extra_parameters()

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        return finite(self.files.rows(self.keys_in_files[name], start, stop), name, self.name)
