"""Neighborhood attention against dense attention: problems, their correctness check, and the case that times them.

Tokens are stored in raster order, but the kernel expects tile-major order. A model permutes them once for all layers,
so an op is timed on tile-major tokens, and again with the permutations of a single call on raster tokens: of q, k, v
and back of the result, and of the gradients in the backward.

B batch, L tokens, H heads, D head dim, T / Y / X tokens along time, height, width.
"""

from __future__ import annotations

import argparse
import itertools
import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from vsa_kernels import block_sparse_attn
from vsa_kernels.testing import Case, define, make_case, run

from vsa.attention.layout import Segment, TileLayout
from vsa.attention.neighborhood.axis import AxisWindow
from vsa.attention.neighborhood.mask import neighborhood_index
from vsa.attention.tiling import Grid

from .checks import compare, refuse_far
from .peers import dense_ops
from .problems import Shape, named, pair_counts
from .timing import FORWARD, Measured, Op, Setup, Skipped, attempt, measure

# queries with fp64 logits in memory at a time, in the check
_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class WindowShape(Shape):
    """A grid with a window and the strides to measure.

    Args:
        window_thw: keys that a query sees along time, height, width.
        strides: neighbouring queries that share a window along each axis.
        q_tile_thw: tokens of a query tile; one of the two tiles divides the other.
    """

    window_thw: Grid
    strides: tuple[Grid, ...]
    q_tile_thw: Grid

    def axes(self, stride: Grid) -> tuple[AxisWindow, AxisWindow, AxisWindow]:
        sides = zip(("time", "height", "width"), self.grid_thw, self.window_thw, stride, strict=True)
        t, h, w = (AxisWindow(name=name, size=n, window=m, stride=s) for name, n, m, s in sides)
        return t, h, w

    @property
    def bound(self) -> float:
        """Bound of the speed-up by FLOPs: tokens of the grid over those of the window."""
        return self.tokens / math.prod(self.window_thw)

    def layout(self, device: torch.device) -> TileLayout:
        with warnings.catch_warnings():
            # short tiles are part of the measurement
            warnings.simplefilter("ignore")
            return TileLayout.build(
                [Segment(self.grid_thw)], tile_thw=self.q_tile_thw, kv_tile_thw=self.tile_thw, device=device
            )

    def row(self) -> dict[str, Any]:
        window, tokens = "x".join(map(str, self.window_thw)), math.prod(self.q_tile_thw)
        return super().row() | {"window": window, "q_block": tokens, "bound": round(self.bound, 3)}


def _shape(name: str, grid: Grid, window: Grid, strides: tuple[Grid, ...], q_tile: Grid, tile: Grid, **rest: Any):
    topk = -(-math.prod(window) // math.prod(tile))
    return WindowShape(
        name=name,
        grid_thw=grid,
        window_thw=window,
        strides=strides,
        q_tile_thw=q_tile,
        tile_thw=tile,
        topk=topk,
        **rest,
    )


_STRIDES = ((1, 1, 1), (1, 8, 8), (16, 8, 8))
GPU_WINDOWS = (
    _shape("hunyuan-30x48x80", (30, 48, 80), (18, 24, 24), _STRIDES, (2, 8, 8), (2, 4, 8), heads=24, head_dim=128),
)
CPU_WINDOWS = (
    _shape(
        "small-6x16x16",
        (6, 16, 16),
        (4, 8, 8),
        ((1, 1, 1), (2, 4, 4), (4, 8, 8)),
        (2, 4, 4),
        (2, 2, 4),
        heads=2,
        head_dim=32,
    ),
)


def grid_of(text: str) -> Grid:
    """Parse `18x24x24` as three numbers, for argparse."""
    sides = tuple(int(side) if side.isdigit() else 0 for side in text.split("x"))
    if len(sides) != 3 or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"must be three positive numbers as in 18x24x24, got {text!r}")
    return sides


def window_shapes(args: argparse.Namespace, device: torch.device) -> list[WindowShape]:
    """The problems of the command line."""
    usual = GPU_WINDOWS if device.type == "cuda" else CPU_WINDOWS
    shapes_by_name = {shape.name: shape for shape in (*CPU_WINDOWS, *GPU_WINDOWS)}
    shapes = []
    for shape in named(args.shapes, shapes_by_name, usual):
        changes = {
            "window_thw": args.window or shape.window_thw,
            "strides": tuple(args.strides or shape.strides),
            "q_tile_thw": args.q_tile or shape.q_tile_thw,
            "tile_thw": args.kv_tile or shape.tile_thw,
        }
        topk = -(-math.prod(changes["window_thw"]) // math.prod(changes["tile_thw"]))
        shape = replace(shape, **changes, topk=topk)
        # raises for values that do not fit before the first measurement
        for stride in shape.strides:
            shape.axes(stride)
        shape.layout(torch.device("cpu"))
        shapes.append(shape)
    return shapes


def neighborhood(shape: Shape, setup: Setup) -> Measured:
    """Neighborhood attention over strides: on tile-major tokens, and with the permutation of raster tokens."""
    assert isinstance(shape, WindowShape)
    p = WindowProblem.of(shape, setup.dtype, setup.device)
    ops, skipped = list[Op](), Skipped()
    for name, make in dense_ops(p.raster, ("dense-cudnn", "dense")).items():
        attempt(ops, skipped, name, make)
    by_op: dict[str, dict[str, Any]] = {}
    for stride, backend in itertools.product(shape.strides, setup.backends):
        name = "x".join(map(str, stride))
        case = p.case(stride)
        check_windows(p, case, stride, backend)
        useful = shape.batch * shape.heads * shape.tokens * math.prod(shape.window_thw)
        executed = pair_counts(case, backend)[1]
        rest: dict[str, Any] = {"head_dim": shape.head_dim, "pairs": useful, "executed": executed}
        rest["products"] = 7 if backend == "triton" else 5
        for label, source in ((backend, case), (f"{backend}, permuted", p.raster)):
            leaves = tuple(x.detach().requires_grad_() for x in (source.q, source.k, source.v))
            call = partial(p.attend, case, leaves, backend, permuted=source is p.raster)
            ops.append(Op(name=f"{label}, stride {name}", call=call, inputs=leaves, dout=source.dout, **rest))
            by_op[ops[-1].name] = {"stride": name, **_listed(case)}
    ops.append(Op(name="permutation of q, k, v, out", call=p.permute_all, passes=(FORWARD,), against=()))
    rows = measure(ops, setup)
    for row in rows:
        row |= by_op.get(row["op"], {})
        if row["op"] in by_op and row["speedup"] is not None:
            row["share_of_bound"] = round(row["speedup"] / shape.bound, 3)
    notes = tuple(
        f"{shape.name}, {op}: bound {shape.bound:.2f}x by FLOPs, {row['tile_bound']:.2f}x by listed tiles,"
        f" {row['masked']:.0%} of them with a fine mask"
        for op, row in by_op.items()
        if "permuted" not in op
    )
    return Measured(rows, skipped, notes)


def _listed(case: Case) -> dict[str, Any]:
    """Statistics of an index: the share of skipped tiles, and the share of listed tiles with a fine mask."""
    index = case.index
    counts = index.kv_num_blocks.double()
    full = counts if index.kv_num_full_blocks is None else index.kv_num_full_blocks.double()
    density = float(counts.mean()) / case.kv_blocks.num
    return {
        "sparsity": 1 - density,
        "tile_bound": round(1 / density, 3),
        "masked": round(1 - float(full.sum() / counts.sum()), 4),
    }


class _Reordered(torch.autograd.Function):
    """Permutation of the tokens of x `[B, L, H, D]`; the gradient is copied, not scatter-added as in `index_select`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return _rows(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _rows(grad, ctx.inverse), None, None


def _rows(x: Tensor, order: Tensor) -> Tensor:
    # copied as 8-byte words if the size of a token is a multiple of them
    flat = x.contiguous().flatten(2)
    wide = flat.view(torch.int64) if flat.shape[2] * flat.element_size() % 8 == 0 else flat
    return wide.index_select(1, order).view(x.dtype).view(x.shape)


@dataclass(frozen=True, kw_only=True)
class WindowProblem:
    """A shape with its inputs.

    Args:
        shape: shape of the problem.
        tiles: layout of the tokens.
        raster: inputs in raster order, with an index of all tiles.
    """

    shape: WindowShape
    tiles: TileLayout
    raster: Case

    @classmethod
    def of(cls, shape: WindowShape, dtype: torch.dtype, device: torch.device) -> WindowProblem:
        """Random inputs of a shape."""
        g = torch.Generator(device=device).manual_seed(0)
        size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
        q, k, v, dout = (torch.randn(size, generator=g, device=device, dtype=dtype) for _ in range(4))
        dlse = q.new_zeros((shape.batch, shape.heads, shape.tokens), dtype=torch.float32)
        tiles = shape.layout(device)
        whole = neighborhood_index(tiles, replace(shape, window_thw=shape.grid_thw).axes((1, 1, 1)))
        blocks: dict[str, Any] = {"q_blocks": tiles.blocks, "kv_blocks": tiles.kv_blocks}
        raster = Case(q=q, k=k, v=v, dout=dout, dlse=dlse, index=whole, **blocks)
        return cls(shape=shape, tiles=tiles, raster=raster)

    @cached_property
    def tiled(self) -> Case:
        """The inputs in tile-major order."""
        names = ("q", "k", "v", "dout")
        return replace(self.raster, **{name: self.tiles.permute(getattr(self.raster, name)) for name in names})

    def case(self, stride: Grid) -> Case:
        """The inputs in tile-major order, with the index of a stride."""
        return replace(self.tiled, index=neighborhood_index(self.tiles, self.shape.axes(stride)))

    def attend(self, case: Case, leaves: tuple[Tensor, ...], backend: str, *, permuted: bool) -> Tensor:
        """Output of the op on tile-major leaves, or with permutations on leaves in raster order."""
        order, inverse = self.tiles.order, self.tiles.inverse
        q, k, v = (_Reordered.apply(x, order, inverse) for x in leaves) if permuted else leaves
        out = block_sparse_attn(q, k, v, case.index, **case.blocks, backend=backend)[0]
        return _Reordered.apply(out, inverse, order) if permuted else out

    def permute_all(self) -> None:
        """Permute all inputs and the output of a forward on raster tokens."""
        case, order = self.raster, self.tiles.order
        # results are not kept, so that they reuse memory as in the op
        for x in (case.q, case.k, case.v, case.dout):
            _rows(x, order)


def check_strides(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare strides with and without fine masks on a small grid with fp64, and test it with a wrong stride.

    Raises:
        ValueError: an error exceeds its budget, or the result of a wrong stride stays within the budget.
    """
    # a ragged grid, with short tiles along every axis
    shape = replace(
        CPU_WINDOWS[0], grid_thw=(5, 9, 10), window_thw=(3, 5, 4), heads=2, q_tile_thw=(2, 4, 4), tile_thw=(2, 2, 4)
    )
    layout = shape.layout(device)
    sizes = (layout.blocks.sizes.tolist(), layout.kv_blocks.sizes.tolist())
    case = make_case(*sizes, heads=2, kv_heads=2, head_dim=shape.head_dim, dtype=dtype, device=device)
    for stride in ((1, 1, 1), (3, 2, 4)):
        right, wrong = (
            replace(case, index=neighborhood_index(layout, shape.axes(s))) for s in (stride, (2, *stride[1:]))
        )
        results = (run(right, backend), run(wrong, backend), run(right, "reference"), define(right))
        compare(f"neighborhood attention on backend {backend}", *results)
    return (
        f"neighborhood on {backend} {dtype}: out, lse, dq, dk, dv within the fp64 budget; the wrong stride is noticed"
    )


def check_windows(p: WindowProblem, case: Case, stride: Grid, backend: str) -> None:
    """Compare some rows of the output and the gradients of the measured problem with dense fp64 attention.

    The keys of the rows come from the rule of each axis, not from the index; all tensors are in raster order.
    """
    leaves = tuple(x.detach().requires_grad_() for x in (p.raster.q, p.raster.k, p.raster.v))
    out = p.attend(case, leaves, backend, permuted=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, p.raster.dout)
    sees = [axis.sees().to(out.device) for axis in p.shape.axes(stride)]
    last = p.shape.tokens - 1
    sample = torch.tensor([0, last // 3, last // 2 + p.shape.grid_thw[2] // 2, last], device=out.device)
    b, h = p.shape.batch - 1, p.shape.heads - 1
    q, k, v, dout = (x[b, :, h].double() for x in (p.raster.q, p.raster.k, p.raster.v, p.raster.dout))
    spot = _Spot(q, k, v, dout, sees)
    _, want_out, ds = spot.rows(sample)
    comparisons = {"out": (out.detach()[b, sample, h], want_out), "dq": (dq[b, sample, h], ds @ spot.k)}
    want_k, want_v = (torch.zeros_like(spot.k[sample]) for _ in range(2))
    seeing = spot.seen(torch.arange(p.shape.tokens, device=out.device), sample).any(1).nonzero()[:, 0]
    for some in seeing.split(_CHUNK):
        probability, _, ds = spot.rows(some)
        want_k += ds[:, sample].T @ spot.q[some]
        want_v += probability[:, sample].T @ spot.dout[some]
    comparisons |= {"dk": (dk[b, sample, h], want_k), "dv": (dv[b, sample, h], want_v)}
    for name, (actual, expected) in comparisons.items():
        refuse_far(
            f"backend {backend}, stride {'x'.join(map(str, stride))}: {name}", actual.double(), expected, out.dtype
        )


@dataclass(frozen=True)
class _Spot:
    """Dense fp64 attention of one head, row by row: tensors `[L, D]`, and a bool mask `[n, n]` per axis in `sees`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sees: list[Tensor]

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool `[queries, keys]`."""
        sizes = tuple(len(axis) for axis in self.sees)
        pairs = zip(self.sees, torch.unravel_index(queries, sizes), torch.unravel_index(keys, sizes), strict=True)
        t, h, w = (axis[query][:, key] for axis, query, key in pairs)
        return t & h & w

    def rows(self, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities `[queries, L]`, outputs `[queries, D]` and gradients of the logits `[queries, L]`."""
        scale = self.q.shape[1] ** -0.5
        hidden = ~self.seen(queries, torch.arange(len(self.k), device=queries.device))
        p = (self.q[queries] @ self.k.T * scale).masked_fill_(hidden, -torch.inf).softmax(-1)
        dp = self.dout[queries] @ self.v.T
        return p, p @ self.v, p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
