"""Public interface of norm and rotation. B batch, L tokens, H heads, D head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.checks import check_device
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.modes import refuse_forward_mode
from vsa_kernels.norm_rope import reference
from vsa_kernels.norm_rope.op import norm_rope_fwd


def norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, eps: float, backend: str | None = None
) -> Tensor:
    """RMS norm over all heads of queries or keys together, then rotary position embedding of each head.

    A token of C = H * D channels is divided by the root of its mean square plus eps, multiplied by the weight, and its
    neighbouring channel pairs are rotated: `(x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos)`. `triton` computes in fp32
    and rounds once; `reference` is `torch.nn.functional.rms_norm`, which rounds to x's dtype, and then the rotation.

    Args:
        x: `[B, L, C]` projected tokens.
        weight: `[C]` of the norm.
        cos: fp32 `[L, D / 2]` cosines in the token order of x, a constant.
        sin: fp32 `[L, D / 2]` sines, a constant.
        num_heads: H, with an even D = C / H.
        eps: added to the mean square.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        `[B, L, H, D]` in x's dtype; differentiable in x and weight.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization"; Su et al., "RoFormer: Enhanced Transformer with
    Rotary Position Embedding", section 3.2. Wan2.1 norms all heads together.
    """
    _check(x, weight, cos, sin, num_heads, eps)
    refuse_forward_mode(x, weight)
    if resolve_plain(backend, x.device, x.dtype, x.shape[2] // num_heads) == "triton":
        return norm_rope_fwd(x, weight, cos, sin, num_heads, eps)[0]
    return reference.norm_rope(x, weight, cos, sin, num_heads, eps)


def _check(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, eps: float) -> None:
    if x.ndim != 3 or not x.is_floating_point() or 0 in x.shape[1:]:
        raise ValueError(f"x must be a float [B, tokens, channels] with tokens, got {x.dtype} {list(x.shape)}")
    _, L, C = x.shape
    if num_heads < 1 or C % (2 * num_heads):
        raise ValueError(f"num_heads must divide the {C} channels of x into heads of an even size, got {num_heads}")
    if list(weight.shape) != [C] or not weight.is_floating_point():
        raise ValueError(f"weight must be a float {[C]} like x, got {weight.dtype} {list(weight.shape)}")
    check_device("weight", weight, "x", x)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be finite and at least 0, got {eps}")
    shape = [L, C // num_heads // 2]
    for name, table in (("cos", cos), ("sin", sin)):
        if list(table.shape) != shape or table.dtype != torch.float32:
            raise ValueError(f"{name} must be float32 {shape}, got {table.dtype} {list(table.shape)}")
        if table.requires_grad:
            raise ValueError(f"{name} must be a constant, got a tensor that requires a gradient")
        check_device(name, table, "x", x)
