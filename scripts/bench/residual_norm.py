"""Gated residual connection and modulated norm beside torch's operations, eager and compiled, and beside a copy.

Estimates for an H200 in bf16. The floor is that of a copy at 4.1 TB/s: the forward reads two tensors of tokens and
writes two, the backward reads four and writes two. The first row follows a temporary script (2026-11-24: 202 us
forward, 415 us backward); this case measured 203 and 618 us (2026-11-25), and the other shapes have not run there yet.

| B x L x C | forward: floor, estimate | forward + backward: floor, estimate |
|---|---|---|
| 8 x 16,384 x 768 | 196, 200 to 210 us | 491, 600 to 640 us |
| 1 x 23,296 x 1,536 | 70, 75 to 85 us | 175, 215 to 240 us |
| 1 x 23,296 x 5,120 | 233, 260 to 280 us | 582, 800 to 1,000 us |

B batch, L tokens, H * D = C channels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from vsa_kernels import residual_norm as ours
from vsa_kernels.residual_norm import reference

from vsa.models.compiled import INDUCTOR_OPTIONS

from .norm_rope import CPU_ROTATIONS, GPU_ROTATIONS, beside_a_copy, chosen, forwards, refuse_wrong, token_shape
from .problems import Shape
from .timing import BOTH, FORWARD, Measured, Setup, must_notice

_EPS = 1e-6
# tensors of tokens that a pass reads or writes
_MOVED = {FORWARD: 4, BOTH: 10}


def residual_shapes(args: argparse.Namespace, device: torch.device) -> list[Shape]:
    """The problems of the command line, those of `norm_rope`."""
    return chosen(args, CPU_ROTATIONS, GPU_ROTATIONS, device)


class _Inputs(NamedTuple):
    x: Tensor
    update: Tensor
    gate: Tensor
    weight: Tensor
    bias: Tensor
    dout: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> _Inputs:
        g = torch.Generator(device=device).manual_seed(0)
        size = (shape.batch, shape.tokens, shape.heads * shape.head_dim)
        normal = partial(torch.randn, generator=g, device=device)
        x, update, *dout = (normal(size, dtype=dtype) for _ in range(4))
        gate, weight, bias = (normal(size[0], 1, size[2]) for _ in range(3))
        for leaf in (x, update, gate, weight, bias):
            leaf.requires_grad_()
        return cls(x, update, gate, weight, bias, (dout[0], dout[1]))

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors with gradients."""
        return self.x, self.update, self.gate, self.weight, self.bias

    def results(self, call: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        total, norm = call()
        upstream = [gradient.to(total.dtype) for gradient in self.dout]
        grads = torch.autograd.grad((total, norm), self.leaves, upstream)
        names = ("total", "norm", "dx", "dupdate", "dgate", "dweight", "dbias")
        return dict(zip(names, (total.detach(), norm.detach(), *grads), strict=True))

    def exact(self) -> dict[str, Tensor]:
        """Results in fp64."""

        def double() -> tuple[Tensor, Tensor]:
            x, update, gate, weight, bias = (tensor.double() for tensor in self.leaves)
            total = x + gate * update
            centred = total - total.mean(-1, keepdim=True)
            return total, centred / (centred.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight + bias

        return self.results(double)


def residual_norm(shape: Shape, setup: Setup) -> Measured:
    """Residual connection and norm of one layer: eager and compiled operations of torch, our kernels, and a copy."""
    p = _Inputs.of(shape, setup.dtype, setup.device)
    kernel = partial(ours, *p.leaves, eps=_EPS, backend="triton")
    calls = forwards(reference.residual_norm, (*p.leaves, _EPS), kernel, setup, options=INDUCTOR_OPTIONS)
    return beside_a_copy(calls, p, p.leaves, setup, moved=_MOVED)


def check_residual(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare a backend with fp64 on a small problem, and test the comparison with a gate of the other sign.

    Raises:
        ValueError: an error exceeds its tolerance, or the other gate stays within it.
    """
    name = "triton" if backend == "triton" else "reference"
    p = _Inputs.of(token_shape("check", 2, 37, 3, 80), dtype, device)

    def result(gate: Tensor) -> dict[str, Tensor]:
        return p.results(lambda: ours(p.x, p.update, gate, p.weight, p.bias, eps=_EPS, backend=name))

    exact = p.exact()
    refuse_wrong(result(p.gate), exact, dtype, name)
    must_notice(lambda: refuse_wrong(result(-p.gate), exact, dtype, name), name, "a wrong gate")
    return f"residual and norm on {name} {dtype}: sum, norm, gradients right by fp64; a wrong gate is noticed"
