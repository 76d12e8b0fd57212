"""PyTorch modes around the ops: `torch.autocast` casts their inputs, forward-mode AD raises an error."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def autocasts(device: torch.device) -> bool:
    """Whether `torch.autocast` is on for a device."""
    # the meta device has no autocast and raises on the query; `is_autocast_available` breaks graphs of torch 2.11
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def lowered(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors cast to the dtype of `torch.autocast` if it is on for x's device; fp64 stays, as in its matmuls."""
    if not autocasts(x.device):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)

    def lower(y: Tensor | None) -> Tensor | None:
        return y.to(dtype) if y is not None and y.is_floating_point() and y.dtype != torch.float64 else y

    return tuple(lower(y) for y in (x, *others))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, for plain tensor code that chooses its own precision."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


class _ForwardMode(torch.autograd.Function):
    """Autograd function whose `jvp` raises an error: it detects tangents through every transform of `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*xs: Tensor) -> Tensor:
        return xs[0].new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, *_tangents: Any) -> Any:
        raise ValueError(
            "the ops of vsa_kernels have no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual tensors): "
            "use reverse mode, backward() or torch.autograd.grad"
        )


def refuse_forward_mode(*xs: Tensor | None) -> None:
    """Raise a ValueError if an input carries a tangent, which a registered op would silently drop.

    Args:
        xs: differentiable inputs of an op, None where absent.
    """
    # the level is -1 outside of `dual_level`, which `torch.func.jvp` enters too
    if forward_ad._current_level >= 0:
        _ForwardMode.apply(*(x for x in xs if x is not None))
