"""Permutation of tokens whose gradient is a gather instead of a scatter-add.

The gradient of `index_select` uses atomic adds, because an index may select a token twice; a permutation never does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rearrange(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Copy of `x` whose i-th token is its token `order[i]`.

    Args:
        x: `[B, L, ...]`.
        order: int64 `[L]`, a permutation.
        inverse: int64 `[L]`, its inverse.
    """
    return _Rearranged.apply(x, order, inverse)


class _Rearranged(torch.autograd.Function):
    # without a rule for forward mode, which torch.compile would not trace; a tangent raises an error
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(1, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return rearrange(grad, inverse, order), None, None
