"""Calls that reach every kernel of the linear layer with GELU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa_kernels.linear_gelu import api
from vsa_kernels.linear_gelu.op import bias_gelu_fwd
from vsa_kernels.testing import Call, Case, normal, projection, tokens


def linear_gelu(case: Case) -> Iterator[Call]:
    """Without its product, which torch computes, and with it to an odd width."""
    x = tokens(case)
    yield Call(_bias_gelu, (x, normal(case, x.shape[2])))
    narrow, (weight, _) = projection(case, 999)
    yield Call(api.linear_gelu, (narrow, weight, normal(case, 999, dtype=torch.float32)))


def _bias_gelu(x: Tensor, bias: Tensor, *, backend: str) -> Tensor:
    return bias_gelu_fwd(x, bias) if backend == "triton" else F.gelu(x + bias, approximate="tanh")
