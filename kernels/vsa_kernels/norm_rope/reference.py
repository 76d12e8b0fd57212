"""RMS norm and rotation in plain tensor operations, with the gradients of torch's autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, eps: float) -> Tensor:
    """Normalised, rotated `[B, L, H, D]` of x `[B, L, H * D]`; the norm is rounded to x's dtype before the rotation."""
    return rotate(F.rms_norm(x, weight.shape, weight, eps).unflatten(-1, (num_heads, -1)), cos, sin)


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
