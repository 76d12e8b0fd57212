"""Registered ops of norm and rotation on the `triton` backend; `reference` is torch's own operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.operators import MODEL_SIZES, Operator, declare


@torch.library.custom_op("vsa_kernels::norm_rope_fwd", mutates_args=())
def norm_rope_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, num_heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Rotated heads `[B, L, H, D]`, and fp32 `[B, L]` inverse roots of the mean squares, without a gradient."""
    if not x.shape[0]:
        return _forward_like(x, weight, bias, cos, sin, num_heads, eps)
    from vsa_kernels.norm_rope import triton_norm_rope

    return triton_norm_rope.forward(x, weight, bias, cos, sin, num_heads, eps)


def _forward_like(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    B, L, C = x.shape
    num_heads = args[4]
    return x.new_empty((B, L, num_heads, C // num_heads)), x.new_empty((B, L), dtype=torch.float32)


norm_rope_fwd.register_fake(_forward_like)


@torch.library.custom_op("vsa_kernels::norm_rope_bwd", mutates_args=())
def norm_rope_bwd(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x `[B, L, C]`, of the weight `[C]` and of the bias `[C]` (empty without one)."""
    if not x.shape[0]:
        dx, dweight, dbias = _backward_like(dout, x, weight, bias)
        return dx, dweight.zero_(), dbias.zero_()
    from vsa_kernels.norm_rope import triton_norm_rope

    return triton_norm_rope.backward(dout, x, weight, bias, cos, sin, rstd)


def _backward_like(
    _dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = x.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


norm_rope_bwd.register_fake(_backward_like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.biased = inputs[2] is not None
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, _drstd: Tensor | None) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = norm_rope_bwd(dout, *ctx.saved_tensors)
    return dx, dweight, dbias if ctx.biased else None, None, None, None, None


norm_rope_fwd.register_autograd(_backward, setup_context=_setup_context)

_OPS = {"norm_rope_fwd": None, "norm_rope_bwd": None}
declare(Operator(name="norm_rope", module=__name__, ops=_OPS, moved=(2, 3), sizes=MODEL_SIZES))
