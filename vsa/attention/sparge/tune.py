"""Search for tau, theta and lambda of every head of a layer, on recorded inputs of the layer.

    first    the tau and theta of the grid with the highest sparsity whose error is below l1
    then     the lambda of the list with the highest sparsity whose total error is below l2

    error       sum |out - dense| / sum |dense| of a head over all inputs
    sparsity    (skipped products q k + skipped products with v) / (2 Nq Nkv) of a head over all inputs

tau=1, which is dense attention, is always among the choices: a head for which no other point meets the bound stays
dense.

B batch, L tokens, H heads, D head dim, P points of the grid.

Source: SpargeAttn (arXiv 2502.18137), section 3.6 and its measure of sparsity. The paper chooses per layer, its code
per head as here, but by bisection of tau and lambda instead of a grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention.dense import dense_attn
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.selection import sparge_top_p
from vsa.attention.sparge.mask import first_stage
from vsa.attention.sparge.method import SLICES, SpargeAttention, per_head_tensors
from vsa.attention.sparge.tuned import HeadSettings
from vsa.attention.tiling import Grid


class Input(NamedTuple):
    """q, k, v `[B, L, H, D]` of one forward pass, in raster order of a grid."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid_thw: Grid


class Point(NamedTuple):
    """Sparsity and error of one setting for one head."""

    head: int
    tau: float
    theta: float
    threshold: float | None
    sparsity: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """Bounds and grids of the search.

    Args:
        l1: upper bound of the error of the first stage.
        l2: upper bound of the error of both stages.
        taus: values of tau to try, in (0, 1).
        thetas: values of theta to try; a negative value ignores similarity.
        thresholds: values of lambda to try, at most 0; empty: the second stage stays off.
    """

    l1: float = 0.05
    l2: float = 0.06
    taus: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99)
    thetas: Sequence[float] = (-1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    thresholds: Sequence[float] = (-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -8.0, -10.0, -12.0, -15.0)

    def __post_init__(self) -> None:
        if not 0 < self.l1 <= self.l2 < math.inf:
            raise ValueError(f"bounds of the error must be 0 < l1 <= l2, got l1={self.l1:g} and l2={self.l2:g}")
        for name, holds, expected in (
            ("taus", lambda x: 0 < x < 1, "above 0 and below 1"),
            ("thetas", math.isfinite, "finite"),
            ("thresholds", lambda x: -math.inf < x <= 0, "of at most 0"),
        ):
            values = getattr(self, name)
            if bad := [x for x in values if not holds(x)]:
                raise ValueError(f"{name} must be numbers {expected}, got {bad[0]:g}")
            if not values and name != "thresholds":
                raise ValueError(f"{name} must hold at least one number, got none")

    @property
    def steps(self) -> int:
        """Calls of attention for each input."""
        return len(self.taus) * len(self.thetas) + len(self.thresholds)


@torch.no_grad()
def tune_layer(
    method: SpargeAttention,
    inputs: Callable[[], Iterable[Input]],
    search: Search,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[list[HeadSettings], list[Point]]:
    """Best settings of each head, and all points that were tried.

    Args:
        method: method whose blocks and order apply.
        inputs: function that yields the inputs on the compute device; called once for each stage.
        search: bounds and grids.
        progress: function called with 1 after every call of attention.
    """
    grid = [(tau, theta) for theta in search.thetas for tau in search.taus]
    first = _Sums(len(grid))
    for one in inputs():
        problem = _Problem(method, one)
        statistics = method.statistics(problem.q, problem.k, problem.layout)
        for i, (tau, theta) in enumerate(grid):
            index = first_stage(statistics, sparge_top_p(tau), theta)
            first.add(i, problem, index, None)
            progress(1)
    tried: list[Point] = []
    head_settings: list[HeadSettings] = []
    for head, points in enumerate(first.points(grid, lambda setting: (*setting, None))):
        tried += points
        best = _best(points, search.l1)
        # dense attention skips nothing
        dense = Point(head, 1.0, min(search.thetas), None, 0.0, 0.0)
        head_settings.append(_settings(dense if best is None or best.sparsity <= 0 else best))
    if not search.thresholds:
        return head_settings, tried
    second = _Sums(len(search.thresholds))
    for one in inputs():
        problem = _Problem(method, one)
        heads = per_head_tensors(tuple(head_settings), one.q.device)
        index = first_stage(method.statistics(problem.q, problem.k, problem.layout), heads.rule, heads.theta)
        for i, threshold in enumerate(search.thresholds):
            bars = torch.full((one.q.shape[2],), threshold, dtype=torch.float64, device=one.q.device)
            second.add(i, problem, index, bars)
            progress(1)
    for own, some in zip(
        tuple(head_settings), second.points(search.thresholds, lambda bar: (0.0, 0.0, bar)), strict=True
    ):
        points = [point._replace(tau=own.tau, theta=own.theta) for point in some]
        tried += points
        best = _best(points, search.l2)
        if best is not None and best.sparsity > own.sparsity:
            head_settings[best.head] = _settings(best)
    return head_settings, tried


class _Problem:
    """An input in the method's token order, with the output of dense attention."""

    def __init__(self, method: SpargeAttention, one: Input):
        self.method = method
        self.layout: TileLayout = method.layout([Segment(one.grid_thw)], one.q.device)
        self.q, self.k, self.v = (self.layout.permute(x) for x in one[:3])
        self.dense = dense_attn(self.q, self.k, self.v)

    def measure(self, index: BlockIndex, threshold: Tensor | None) -> Tensor:
        """Sums `[4, H]`: absolute errors, absolute dense outputs, skipped products, all products."""
        layout, rows = self.layout, self.layout.blocks.sizes
        out, slices = self.method.sparse(self.q, self.k, self.v, index, layout, threshold)
        missed = (out.double() - self.dense.double()).abs().sum((0, 1, 3))
        size = self.dense.double().abs().sum((0, 1, 3))
        batch, heads = self.q.shape[0], self.q.shape[2]
        selected_blocks = index.kv_num_blocks.double().expand(batch, heads, -1).sum((0, 2))
        pairs = torch.full_like(selected_blocks, batch * layout.num_blocks * layout.kv_blocks.num)
        skipped = 2 * (pairs - selected_blocks)
        if slices is not None:
            per_block = (rows / (self.method.q_tokens // SLICES)).ceil().double()
            skipped = skipped + (slices / per_block).sum((0, 2))
        return torch.stack((missed, size, skipped, 2 * pairs))


class _Sums:
    """Sums of `_Problem.measure` over the inputs, for each of several settings."""

    def __init__(self, count: int):
        self.sums: list[Tensor | None] = [None] * count

    def add(self, i: int, problem: _Problem, index: BlockIndex, threshold: Tensor | None) -> None:
        sums, before = problem.measure(index, threshold), self.sums[i]
        self.sums[i] = sums if before is None else before + sums

    def points(
        self, settings: Sequence, fields_of: Callable[..., tuple[float, float, float | None]]
    ) -> list[list[Point]]:
        """The points of each head."""
        table = torch.stack([x for x in self.sums if x is not None]).cpu()
        if bad := (~table.isfinite()).any(0).any(0).nonzero().flatten().tolist():
            raise ValueError(f"head {bad[0]}: q, k, v or the attention output contain NaN or infinity")
        error, sparsity = table[:, 0] / table[:, 1].clamp(min=1e-300), table[:, 2] / table[:, 3]
        return [
            [
                Point(head, *fields_of(setting), sparsity=float(sparsity[i, head]), error=float(error[i, head]))
                for i, setting in enumerate(settings)
            ]
            for head in range(table.shape[2])
        ]


def _best(points: Sequence[Point], bound: float) -> Point | None:
    """The point of the highest sparsity with an error below a bound; ties go to the smallest error, then the first."""
    return max((p for p in points if p.error < bound), key=lambda p: (p.sparsity, -p.error), default=None)


def _settings(point: Point) -> HeadSettings:
    return HeadSettings(
        tau=point.tau, theta=point.theta, threshold=point.threshold, sparsity=point.sparsity, error=point.error
    )
