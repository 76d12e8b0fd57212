"""Norm and rotation of queries (or keys) beside torch's operations, eager and compiled, and beside a copy.

Estimates for an H200 from before the measurement (`docs/benchmarks/kernels.md`), for one tensor in bf16.
The floor is that of a copy at 4.1 TB/s: the forward reads and writes the tokens once, the backward reads two tensors
and writes one. The last shape is slower than estimated: 178 and 440 us.

| B x L x H x D | forward: floor, estimate | forward + backward: floor, estimate |
|---|---|---|
| 8 x 16,384 x 12 x 64 | 98, 110 to 130 us | 246, 280 to 350 us |
| 1 x 23,296 x 12 x 128 | 35, 40 to 50 us | 87, 105 to 130 us |
| 1 x 23,296 x 40 x 128 | 116, 130 to 160 us | 291, 340 to 430 us |

- Compiled for sm_90, the forward has 80 registers (88 at 5,120 channels), the backward 128, without spills. So the
  backward has 16 warps per multiprocessor, and up to 48 KB of tokens in flight; 4.1 TB/s with a latency of 1 us need
  21 KB of reads.
- A row of 768 channels takes 258 instructions of its warp forward and 472 backward. Issued at 1.7 GHz they take 38 and
  69 us at the first shape, where the floors of the passes are 98 and 147 us.
- Tables come from L2, 17% of the bytes of the tokens at the first shape.

B batch, L tokens, H heads, D head dim, C = H * D channels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vsa_kernels import norm_rope as ours
from vsa_kernels.norm_rope import reference

from .problems import Shape
from .timing import BOTH, FORWARD, Measured, Op, Setup, measure, must_notice

_EPS = 1e-6
# largest error, as a share of the largest value
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# tensors of tokens that a pass reads or writes
_MOVED = {FORWARD: 2, BOTH: 5}


def token_shape(name: str, batch: int, tokens: int, heads: int, head_dim: int) -> Shape:
    """A problem of elementwise operators: tokens of H * D channels, without a grid."""
    return Shape(name=name, grid_thw=(1, 1, tokens), batch=batch, heads=heads, head_dim=head_dim, topk=1)


GPU_ROTATIONS = (
    token_shape("pretrain_120m", 8, 16384, 12, 64),
    token_shape("wan1.3b", 1, 23296, 12, 128),
    token_shape("wan14b", 1, 23296, 40, 128),
)
CPU_ROTATIONS = (token_shape("small", 2, 999, 3, 80),)


def rotation_shapes(args: argparse.Namespace, device: torch.device) -> list[Shape]:
    """The problems of the command line."""
    return chosen(args, CPU_ROTATIONS, GPU_ROTATIONS, device)


def chosen(args: argparse.Namespace, cpu: Sequence[Shape], gpu: Sequence[Shape], device: torch.device) -> list[Shape]:
    """The named problems of the command line, or those of the device."""
    shapes_by_name = {shape.name: shape for shape in (*cpu, *gpu)}
    unknown = [name for name in args.shapes or () if name not in shapes_by_name]
    if unknown:
        raise ValueError(f"--shapes must be of {', '.join(shapes_by_name)}, got {', '.join(unknown)}")
    usual = gpu if device.type == "cuda" else cpu
    return [shapes_by_name[name] for name in args.shapes] if args.shapes else list(usual)


class _Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    dout: Tensor
    heads: int

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> _Inputs:
        g = torch.Generator(device=device).manual_seed(0)
        normal = partial(torch.randn, generator=g, device=device)
        size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
        angle = 6 * torch.rand(shape.tokens, shape.head_dim // 2, generator=g, device=device)
        x, dout = (normal(size, dtype=dtype) for _ in range(2))
        weight = (1 + 0.3 * normal(shape.heads * shape.head_dim)).to(dtype)
        leaves = (x.flatten(2).requires_grad_(), weight.requires_grad_())
        return cls(*leaves, angle.cos(), angle.sin(), dout, shape.heads)

    def results(self, call: Callable[[], Tensor]) -> dict[str, Tensor]:
        out = call()
        grads = torch.autograd.grad(out, (self.x, self.weight), self.dout.to(out.dtype))
        return dict(zip(("out", "dx", "dweight"), (out.detach(), *grads), strict=True))

    def exact(self) -> dict[str, Tensor]:
        """Results in fp64, by complex numbers."""

        def turned() -> Tensor:
            x = self.x.double()
            normed = x / (x.square().mean(-1, keepdim=True) + _EPS).sqrt() * self.weight.double()
            pairs = torch.view_as_complex(normed.unflatten(-1, (self.heads, -1, 2)))
            table = torch.complex(self.cos.double(), self.sin.double())
            return torch.view_as_real(pairs * table[:, None]).flatten(-2)

        return self.results(turned)


def norm_rope(shape: Shape, setup: Setup) -> Measured:
    """Norm and rotation of one tensor: eager and compiled operations of torch, our kernels, and a copy."""
    p = _Inputs.of(shape, setup.dtype, setup.device)
    kernel = partial(ours, *p[:4], num_heads=p.heads, eps=_EPS, backend="triton")
    calls = forwards(reference.norm_rope, (*p[:4], p.heads, _EPS), kernel, setup)
    return beside_a_copy(calls, p, (p.x, p.weight), setup)


def forwards(
    plain: Callable[..., Any], arguments: Sequence[Any], kernel: Callable[[], Any], setup: Setup, **compiling: Any
) -> dict[str, Callable[[], Any]]:
    """Forwards by name: operations of torch on `arguments`, eager and compiled with some options, and our kernel."""
    calls: dict[str, Callable[[], Any]] = {"eager": partial(plain, *arguments)}
    if "compiled" in setup.modes:
        calls["compiled"] = partial(torch.compile(plain, fullgraph=True, dynamic=False, **compiling), *arguments)
    if "triton" in setup.backends:
        calls["triton"] = kernel
    return calls


def beside_a_copy(
    calls: Mapping[str, Callable[[], Any]],
    p: Any,
    inputs: tuple[Tensor, ...],
    setup: Setup,
    moved: Mapping[str, int] = _MOVED,
) -> Measured:
    """Compare calls with fp64, and time them beside a copy of the tokens.

    Args:
        calls: forwards by name.
        p: a problem with tokens `x`, gradient `dout`, `results(call)` and their `exact()` values in fp64.
        inputs: tensors to differentiate with respect to.
        setup: settings of the command line.
        moved: tensors of tokens that a pass reads or writes.
    """
    exact, x = p.exact(), p.x
    for name, call in calls.items():
        refuse_wrong(p.results(call), exact, setup.dtype, name)
    del exact
    target = torch.empty_like(x)
    ops = [Op(name="copy", call=lambda: target.copy_(x), passes=(FORWARD,), ahead=True, against=())]
    ops += [
        Op(name=name, call=call, inputs=inputs, dout=p.dout, ahead=True, against=()) for name, call in calls.items()
    ]
    rows = measure(ops, setup)
    copy = rows[0]["median_ms"]
    for row in rows:
        num_tensors = 2 if row["op"] == "copy" else moved[row["pass"]]
        row |= {"block": "-", "q_block": "-", "topk": None, "sparsity": None}
        row["gb_per_s"] = round(num_tensors * x.numel() * x.itemsize / row["median_ms"] / 1e6, 1)
        row["share_of_copy"] = round(num_tensors / 2 * copy / row["median_ms"], 3)
    return Measured(rows, {})


def check_rotation(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare a backend with fp64 on a small problem, and test the comparison with a rotation backwards.

    Raises:
        ValueError: an error exceeds its tolerance, or the other rotation stays within it.
    """
    name = "triton" if backend == "triton" else "reference"
    p = _Inputs.of(token_shape("check", 2, 37, 3, 80), dtype, device)

    def result(sin: Tensor) -> dict[str, Tensor]:
        return p.results(lambda: ours(p.x, p.weight, p.cos, sin, num_heads=p.heads, eps=_EPS, backend=name))

    exact = p.exact()
    refuse_wrong(result(p.sin), exact, dtype, name)
    must_notice(lambda: refuse_wrong(result(-p.sin), exact, dtype, name), name, "a rotation backwards")
    return f"norm and rotation on {name} {dtype}: out, dx, dweight right by fp64; a rotation backwards is noticed"


def refuse_wrong(got: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, what: str) -> None:
    """Compare results with those in fp64.

    Raises:
        ValueError: an error exceeds its tolerance.
    """
    for name, want in exact.items():
        error = float((got[name].double() - want).abs().max() / want.abs().max())
        if not error <= _TOLERANCE[dtype]:
            raise ValueError(f"{what} is wrong, no speed is printed: {name} is off by {error:.2g} of its largest value")
