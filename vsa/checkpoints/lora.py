"""Low-rank adapters on a network, through peft.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vsa.models.network import Network
from vsa.settings import AtLeastOne, Positive, validated

_ADAPTER = "default"


@validated
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters `W + (alpha / rank) * B A` of linear layers.

    Args:
        rank: rows of A and columns of B.
        alpha: scale of the adapter times its rank.
        targets: endings of the names of the adapted layers; None: all linear layers of a block but those of its image
            tokens, see `Network.adapted_layers`.
    """

    rank: AtLeastOne
    alpha: Positive
    targets: tuple[str, ...] | None = None

    def inject(self, model: Network) -> None:
        """Add adapters to `model` in place; B starts at zero, so the output does not change.

        Raises:
            ValueError: peft is not installed, or a target matches no linear layer of a block.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ValueError("task.lora needs the package peft: pip install 'vsa-train[lora]'") from error
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        targets = model.adapted_layers if self.targets is None else self.targets
        for target in targets:
            if not any(name.endswith(f".{target}") for name in linear):
                raise ValueError(f"lora.targets: no linear layer is named {target!r}")
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type] (a float works)
            target_modules=list(targets),
        )
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Names in a model with adapters by the names in the plain model, without the adapters' own."""
    return {name.replace(".base_layer.", "."): name for name in names if ".lora_" not in name}


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that do not belong to adapters, by their names without adapters."""
    parameters = dict(model.named_parameters())
    return {plain: parameters[name] for plain, name in plain_names(parameters).items()}


class LowRank(NamedTuple):
    """An adapter `W + scale * b a`: a `[rank, in]`, b `[out, rank]`."""

    a: Tensor
    b: Tensor
    scale: float


def adapters_of(read: Callable[[str], Tensor], names: Iterable[str], lora: LoRA) -> dict[str, LowRank]:
    """The adapters by the names of the layers they belong to; `read` and `names` have names with adapters."""
    layers = [name.removesuffix(".base_layer.weight") for name in names if name.endswith(".base_layer.weight")]
    halves = {layer: [read(f"{layer}.lora_{part}.{_ADAPTER}.weight") for part in "AB"] for layer in layers}
    return {layer: LowRank(a, b, lora.alpha / lora.rank) for layer, (a, b) in halves.items()}


def merged_tensor(read: Callable[[str], Tensor], name: str, lora: LoRA) -> Tensor:
    """A tensor of the plain model with merged adapters; `read` returns tensors by their names with adapters."""
    value = read(name)
    layer, base, field = name.rpartition(".base_layer.")
    if not base or field != "weight":
        return value
    a, b = (read(f"{layer}.lora_{part}.{_ADAPTER}.weight") for part in "AB")
    return value + (lora.alpha / lora.rank) * torch.mm(b.float(), a.float()).to(value.dtype)
