"""Elementwise operators of the records beside torch's operations, eager and compiled, and beside a copy.

The floor of a pass is a copy of as many tensors of tokens as the operator must read and write.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from vsa_kernels.operators import Operator
from vsa_kernels.testing import Call, make_case

from vsa.models.compiled import INDUCTOR_OPTIONS

from .problems import Shape, named
from .timing import BOTH, FORWARD, Measured, Op, Setup, measure, must_notice

Results = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Results and gradients."""

# largest error, as a share of the largest value
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_SMALL = {"small": (2, 999, 3, 80)}


def _shape(name: str, batch: int, tokens: int, heads: int, head_dim: int) -> Shape:
    """Tokens of H * D channels, without a grid."""
    return Shape(name=name, grid_thw=(1, 1, tokens), batch=batch, heads=heads, head_dim=head_dim, topk=1)


@dataclass(frozen=True)
class Elementwise:
    """The case of an operator."""

    operator: Operator

    def shapes(self, args: argparse.Namespace, device: torch.device) -> list[Shape]:
        """The problems of the command line."""
        shapes = {name: _shape(name, *size) for name, size in {**_SMALL, **self.operator.sizes}.items()}
        usual = self.operator.sizes if device.type == "cuda" else _SMALL
        return named(args.shapes, shapes, [shapes[name] for name in usual])

    def run(self, shape: Shape, setup: Setup) -> Measured:
        """An elementwise operator: eager and compiled operations of torch, our kernels, and a copy of its tokens."""
        call = self._call(shape, setup.dtype, setup.device)
        calls = {"eager": (call, "reference")}
        if "compiled" in setup.modes:
            compiled = torch.compile(call.function, fullgraph=True, dynamic=False, options=INDUCTOR_OPTIONS)
            calls["compiled"] = (call._replace(function=compiled), "reference")
        if "triton" in setup.backends:
            calls["triton"] = (call, "triton")
        dout = tuple(torch.randn_like(x) for x in call.run("reference")[0])
        exact = _changed(call, Tensor.double).run("reference", dout)
        for name, (one, backend) in calls.items():
            _refuse_wrong(one.run(backend, dout), exact, setup.dtype, name)
        del exact
        x = call.leaves[0]
        target = torch.empty_like(x)
        ops = [Op(name="copy", call=lambda: target.copy_(x), passes=(FORWARD,), ahead=True, against=())]
        ops += [
            Op(
                name=name, call=partial(one.function, *one.inputs, **one.options, backend=backend), inputs=call.leaves,
                dout=dout, ahead=True, against=(),
            )
            for name, (one, backend) in calls.items()
        ]  # fmt: skip
        rows = measure(ops, setup)
        moved = {FORWARD: self.operator.moved[0], BOTH: sum(self.operator.moved)}
        for row in rows:
            num_tensors = 2 if row["op"] == "copy" else moved[row["pass"]]
            row |= {"block": "-", "q_block": "-", "topk": None, "sparsity": None}
            row["gb_per_s"] = round(num_tensors * x.numel() * x.itemsize / row["median_ms"] / 1e6, 1)
            row["share_of_copy"] = round(num_tensors / 2 * rows[0]["median_ms"] / row["median_ms"], 3)
        return Measured(rows, {})

    def check(self, backend: str, setup: Setup) -> list[str]:
        """Compare a backend with fp64 on a small problem, and test the comparison with each input negated.

        Raises:
            ValueError: an error exceeds its tolerance, or that with a negated input stays within it.
        """
        name = "triton" if backend == "triton" else "reference"
        call = self._call(_shape("check", 2, 37, 3, 80), setup.dtype, setup.device)
        dout = tuple(torch.randn_like(x) for x in call.run("reference")[0])
        exact = _changed(call, Tensor.double).run("reference", dout)

        def compare(own: Call) -> None:
            _refuse_wrong(own.run(name, dout), exact, setup.dtype, name)

        compare(call)
        for i, leaf in enumerate(call.leaves):
            wrong = _changed(call, lambda x, leaf=leaf: -x if x is leaf else x)
            must_notice(partial(compare, wrong), name, f"the other sign of input {i}")
        return [f"{self.operator.name} on {name} {setup.dtype}: right by fp64; the other sign of an input is noticed"]

    def _call(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Call:
        torch.manual_seed(0)
        case = make_case(
            [shape.tokens], [1], batch=shape.batch, heads=shape.heads, kv_heads=shape.heads, head_dim=shape.head_dim,
            dtype=dtype, device=device,
        )  # fmt: skip
        return next(self.operator.cases(case))


def _changed(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """The call with other values of the inputs that require a gradient."""
    differentiated = [isinstance(x, Tensor) and x.requires_grad for x in call.inputs]
    pairs = zip(call.inputs, differentiated, strict=True)
    return call._replace(inputs=tuple(change(x).detach().requires_grad_() if d else x for x, d in pairs))


def _refuse_wrong(got: Results, exact: Results, dtype: torch.dtype, what: str) -> None:
    """Compare results with those in fp64.

    Raises:
        ValueError: an error exceeds its tolerance.
    """
    for kind, tensors, wanted in zip(("result", "gradient"), got, exact, strict=True):
        for i, (x, want) in enumerate(zip(tensors, wanted, strict=True)):
            error = float((x.double() - want).abs().max() / want.abs().max())
            if not error <= _TOLERANCE[dtype]:
                off = f"{kind} {i} is off by {error:.2g} of its largest value"
                raise ValueError(f"{what} is wrong, no speed is printed: {off}")
