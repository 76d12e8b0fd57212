"""The linear layer and GELU of torch, with the gradients of its autograd."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[..., F]` of x `[..., C]`, weight `[F, C]` and bias `[F]`."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")
