"""Layers that compute in another dtype than their parameters have: bf16 products over fp32 weights.

A layer rounds its parameters when it runs, hence inside a compiled block and inside what activation checkpointing
computes again, which keeps no rounded copy until its backward. Gradients arrive, and are summed, in the dtype of the
parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rounded(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The parameter in a dtype; None: as it is."""
    return parameter if dtype is None else parameter.to(dtype)


class RoundedLinear(nn.Linear):
    """A linear layer of tokens and parameters in `compute_dtype`."""

    compute_dtype: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else rounded(self.bias, self.compute_dtype)
        return F.linear(rounded(input, self.compute_dtype), rounded(self.weight, self.compute_dtype), bias)


class RoundedRMSNorm(nn.RMSNorm):
    """An RMS norm whose parameters are in `compute_dtype`."""

    compute_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else rounded(self.weight, self.compute_dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


_ROUNDED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: RoundedLinear, nn.RMSNorm: RoundedRMSNorm}


def compute_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let every module of `model` round its parameters to `dtype` where it uses them; None: let none do so.

    Names and dtype of the parameters stay. Adapters have to be there already.

    Raises:
        ValueError: names a module with parameters that does not know how.
    """
    for name, module in model.named_modules():
        if dtype is not None and type(module) in _ROUNDED:
            # in place, as adapters and attention methods hold the module too
            module.__class__ = _ROUNDED[type(module)]
        if hasattr(type(module), "compute_dtype"):
            module.compute_dtype = dtype  # type: ignore[assignment] (of that class)
        elif dtype is not None and next(module.parameters(recurse=False), None) is not None:
            known = ", ".join(f"nn.{kind.__name__}" for kind in _ROUNDED)
            raise ValueError(
                f"{name} ({type(module).__name__}) cannot compute in {str(dtype).removeprefix('torch.')} over "
                f"{next(module.parameters(recurse=False)).dtype} parameters: build it of {known}, give it a "
                "compute_dtype, or use trainer=fsdp"
            )
