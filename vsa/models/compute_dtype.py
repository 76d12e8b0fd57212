"""Layers that compute in another dtype than that of their parameters: bf16 products over fp32 weights.

A layer rounds its parameters in its forward pass, hence inside a compiled block and inside the region that activation
checkpointing recomputes, so that no rounded copy is kept for the backward pass. Gradients arrive, and are summed, in
the dtype of the parameters.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ComputeDtype = Literal["auto", "bfloat16", "float32"]
"""Setting of the dtype to which fp32 parameters are rounded for use; auto: bfloat16 on CUDA, float32 elsewhere."""


def rounds_to(setting: ComputeDtype, device_type: str) -> torch.dtype | None:
    """The dtype to which parameters are rounded on a device type; None: no rounding."""
    low = device_type == "cuda" if setting == "auto" else setting == "bfloat16"
    return torch.bfloat16 if low else None


def rounded(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The parameter in `dtype`; None returns it unchanged."""
    return parameter if dtype is None else parameter.to(dtype)


class RoundedLinear(nn.Linear):
    """A linear layer that computes in `compute_dtype`; None: in that of its gathered weight."""

    compute_dtype: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight = rounded(self.weight, self.compute_dtype)
        bias = None if self.bias is None else rounded(self.bias, self.compute_dtype)
        return F.linear(input.to(weight.dtype), weight, bias)


def linear_arguments(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Input, weight and bias of a linear layer, for an operator that computes the layer together with the next one.

    They are rounded as in the layer's own forward pass. None for a module that has to be called: one with hooks,
    without a bias, or of another kind, such as an adapter around a linear layer.
    """
    if type(module) not in (nn.Linear, RoundedLinear) or module._forward_hooks or module._forward_pre_hooks:
        return None
    linear = cast(nn.Linear, module)
    if linear.bias is None:
        return None
    dtype = getattr(linear, "compute_dtype", None)
    return rounded(x, dtype), rounded(linear.weight, dtype), rounded(linear.bias, dtype)


def split_projection(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Input and `projection` (weight and bias) for an operator that computes a linear layer together with what follows.

    For a module that has to be called, its output and None.
    """
    arguments = linear_arguments(module, x)
    if arguments is None:
        return module(x), None
    x, weight, bias = arguments
    return x, (weight, bias)


class RoundedRMSNorm(nn.RMSNorm):
    """An RMS norm that rounds its parameters to `compute_dtype`."""

    compute_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else rounded(self.weight, self.compute_dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


_ROUNDED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: RoundedLinear, nn.RMSNorm: RoundedRMSNorm}


def allow_rounding(module: nn.Module) -> None:
    """Let a module of another project take part in `compute_in`: its forward pass reads its own parameters rounded.

    Its linear layers round inputs too, since classes of diffusers embed times in fp32 and leave that to the caller.
    """
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    if type(module) is nn.Linear:
        module.__class__ = RoundedLinear
    elif names and type(module) not in _ROUNDED and not hasattr(type(module), "compute_dtype"):
        module.__class__ = _reads_rounded(type(module), names)


@cache
def _reads_rounded(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def read(name: str) -> property:
        return property(lambda self: rounded(self._parameters[name], self.compute_dtype))

    members: dict[str, Any] = {name: read(name) for name in names}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "compute_dtype": None, **members})


def compute_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let every module of `model` round its parameters to `dtype` in its forward pass; None disables the rounding.

    Names and dtypes of the parameters do not change. Adapters must be added before this call.

    Raises:
        ValueError: a module has parameters of another dtype and does not round them.
    """
    for name, module in model.named_modules():
        if dtype is not None and type(module) in _ROUNDED:
            # changed in place, because adapters and attention methods hold references to the module
            module.__class__ = _ROUNDED[type(module)]
        if hasattr(type(module), "compute_dtype"):
            module.compute_dtype = dtype  # type: ignore[assignment] (of that class)
        elif dtype is not None and (other := {p.dtype for p in module.parameters(recurse=False)} - {dtype}):
            known = ", ".join(f"nn.{kind.__name__}" for kind in _ROUNDED)
            raise ValueError(
                f"{name} ({type(module).__name__}) cannot compute in {str(dtype).removeprefix('torch.')} over "
                f"{other.pop()} parameters: build it of {known}, give it a compute_dtype, or use trainer=fsdp"
            )


def hold_rounded(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the parameters of `model` that are not trained, in place, once for all passes, before `compute_in`."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
