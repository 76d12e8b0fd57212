"""Public interface of the linear layer with GELU. C and F input and output width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vsa_kernels.checks import check_device
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.linear_gelu import reference
from vsa_kernels.linear_gelu.op import bias_gelu_fwd
from vsa_kernels.modes import refuse_forward_mode


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, *, backend: str | None = None) -> Tensor:
    """`gelu(x @ weight.T + bias)` in its tanh form, the first half of a feed-forward layer.

    On `triton`, torch multiplies, and one kernel per direction does the rest: bias and GELU, and in the backward the
    derivative together with the sum over tokens that is the gradient of the bias. It computes in fp32 and rounds once,
    where the product is rounded before the bias is added. `reference` is torch's linear layer and GELU.

    Args:
        x: `[..., C]` tokens.
        weight: `[F, C]`.
        bias: `[F]`.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        `[..., F]` in the dtype of the product; differentiable in x, weight and bias.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", section 2, the form with tanh.
    """
    if x.ndim < 1 or not x.is_floating_point():
        raise ValueError(f"x must be a float [..., channels], got {x.dtype} {list(x.shape)}")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or 0 in weight.shape or not weight.is_floating_point():
        expected = f"a float [hidden, {x.shape[-1]}] like the channels of x"
        raise ValueError(f"weight must be {expected}, got {weight.dtype} {list(weight.shape)}")
    if list(bias.shape) != [weight.shape[0]] or not bias.is_floating_point():
        expected = f"a float {[weight.shape[0]]} like weight"
        raise ValueError(f"bias must be {expected}, got {bias.dtype} {list(bias.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_device(name, parameter, "x", x)
    refuse_forward_mode(x, weight, bias)
    if resolve_plain(backend, x.device, x.dtype) == "triton":
        return bias_gelu_fwd(F.linear(x, weight), bias)
    return reference.linear_gelu(x, weight, bias)
