"""RMS norm and rotation in plain tensor operations, with the gradients of torch's autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    eps: float,
    projection: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Normalised, rotated `[B, L, H, D]`; arguments as in `api.norm_rope`.

    The norm is rounded to x's dtype before the rotation.
    """
    tokens = x if projection is None else F.linear(x, *projection)
    heads = F.rms_norm(tokens, weight.shape, weight, eps).unflatten(-1, (num_heads, -1))
    return heads if cos is None or sin is None else rotate(heads, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channel pairs `(x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos)`, in at least fp32.

    Args:
        x: `[B, L, H, D]` queries or keys.
        cos: `[L, D / 2]` cosines in the token order of x.
        sin: `[L, D / 2]` sines.
    """
    cos, sin = cos[:, None], sin[:, None]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)
