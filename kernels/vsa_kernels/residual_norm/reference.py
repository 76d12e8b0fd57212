"""Residual connection and layer norm in plain tensor operations, with the gradients of torch's autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def residual_norm(
    x: Tensor, update: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum and its layer norm, `[B, L, C]` each in x's dtype; arguments as in `api.residual_norm`."""
    total = x
    if update is not None:
        total = x + update if gate is None else (x + update * gate).type_as(x)
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    if weight.ndim == 1:
        return total, F.layer_norm(wide, weight.shape, weight.to(wide.dtype), bias.to(wide.dtype), eps).type_as(x)
    return total, (F.layer_norm(wide, wide.shape[-1:], eps=eps) * weight + bias).type_as(x)
