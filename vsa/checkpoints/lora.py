"""Low-rank adapters on a video DiT, through peft.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685), section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.models.video_dit import VideoDiT
from vsa.settings import AtLeastOne, Positive, checked

_ADAPTER = "default"


@checked
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Which linear layers get an adapter `W + (alpha / rank) * B A`, and of what rank.

    Args:
        rank: rows of A and columns of B.
        alpha: the adapter's scale times its rank.
        targets: endings of the layers' names.

    Raises:
        ValueError: a value out of range.
    """

    rank: AtLeastOne
    alpha: Positive
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")

    def inject(self, model: VideoDiT) -> None:
        """Put adapters into `model` in place; B starts at zero, so the output stays what it was.

        Raises:
            ValueError: peft is not installed, or a target names no linear layer of a block.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ValueError("task.lora needs the package peft: pip install 'vsa-train[lora]'") from error
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for target in self.targets:
            if not any(name.endswith(f".{target}") for name in linear):
                raise ValueError(f"lora.targets: no linear layer is named {target!r}")
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type] (a float works)
            target_modules=list(self.targets),
        )
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are no adapter's, under the names they have without adapters."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }


def merged_tensors(tensors: Mapping[str, Tensor], lora: LoRA) -> dict[str, Tensor]:
    """Tensors of a model with adapters, as those of the plain model with the adapters added to its weights."""
    merged = {}
    for name, value in tensors.items():
        if ".lora_" in name:
            continue
        layer, base, field = name.rpartition(".base_layer.")
        if base and field == "weight":
            a, b = (tensors[f"{layer}.lora_{part}.{_ADAPTER}.weight"] for part in "AB")
            value = value + (lora.alpha / lora.rank) * torch.mm(b.float(), a.float()).to(value.dtype)
        merged[f"{layer}.{field}" if base else name] = value
    return merged


def plain_tensors(checkpoint: Checkpoint, group: str) -> dict[str, Tensor]:
    """Tensors of "model" or "ema" under the plain model's names, adapters merged."""
    tensors = checkpoint.tensors(group)
    node = checkpoint.state.get("config", {}).get("task", {}).get("lora")
    if node is None:
        return tensors
    return merged_tensors(tensors, LoRA(**{key: value for key, value in node.items() if key != "_target_"}))
