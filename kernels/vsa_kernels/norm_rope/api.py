"""Public interface of norm and rotation. B batch, L tokens, E input width, H heads, D head dim, C = H * D channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa_kernels.checks import check_device, check_projection
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.modes import refuse_forward_mode
from vsa_kernels.norm_rope import reference
from vsa_kernels.norm_rope.op import norm_rope_fwd


def norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    num_heads: int,
    eps: float,
    projection: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """RMS norm over all heads of queries or keys together, then rotary position embedding of each head.

    A token of C = H * D channels is divided by the root of its mean square plus eps, multiplied by the weight, and its
    neighbouring channel pairs are rotated: `(x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos)`. `triton` computes in fp32
    and rounds once; `reference` is `torch.nn.functional.rms_norm`, which rounds to x's dtype, and then the rotation.

    With a projection, the tokens are the output of that linear layer. On `triton` torch multiplies, and the kernels add
    the bias in fp32 to the rounded product; its gradient, a sum over the tokens, is part of the backward kernel.

    Args:
        x: `[B, L, C]` tokens; with a projection `[B, L, E]`.
        weight: `[C]` of the norm.
        cos: fp32 `[L, D / 2]` cosines in the token order of x, a constant; None without rotation.
        sin: fp32 `[L, D / 2]` sines, a constant; None without rotation.
        num_heads: H, with an even D = C / H.
        eps: constant added to the mean square.
        projection: weight `[C, E]` and bias `[C]` of the linear layer before the norm.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        `[B, L, H, D]` in x's dtype; differentiable in x, weight and projection.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization"; Su et al., "RoFormer: Enhanced Transformer with
    Rotary Position Embedding", section 3.2. Wan2.1 norms all heads together.
    """
    _check(x, weight, cos, sin, num_heads, eps, projection)
    refuse_forward_mode(x, weight, *(projection or ()))
    bias = None
    if resolve_plain(backend, x.device, x.dtype, weight.shape[0] // num_heads) == "triton":
        if projection is not None:
            x, bias = F.linear(x, projection[0]), projection[1]
        return norm_rope_fwd(x, weight, bias, cos, sin, num_heads, eps)[0]
    return reference.norm_rope(x, weight, cos, sin, num_heads, eps, projection)


def _check(
    x: Tensor,
    weight: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    eps: float,
    projection: tuple[Tensor, Tensor] | None,
) -> None:
    if x.ndim != 3 or not x.is_floating_point() or 0 in x.shape[1:]:
        raise ValueError(f"x must be a float [B, tokens, channels] with tokens, got {x.dtype} {list(x.shape)}")
    _, L, C = x.shape
    what = "channels of x"
    if projection is not None:
        check_projection(projection, "x", x)
        C, what = projection[0].shape[0], "channels of projection"
    if num_heads < 1 or C % (2 * num_heads):
        raise ValueError(f"num_heads must divide the {C} {what} into heads of an even size, got {num_heads}")
    if list(weight.shape) != [C] or not weight.is_floating_point():
        like = what.removeprefix("channels of ")
        raise ValueError(f"weight must be a float {[C]} like {like}, got {weight.dtype} {list(weight.shape)}")
    check_device("weight", weight, "x", x)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be finite and at least 0, got {eps}")
    if (cos is None) != (sin is None):
        raise ValueError(f"cos and sin must be given together, got only {'sin' if cos is None else 'cos'}")
    shape = [L, C // num_heads // 2]
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            continue
        if list(table.shape) != shape or table.dtype != torch.float32:
            raise ValueError(f"{name} must be float32 {shape}, got {table.dtype} {list(table.shape)}")
        if table.requires_grad:
            raise ValueError(f"{name} must be a constant, got a tensor that requires a gradient")
        check_device(name, table, "x", x)
