"""Registered ops of the gated residual connection on the `triton` backend; `reference` is torch's own operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.operators import MODEL_SIZES, Operator, declare


@torch.library.custom_op("vsa_kernels::gated_residual_fwd", mutates_args=())
def gated_residual_fwd(
    x: Tensor, update: Tensor, update_bias: Tensor | None, gate: Tensor, order: Tensor | None = None, split: int = 0
) -> Tensor:
    """The sum `[B, L, C]`, contiguous."""
    if not x.shape[0]:
        return _forward_like(x)
    from vsa_kernels.residual_norm import triton_gated_residual

    return triton_gated_residual.forward(x, update, update_bias, gate, order, split)


def _forward_like(x: Tensor, *_args: Any) -> Tensor:
    return x.new_empty(x.shape)


gated_residual_fwd.register_fake(_forward_like)


@torch.library.custom_op("vsa_kernels::gated_residual_bwd", mutates_args=())
def gated_residual_bwd(
    dout: Tensor, update: Tensor | None, update_bias: Tensor | None, gate: Tensor, order: Tensor | None = None,
    split: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the update, of its bias (empty without one) and of gate (empty without the update)."""
    if not dout.shape[0]:
        dupdate, dubias, dgate = _backward_like(dout, update, update_bias, gate)
        return dupdate, dubias.zero_(), dgate.zero_()
    from vsa_kernels.residual_norm import triton_gated_residual

    return triton_gated_residual.backward(dout, update, update_bias, gate, order, split)


def _backward_like(
    dout: Tensor, update: Tensor | None, update_bias: Tensor | None, gate: Tensor, *_args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dubias, dgate = (dout.new_empty((0,)) for _ in range(2))
    if update_bias is not None:
        dubias = update_bias.new_empty(update_bias.shape)
    if update is not None:
        dgate = gate.new_empty(gate.shape)
    return dout.new_empty(dout.shape), dubias, dgate


gated_residual_bwd.register_fake(_backward_like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, update, update_bias, gate, order, ctx.split = inputs
    update_bias_needed, gate_needed = ctx.needs_input_grad[2:4]
    # a frozen gate needs no update, frozen parameters no bias
    kept_bias = update_bias if update_bias_needed or gate_needed else None
    ctx.save_for_backward(update if gate_needed else None, kept_bias, gate, order)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    update, update_bias, gate, order = ctx.saved_tensors
    dupdate, dubias, dgate = gated_residual_bwd(dout, update, update_bias, gate, order, ctx.split)
    of_bias, of_gate = None if update_bias is None else dubias, None if update is None else dgate
    return dout, dupdate, of_bias, of_gate, None, None


gated_residual_fwd.register_autograd(_backward, setup_context=_setup_context)

_OPS = {"gated_residual_fwd": None, "gated_residual_bwd": None}
declare(Operator(name="gated_residual", module=__name__, ops=_OPS, moved=(3, 3), sizes=MODEL_SIZES))
