"""Parameter initialisation of the video DiT."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Init = Literal["gpt_neox", "wan"]


def init_parameters(model: nn.Module, *, init: Init, dim: int, num_layers: int) -> None:
    """Initialise every parameter of the video DiT except those that its attention methods reset afterwards.

    Both schemes use zero biases, unit norm weights, N(0, 0.02) for the text and time MLPs, a zero head (`proj_out`) and
    N(0, 1 / sqrt(dim)) for the modulation tables, as in diffusers. The second argument of N is a standard deviation.

    - `gpt_neox` (VSA paper, appendix C): every other weight N(0, sqrt(2 / (5 dim))), output projections
      (`to_out.0`, `ffn.net.2`) N(0, 2 / (num_layers sqrt(dim))), as in GPT-NeoX.
    - `wan` (Wan2.1): every other weight Xavier-uniform, a convolution flattened to a matrix.

    Args:
        model: the model, with parameters on a device other than meta.
        init: "gpt_neox" or "wan".
        dim: model width.
        num_layers: number of blocks.
    """
    small, output = math.sqrt(2 / (5 * dim)), 2 / (num_layers * math.sqrt(dim))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            weight = module.weight
            if name == "proj_out":
                nn.init.zeros_(weight)
            elif name.startswith(("condition_embedder.text_embedder.", "condition_embedder.time_embedder.")):
                nn.init.normal_(weight, std=0.02)
            elif init == "gpt_neox":
                nn.init.normal_(weight, std=output if name.endswith(("to_out.0", "ffn.net.2")) else small)
            else:
                bound = math.sqrt(6 / (weight.shape[0] + weight[0].numel()))
                nn.init.uniform_(weight, -bound, bound)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
        table = getattr(module, "scale_shift_table", None)
        if table is not None:
            nn.init.normal_(table, std=dim**-0.5)


@contextmanager
def without_memory() -> Iterator[None]:
    """Build networks in the block on the meta device: names and shapes without values or initialisation."""
    with torch.device("meta"), NothingDrawn():
        yield


class NothingDrawn(TorchFunctionMode):
    """Skips `torch.nn.init`, which takes as long as the rest of the construction even on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
