"""What PyTorch's modes mean for the ops: `torch.autocast` lowers their inputs, forward-mode AD is refused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def _autocasts(device: torch.device) -> bool:
    # meta has no autocast and raises when it is asked; `is_autocast_available` would break the graphs of torch 2.11
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def lowered(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype of `torch.autocast` where that is on for x's device; fp64 stays, as in its matmuls."""
    if not _autocasts(x.device):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)

    def lower(y: Tensor | None) -> Tensor | None:
        return y.to(dtype) if y is not None and y.is_floating_point() and y.dtype != torch.float64 else y

    return tuple(lower(y) for y in (x, *others))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context for plain tensor code that decides its own precision."""
    return torch.autocast(device.type, enabled=False) if _autocasts(device) else nullcontext()


class _ForwardMode(torch.autograd.Function):
    """Asks autograd, through every transform of `torch.func`, whether an input carries a tangent."""

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
            "use reverse mode, torch.func.vjp or backward()"
        )


def refuse_forward_mode(*xs: Tensor | None) -> None:
    """Raise where an input carries a tangent: a registered op would drop it and its output count as constant.

    Args:
        xs: differentiable inputs of an op, None where absent.

    Raises:
        ValueError: a tangent of forward-mode AD would be lost.
    """
    # -1 outside of `dual_level`, which `torch.func.jvp` enters too
    if forward_ad._current_level >= 0:
        _ForwardMode.apply(*(x for x in xs if x is not None))
