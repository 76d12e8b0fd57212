"""Residual connections and layer norm in plain tensor operations, with the gradients of torch's autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def residual_norm(
    x: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    projection: tuple[Tensor, Tensor] | None = None,
    places: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum and its layer norm, `[B, L, C]` each in x's dtype; arguments as in `api.residual_norm`."""
    total = x if update is None else residual_sum(x, update, gate, projection, places)
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    if weight.ndim == 1:
        return total, F.layer_norm(wide, weight.shape, weight.to(wide.dtype), bias.to(wide.dtype), eps).type_as(x)
    weight, bias = (of_tokens(row, places) for row in (weight, bias))
    return total, (F.layer_norm(wide, wide.shape[-1:], eps=eps) * weight + bias).type_as(x)


def residual_sum(
    x: Tensor,
    update: Tensor,
    gate: Tensor | None,
    projection: tuple[Tensor, Tensor] | None,
    places: tuple[Tensor, int] | None = None,
) -> Tensor:
    """The sum `[B, L, C]` in x's dtype; arguments as in `api.gated_residual`, without a gate too."""
    if projection is not None:
        update = F.linear(update, *projection)
    return x + update if gate is None else (x + update * of_tokens(gate, places)).type_as(x)


def of_tokens(rows: Tensor, places: tuple[Tensor, int] | None) -> Tensor:
    """Parameters `[B, L, C]` of tokens that have one of two rows `[B, 2, C]`; other parameters as they are."""
    if places is None:
        return rows
    order, split = places
    row = torch.ones_like(order, dtype=torch.int64).index_fill(0, order[:split].long(), 0)
    return rows[:, row]
