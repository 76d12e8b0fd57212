"""Analytical simulator of the cost and the speed-up of a window on a kernel that works on tiles; it needs no device.

A kernel computes a kv tile for a query tile as soon as one query of it sees one key of the other. The slowest query
tile decides, so the speed-up over dense attention is the number of all kv tiles over the number that it visits.

n tokens of an axis, w window, s stride.

Source: Hassani et al., "Generalized Neighborhood Attention" (arXiv 2504.16922), section 4 ("NATTENSim").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from typing import get_args

import torch
from torch import Tensor

from vsa.attention.neighborhood.axis import AxisWindow
from vsa.attention.neighborhood.visits import Tiling, count_visits
from vsa.attention.tiling import count_tiles

MAX_TOKENS = 10_000_000
NAMES = {1: ("length",), 2: ("height", "width"), 3: ("time", "height", "width")}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result for one setting: the kv tiles that its query tiles visit.

    Args:
        stride: s of each axis.
        worst_tiles: largest number of kv tiles that a query tile visits.
        mean_tiles: mean number over the query tiles, the cost of a kernel with balanced work.
        total_tiles: number of all kv tiles, which dense attention visits.
        flop_speedup: query-key pairs of dense attention over visible pairs; no tiling exceeds it on an even grid.
        perfect: whether the mask is perfectly block-sparse: in every visited kv tile, every query of the tile sees
            every key, so that a kernel needs no mask. Where the tiles divide the grid and no axis is causal, this is
            equivalent to `speedup` being equal to `flop_speedup`.
    """

    stride: tuple[int, ...]
    worst_tiles: int
    mean_tiles: float
    total_tiles: int
    flop_speedup: float
    perfect: bool

    @property
    def speedup(self) -> float:
        """Speed-up over dense attention of a kernel that is as slow as its worst query tile."""
        return self.total_tiles / self.worst_tiles

    @property
    def mean_speedup(self) -> float:
        """Speed-up over dense attention of a kernel that spreads the work of the query tiles evenly."""
        return self.total_tiles / self.mean_tiles


def simulate(
    grid: Sequence[int],
    window: Sequence[int],
    *,
    q_tile: Sequence[int],
    kv_tile: Sequence[int],
    stride: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
    tiling: Tiling = "static",
    one_d: bool = False,
) -> Simulation:
    """Count the kv tiles that query tiles visit. All sequences have one value per axis, for 1, 2 or 3 axes.

    Args:
        grid: n, tokens of each axis.
        window: w, tokens of the window along each axis.
        q_tile: tokens of a query tile; tiles at the far edge are short where it does not divide the grid.
        kv_tile: tokens of a kv tile.
        stride: s, queries that share a window; None: 1.
        dilation: distance of neighbouring keys; None: 1.
        causal: whether an axis is causal; None: no axis is.
        tiling: static or dynamic kv tiles, see `Tiling`.
        one_d: whether tiles are runs of the flattened grid, with as many tokens as `q_tile` and `kv_tile` have.
    """
    axes = axis_windows(grid, window, stride, dilation, causal)
    return _Lattice([[axis] for axis in axes], q_tile, kv_tile, tiling, one_d).setting((0,) * len(axes))


def sweep_strides(
    grid: Sequence[int],
    window: Sequence[int],
    *,
    q_tile: Sequence[int],
    kv_tile: Sequence[int],
    dilation: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
    tiling: Tiling = "static",
    one_d: bool = False,
) -> list[Simulation]:
    """Simulations of all strides from 1 to the window that are worth considering, slowest and finest first.

    A stride is left out when another one that is at most as large along every axis, and so closer to a separate window
    for each query, is at least as fast.

    Arguments as in `simulate`. It takes seconds; with `one_d` over several axes and 100,000 tokens it takes minutes,
    and with dynamic tiles as well more than an hour.
    """
    axes = axis_windows(grid, window, None, dilation, causal)
    # where every key is visible, a stride changes nothing
    most = [1 if axis.is_whole else axis.window for axis in axes]
    choices = [[replace(axis, stride=s) for s in range(1, m + 1)] for axis, m in zip(axes, most, strict=True)]
    lattice = _Lattice(choices, q_tile, kv_tile, tiling, one_d)
    simulations = [lattice.setting(tuple(place)) for place in _undominated(lattice.worst).nonzero().tolist()]
    return sorted(simulations, key=lambda setting: (-setting.worst_tiles, setting.stride))


def end_to_end(
    speedup: float, *, attention_share: float, steps: int = 1, dense_steps: int = 0, rounded: bool = False
) -> float:
    """Bound on the speed-up of a whole sampling run in which everything but attention takes as long as before.

        1 / (1 - f * (1 - n0 / steps) * (1 - 1 / S))

    Args:
        speedup: S, speed-up of attention.
        attention_share: f, share of attention in the time of the dense run.
        steps: steps of the sampler.
        dense_steps: n0, first steps that keep dense attention.
        rounded: whether S is rounded half up to two decimals, then to one, as in the paper's tables.
    """
    if not 0 <= attention_share <= 1:
        raise ValueError(f"attention_share must be in [0, 1], got {attention_share}")
    if steps < 1 or not 0 <= dense_steps <= steps:
        raise ValueError(f"dense_steps must be in 0..steps, and steps at least 1, got {dense_steps} of {steps}")
    if not 0 < speedup < math.inf:
        raise ValueError(f"speedup must be a number above 0, got {speedup}")
    if rounded:
        for digits in ("0.01", "0.1"):
            speedup = float(Decimal(str(speedup)).quantize(Decimal(digits), ROUND_HALF_UP))
    return 1 / (1 - attention_share * (1 - dense_steps / steps) * (1 - 1 / speedup))


def axis_windows(
    grid: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
) -> tuple[AxisWindow, ...]:
    """The windows of a grid's axes; arguments and errors as in `simulate`."""
    if len(grid) not in NAMES:
        raise ValueError(f"grid must have 1, 2 or 3 axes, got {list(grid)}")
    if math.prod(grid) > MAX_TOKENS:
        raise ValueError(f"grid must have at most {MAX_TOKENS:,} tokens, got {list(grid)}")
    stride, dilation = stride or [1] * len(grid), dilation or [1] * len(grid)
    causal = causal or [False] * len(grid)
    for option, values in (("window", window), ("stride", stride), ("dilation", dilation), ("causal", causal)):
        _refuse_other_length(option, values, len(grid))
    return tuple(
        AxisWindow(size=n, window=w, stride=s, dilation=d, causal=c, name=name)
        for name, n, w, s, d, c in zip(NAMES[len(grid)], grid, window, stride, dilation, causal, strict=True)
    )


def _refuse_other_length(option: str, values: Sequence[int], axes: int) -> None:
    if len(values) != axes:
        raise ValueError(f"{option} must have one value for each of the {axes} axes of the grid, got {list(values)}")


class _Lattice:
    """Counts for every combination of the windows of the axes: `worst`, `summed`, `computed` have one dim per axis."""

    def __init__(
        self,
        choices: Sequence[Sequence[AxisWindow]],
        q_tile: Sequence[int],
        kv_tile: Sequence[int],
        tiling: Tiling,
        one_d: bool,
    ):
        if tiling not in get_args(Tiling):
            raise ValueError(f"tiling must be one of {', '.join(get_args(Tiling))}, got {tiling!r}")
        for option, tile in (("q_tile", q_tile), ("kv_tile", kv_tile)):
            _refuse_other_length(option, tile, len(choices))
            for (axis, *_), side in zip(choices, tile, strict=True):
                if side < 1:
                    raise ValueError(f"{option} of {axis.name} must be at least 1, got {side}")
        self.choices = choices
        sizes = [axes[0].size for axes in choices]
        # counts of axes multiply: a cuboid tile is visited where it is visited along every axis
        parts = [[axes] for axes in choices]
        if one_d:
            sizes, q_tile, kv_tile, parts = [math.prod(sizes)], [math.prod(q_tile)], [math.prod(kv_tile)], [choices]
        self.num_q_tiles, self.num_kv_tiles = (count_tiles(sizes, tile) for tile in (q_tile, kv_tile))
        visits = [count_visits(part, q, kv, tiling) for part, q, kv in zip(parts, q_tile, kv_tile, strict=True)]

        def joined(values: Iterator[list[int]]) -> Tensor:
            product = torch.ones(1, dtype=torch.int64, device="cpu")
            for part in values:
                product = (product[:, None] * torch.tensor(part, device="cpu")).flatten()
            return product.view([len(axes) for axes in choices])

        self.worst = joined([v.worst for v in part] for part in visits)
        self.summed = joined([v.summed for v in part] for part in visits)
        self.computed = joined([v.computed for v in part] for part in visits)

    def setting(self, place: tuple[int, ...]) -> Simulation:
        """The combination at one index."""
        axes = [choices[i] for choices, i in zip(self.choices, place, strict=True)]
        visible = math.prod(int((stop - first).sum()) for first, stop in (axis.span for axis in axes))
        return Simulation(
            stride=tuple(axis.stride for axis in axes),
            worst_tiles=int(self.worst[place]),
            mean_tiles=int(self.summed[place]) / self.num_q_tiles,
            total_tiles=self.num_kv_tiles,
            flop_speedup=math.prod(axis.size**2 for axis in axes) / visible,
            perfect=int(self.computed[place]) == visible,
        )


def _undominated(cost: Tensor) -> Tensor:
    """bool, True where every other element whose indices are all at most as large costs more."""
    least = cost
    for dim in range(cost.ndim):
        least = least.cummin(dim).values
    mask = torch.ones_like(cost, dtype=torch.bool)
    for dim, size in enumerate(cost.shape):
        # each of these elements is at or before a neighbour one step back
        mask.narrow(dim, 1, size - 1).logical_and_(cost.narrow(dim, 1, size - 1) < least.narrow(dim, 0, size - 1))
    return mask
