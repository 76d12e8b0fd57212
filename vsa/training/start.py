"""What a new run starts from: the weights of a run of this project, or a folder or hub id in diffusers' Wan layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from vsa.data.codecs import Codec, WanVAE
from vsa.models.checkpoint import (
    Gates,
    check_pretrained,
    gate_names,
    load_pretrained,
    refuse_other_gates,
    refuse_other_tensors,
)
from vsa.models.key_names import is_gate
from vsa.models.sharding import local, place
from vsa.models.video_dit import VideoDiT
from vsa.models.weight_files import pretrained_folder
from vsa.training.checkpointing import Checkpoint, resolve_checkpoint
from vsa.training.lora import own_parameters, plain_tensors


class Start(Protocol):
    """Weights that a model is checked against and filled with."""

    def check(self, model: VideoDiT, gates: Gates) -> None:
        """Refuse weights that do not fit; nothing is copied, the model may be on the meta device.

        Args:
            model: without adapters.
            gates: see `vsa.models.checkpoint.load_pretrained`.

        Raises:
            ValueError: names what differs.
        """
        ...

    def check_codec(self, codec: Codec) -> None:
        """Refuse data of another latent space than the weights were trained in, where that is known.

        Raises:
            ValueError: names both codecs.
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


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Weights of a run of this project: the averaged ones where there are any, adapters merged.

    Args:
        checkpoint: to read from.
    """

    checkpoint: Checkpoint

    @property
    def _group(self) -> str:
        return "ema" if self.checkpoint.has("ema") else "model"

    def check(self, model: VideoDiT, gates: Gates) -> None:
        what = str(self.checkpoint.path)
        # what shapes do not tell, or tell less clearly
        ours_by_key = {
            "num_attention_heads": model.num_heads,
            "attention_head_dim": model.head_dim,
            "num_layers": len(model.blocks),
            "patch_size": list(model.patch_size),
            "rope_theta": model.rope_theta,
            "absolute_positions": model.absolute_positions,
        }
        theirs_by_key = self.checkpoint.state.get("config", {}).get("model", {})
        for key, value in ours_by_key.items():
            if theirs_by_key.get(key, value) != value:
                raise ValueError(f"{what} has model.{key}={theirs_by_key[key]}, the model has {value}")
        found = {name: tuple(value.shape) for name, value in plain_tensors(self.checkpoint, self._group).items()}
        ours = set(gate_names(model))
        refuse_other_gates(ours, {name for name in found if is_gate(name) or name in ours}, gates, what)
        wanted = {
            name: tuple(p.shape) for name, p in model.named_parameters() if gates == "required" or name not in ours
        }
        refuse_other_tensors(wanted, found, what)

    def check_codec(self, codec: Codec) -> None:
        theirs = self.checkpoint.state.get("codec")
        if theirs is not None and theirs["hash"] != codec.hash:
            raise ValueError(
                f"{self.checkpoint.path} was trained on latents of {theirs['id']} (hash {theirs['hash']}), "
                f"data.codec is {codec.id} (hash {codec.hash})"
            )

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

    def check(self, model: VideoDiT, gates: Gates) -> None:
        check_pretrained(model, self.folder, gates=gates)

    def check_codec(self, codec: Codec) -> None:
        vae = self.folder.parent / "vae"
        if self.folder.name != "transformer" or not (vae / "config.json").is_file():
            return
        theirs = WanVAE(str(vae))
        if theirs.hash != codec.hash:
            raise ValueError(
                f"{self.source} has the VAE {theirs.id} (hash {theirs.hash}), "
                f"data.codec is {codec.id} (hash {codec.hash})"
            )

    def load(self, model: VideoDiT, gates: Gates) -> None:
        load_pretrained(model, self.folder, gates=gates, parameters=own_parameters(model))
