"""What a new run starts from: the weights of a run of this project, or a folder or hub id in diffusers' Wan layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from vsa.checkpoints.lora import own_parameters, plain_tensors
from vsa.checkpoints.run_checkpoint import Checkpoint, resolve_checkpoint
from vsa.checkpoints.wan import (
    Gates,
    check_pretrained,
    gate_names,
    load_pretrained,
    refuse_other_gates,
    refuse_other_tensors,
    refuse_random_gates,
)
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import pretrained_folder
from vsa.data.codecs import WanVAE
from vsa.data.pretrained import weights_digest
from vsa.models.sharding import local, place
from vsa.models.video_dit import VideoDiT

if TYPE_CHECKING:
    # the data module loads the video libraries
    from vsa.data.datamodule import PlanDataModule


class Start(Protocol):
    """Weights that a model is checked against and filled with.

    Attributes:
        source: what names them again: a checkpoint folder of a run, a folder or a hub id.
        statistics: mean and standard deviation `[C]` of the latents they were trained on, as lists; None if unknown.
        step_list: timesteps of a few-step generator; None for a model of all noise levels.
    """

    @property
    def source(self) -> str: ...

    @property
    def statistics(self) -> tuple[list[float], list[float]] | None: ...

    @property
    def step_list(self) -> Sequence[float] | None: ...

    @property
    def digest(self) -> str:
        """Tells these weights from others."""
        ...

    def check(self, model: VideoDiT, gates: Gates) -> None:
        """Refuse weights that do not fit; nothing is copied, the model may be on the meta device.

        Args:
            model: without adapters.
            gates: see `vsa.checkpoints.wan.load_pretrained`.

        Raises:
            ValueError: names what differs.
        """
        ...

    def check_data(self, data: PlanDataModule) -> None:
        """Refuse data that the weights do not understand, where that is known.

        Raises:
            ValueError: names the setting with both values.
        """
        ...

    def load(self, model: VideoDiT, gates: Gates) -> None:
        """Fill every parameter that is no adapter's; each rank reads its own part of sharded ones."""
        ...


def resolve_start(spec: str) -> Start:
    """The weights that `init_from=spec` names.

    Raises:
        ValueError: nothing there that holds weights.
    """
    path = Path(spec)
    if (path / "checkpoints").is_dir() or (path / "state.json").is_file():
        return RunStart(checkpoint=resolve_checkpoint(path))
    return PretrainedStart(source=spec, folder=pretrained_folder(spec))


def refuse_other_sizes(model: VideoDiT, checkpoint: Checkpoint) -> None:
    """Raise ValueError when a run's config says what shapes of tensors do not tell, or tell less clearly, otherwise."""
    ours_by_key = {
        "num_attention_heads": model.num_heads,
        "attention_head_dim": model.head_dim,
        "num_layers": len(model.blocks),
        "patch_size": list(model.patch_size),
        "rope_theta": model.rope_theta,
        "absolute_positions": model.absolute_positions,
    }
    theirs_by_key = checkpoint.state.get("config", {}).get("model", {})
    for key, value in ours_by_key.items():
        if theirs_by_key.get(key, value) != value:
            raise ValueError(f"{checkpoint.path} has model.{key}={theirs_by_key[key]}, the model has {value}")


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Weights of a run of this project: the averaged ones where there are any, adapters merged.

    Args:
        checkpoint: to read from.
    """

    checkpoint: Checkpoint

    @property
    def source(self) -> str:
        return str(self.checkpoint.path)

    @property
    def statistics(self) -> tuple[list[float], list[float]] | None:
        state = self.checkpoint.state
        return (state["latent_mean"], state["latent_std"]) if "latent_mean" in state else None

    @property
    def step_list(self) -> list[float] | None:
        return self.checkpoint.state.get("step_list")

    @property
    def digest(self) -> str:
        return self.checkpoint.state["files"][f"{self._group}.safetensors"]

    @property
    def _group(self) -> str:
        return "ema" if self.checkpoint.has("ema") else "model"

    def check(self, model: VideoDiT, gates: Gates) -> None:
        refuse_other_sizes(model, self.checkpoint)
        if gates == "initial":
            refuse_random_gates(model)
        found = {name: tuple(value.shape) for name, value in plain_tensors(self.checkpoint, self._group).items()}
        ours = set(gate_names(model))
        refuse_other_gates(ours, {name for name in found if is_gate(name) or name in ours}, gates, self.source)
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        left_out = set() if gates == "required" else ours
        refuse_other_tensors({n: shape for n, shape in expected.items() if n not in left_out}, found, self.source)

    def check_data(self, data: PlanDataModule) -> None:
        state = self.checkpoint.state
        for key, ours in (("codec", data.codec), ("text_encoder", data.text_encoder)):
            theirs = state.get(key)
            if theirs is not None and theirs["hash"] != ours.hash:
                raise ValueError(
                    f"{self.source} was trained with {key} {theirs['id']} (hash {theirs['hash']}), "
                    f"data.{key} is {ours.id} (hash {ours.hash})"
                )
        node = state.get("config", {}).get("data")
        padding = data.text_padding if node is None else node.get("text_padding", "mask")
        if padding != data.text_padding:
            raise ValueError(f"{self.source} has data.text_padding={padding}, the data have {data.text_padding}")

    @torch.no_grad()
    def load(self, model: VideoDiT, gates: Gates) -> None:
        tensors = plain_tensors(self.checkpoint, self._group)
        for name, parameter in own_parameters(model).items():
            if name in tensors:
                local(parameter).copy_(local(place(tensors[name], parameter)))
        if gates == "initial":
            for block in model.blocks:
                block.method.reset_extra_parameters()  # type: ignore[union-attr, operator]


@dataclass(frozen=True, kw_only=True)
class PretrainedStart:
    """Weights in diffusers' Wan layout.

    Args:
        source: a pipeline's folder, a transformer's folder, or a hub id.
        folder: the transformer's, downloaded by now.
    """

    source: str
    folder: Path
    statistics: None = None
    step_list: None = None

    @property
    def digest(self) -> str:
        return weights_digest(self.folder)

    def check(self, model: VideoDiT, gates: Gates) -> None:
        check_pretrained(model, self.folder, gates=gates)

    def check_data(self, data: PlanDataModule) -> None:
        if data.codec.statistics is not None:
            # a VAE that publishes statistics comes from such a pipeline, whose models expect them and padded captions
            for key, ours, wanted in (
                ("stats", data.stats, "codec"),
                ("text_padding", data.text_padding, "zeros"),
            ):
                if ours != wanted:
                    raise ValueError(f"{self.source} was trained with data.{key}={wanted}, the data have {ours}")
        vae = self.folder.parent / "vae"
        if self.folder.name != "transformer" or not (vae / "config.json").is_file():
            return
        # of a hub id the config came with the transformer, its weights did not
        theirs = WanVAE(str(vae) if Path(self.source).exists() else self.source)
        if theirs.hash != data.codec.hash:
            raise ValueError(
                f"{self.source} has the VAE {theirs.id} (hash {theirs.hash}), "
                f"data.codec is {data.codec.id} (hash {data.codec.hash})"
            )

    def load(self, model: VideoDiT, gates: Gates) -> None:
        load_pretrained(model, self.folder, gates=gates, parameters=own_parameters(model))
