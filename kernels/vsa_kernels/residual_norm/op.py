"""Registered ops of residual connection and layer norm on the `triton` backend; `reference` is torch's own operations.

Order and split as in `triton_residual_norm.forward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.operators import MODEL_SIZES, Operator, declare


@torch.library.custom_op("vsa_kernels::residual_norm_fwd", mutates_args=())
def residual_norm_fwd(
    x: Tensor, update: Tensor | None, update_bias: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor,
    eps: float, order: Tensor | None = None, split: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum `[B, L, C]` (empty without an update) and its norm; fp32 `[B, L]` mean and inverse standard deviation of
    each token, without gradients."""
    if not x.shape[0]:
        return _forward_like(x, update)
    from vsa_kernels.residual_norm import triton_residual_norm

    return triton_residual_norm.forward(x, update, update_bias, gate, weight, bias, eps, order, split)


def _forward_like(x: Tensor, update: Tensor | None, *_args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(x.shape if update is not None else (0,))
    mean, rstd = (x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2))
    return total, x.new_empty(x.shape), mean, rstd


residual_norm_fwd.register_fake(_forward_like)


@torch.library.custom_op("vsa_kernels::residual_norm_bwd", mutates_args=())
def residual_norm_bwd(
    dtotal: Tensor | None, dnorm: Tensor, total: Tensor, update: Tensor | None, update_bias: Tensor | None,
    gate: Tensor | None, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, order: Tensor | None = None,
    split: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of the update (empty without a gate: that of x), of its bias, of gate, weight and bias.

    Without the update, that of gate is empty; without its bias, that of the bias; without bias, those of weight and
    bias.
    """
    if not total.shape[0]:
        grads = _backward_like(dtotal, dnorm, total, update, update_bias, gate, weight, bias)
        for grad in grads:
            grad.zero_()
        return grads
    from vsa_kernels.residual_norm import triton_residual_norm

    return triton_residual_norm.backward(
        dtotal, dnorm, total, update, update_bias, gate, weight, bias, mean, rstd, order, split
    )


def _backward_like(
    _dtotal: Tensor | None, _dnorm: Tensor, total: Tensor, update: Tensor | None, update_bias: Tensor | None,
    gate: Tensor | None, weight: Tensor, bias: Tensor | None, *_args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dupdate = total.new_empty(total.shape if gate is not None else (0,))
    dubias, dgate, dweight, dbias = (total.new_empty((0,)) for _ in range(4))
    if update_bias is not None:
        dubias = update_bias.new_empty(update_bias.shape)
    if gate is not None and update is not None:
        dgate = gate.new_empty(gate.shape)
    if bias is not None:
        dweight, dbias = weight.new_empty(weight.shape), bias.new_empty(bias.shape)
    return total.new_empty(total.shape), dupdate, dubias, dgate, dweight, dbias


residual_norm_bwd.register_fake(_backward_like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, update, update_bias, gate, weight, bias, _, order, split = inputs
    total, _, mean, rstd = output
    # from the front: arguments at the end that a call leaves out are missing here
    update_bias_needed, gate_needed, *parameters_needed = ctx.needs_input_grad[2:6]
    # frozen parameters need no sums, and a frozen gate not the update
    ctx.save_for_backward(
        x if update is None else total,
        update if gate_needed else None,
        update_bias if update_bias_needed or gate_needed else None,
        gate,
        weight,
        bias if any(parameters_needed) else None,
        mean,
        rstd,
        order,
    )
    ctx.updated, ctx.split = update is not None, split
    ctx.mark_non_differentiable(*(() if ctx.updated else (total,)), mean, rstd)


def _backward(ctx: Any, dtotal: Tensor | None, dnorm: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # read once: activation checkpointing computes them anew at each reading
    saved = ctx.saved_tensors
    _, update, update_bias, gate, _, bias, _, _, _ = saved
    dx, dupdate, dubias, dgate, dweight, dbias = residual_norm_bwd(
        dtotal if ctx.updated else None, dnorm, *saved, ctx.split
    )
    of_update = (dx if gate is None else dupdate) if ctx.updated else None
    of_parameters = (None, None) if bias is None else (dweight, dbias)
    of_bias, of_gate = None if update_bias is None else dubias, None if update is None else dgate
    return dx, of_update, of_bias, of_gate, *of_parameters, None, None, None


residual_norm_fwd.register_autograd(_backward, setup_context=_setup_context)

_OPS = {"residual_norm_fwd": None, "residual_norm_bwd": None}
declare(Operator(name="residual_norm", module=__name__, ops=_OPS, moved=(4, 6), sizes=MODEL_SIZES))
