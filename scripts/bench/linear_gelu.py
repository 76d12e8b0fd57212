"""Bias and GELU of a feed-forward layer, without its products, beside torch's operations and beside a copy.

Estimates for an H200 from before the measurement, in bf16. The floor is that of a copy at 4.1 TB/s: the forward reads
and writes the hidden layer once, the backward reads two tensors and writes one. What torch compiles takes 0.77 ms for
the backward of the second shape (`docs/benchmarks/training-step.md`).

| tokens x hidden width | forward: floor, estimate | forward + backward: floor, estimate |
|---|---|---|
| 131,072 x 3,072 | 0.39, 0.41 to 0.46 ms | 0.98, 1.05 to 1.25 ms |
| 23,296 x 8,960 | 0.20, 0.21 to 0.24 ms | 0.51, 0.55 to 0.65 ms |

A value takes about 30 instructions in the backward, which the multiprocessors issue in 0.2 ms for the second shape,
where the floor of the backward is 0.31 ms.

B batch, L tokens, H * D hidden width.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from vsa_kernels.linear_gelu.op import bias_gelu_fwd as ours

from .norm_rope import beside_a_copy, chosen, forwards, refuse_wrong, token_shape
from .problems import Shape
from .timing import Measured, Setup, must_notice

GPU_LAYERS = (
    token_shape("pretrain_120m", 8, 16384, 24, 128),
    token_shape("wan1.3b", 1, 23296, 70, 128),
)
CPU_LAYERS = (token_shape("small", 2, 999, 3, 80),)


def layer_shapes(args: argparse.Namespace, device: torch.device) -> list[Shape]:
    """The problems of the command line."""
    return chosen(args, CPU_LAYERS, GPU_LAYERS, device)


def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


class _Inputs(NamedTuple):
    x: Tensor
    bias: Tensor
    dout: Tensor

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> _Inputs:
        g = torch.Generator(device=device).manual_seed(0)
        normal = partial(torch.randn, generator=g, device=device, dtype=dtype)
        width = shape.heads * shape.head_dim
        x, dout = (normal(shape.batch, shape.tokens, width) for _ in range(2))
        return cls(x.requires_grad_(), normal(width).requires_grad_(), dout)

    def results(self, call: Callable[[], Tensor]) -> dict[str, Tensor]:
        out = call()
        grads = torch.autograd.grad(out, (self.x, self.bias), self.dout.to(out.dtype))
        return dict(zip(("out", "dx", "dbias"), (out.detach(), *grads), strict=True))

    def exact(self) -> dict[str, Tensor]:
        """Results in fp64."""
        return self.results(lambda: _gelu(self.x.double(), self.bias.double()))


def linear_gelu(shape: Shape, setup: Setup) -> Measured:
    """Bias and GELU of one layer: eager and compiled operations of torch, our kernels, and a copy."""
    p = _Inputs.of(shape, setup.dtype, setup.device)
    calls = forwards(_gelu, (p.x, p.bias), partial(ours, p.x, p.bias), setup)
    return beside_a_copy(calls, p, (p.x, p.bias), setup)


def check_layer(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare a backend with fp64 on a small problem, and test the comparison with a bias of the other sign.

    Raises:
        ValueError: an error exceeds its tolerance, or the other bias stays within it.
    """
    name = "triton" if backend == "triton" else "torch"
    call = ours if name == "triton" else _gelu
    p = _Inputs.of(token_shape("check", 2, 37, 3, 80), dtype, device)
    exact = p.exact()
    refuse_wrong(p.results(partial(call, p.x, p.bias)), exact, dtype, name)
    wrong = p.results(partial(call, p.x, -p.bias))
    must_notice(lambda: refuse_wrong(wrong, exact, dtype, name), name, "a bias of the other sign")
    return f"bias and GELU on {name} {dtype}: out, dx, dbias right by fp64; a bias of the other sign is noticed"
