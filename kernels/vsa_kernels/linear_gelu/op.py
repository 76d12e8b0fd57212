"""Registered ops of bias and GELU on the `triton` backend; `reference` is torch's own operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.operators import Operator, declare


@torch.library.custom_op("vsa_kernels::bias_gelu_fwd", mutates_args=())
def bias_gelu_fwd(x: Tensor, bias: Tensor) -> Tensor:
    """`gelu(x + bias)` `[..., F]`, contiguous, of x `[..., F]` and bias `[F]`."""
    if not x.numel():
        return _forward_like(x, bias)
    from vsa_kernels.linear_gelu import triton_bias_gelu

    return triton_bias_gelu.forward(x, bias)


def _forward_like(x: Tensor, _bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


bias_gelu_fwd.register_fake(_forward_like)


@torch.library.custom_op("vsa_kernels::bias_gelu_bwd", mutates_args=())
def bias_gelu_bwd(dout: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x `[..., F]`, contiguous, and of the bias `[F]`."""
    if not x.numel():
        return x.new_empty(x.shape), torch.zeros_like(bias)
    from vsa_kernels.linear_gelu import triton_bias_gelu

    return triton_bias_gelu.backward(dout, x, bias)


def _backward_like(_dout: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


bias_gelu_bwd.register_fake(_backward_like)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    return bias_gelu_bwd(dout, *ctx.saved_tensors)


bias_gelu_fwd.register_autograd(_backward, setup_context=_setup_context)

# of the hidden layer
_SIZES = {"pretrain_120m": (8, 16384, 24, 128), "wan1.3b": (1, 23296, 70, 128)}
_OPS = {"bias_gelu_fwd": None, "bias_gelu_bwd": None}
declare(Operator(name="linear_gelu", module=__name__, ops=_OPS, moved=(2, 3), sizes=_SIZES))
