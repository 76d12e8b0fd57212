"""Sparsity schedules: the number of kv tiles that a query tile keeps, by optimizer step and layer.

Sparsity is the share of kv tiles that a query tile skips. N tiles of a grid, K kept tiles.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Literal, Self

from vsa.attention.denoising import DenoisingPlan, DenoisingTopk, Rounding, Row, Topk, per_layer
from vsa.settings import AtLeastOne, Count, Share, ShareBelowOne, checked

SparsityPoint = Literal["current", "dense", "target", "half", "double"]
"""Point of a schedule: the top-k of the step, all tiles, the end value, half or double the top-k of the step."""

Budget = Literal["count", "fraction"] | Share
LayerTopk = Mapping[Any, AtLeastOne]

SPARSITY_POINTS: tuple[SparsityPoint, ...] = ("current", "dense", "target", "half", "double")


def resolve_topk(sparsity: float | str, num_tiles: int, rounding: Rounding = "up") -> int:
    """Tiles kept at a sparsity: `clamp(ceil((1 - sparsity) * num_tiles), 1, num_tiles)`, or with floor for ceil.

    The sparsity counts as the written decimal number: in binary floats `ceil((1 - 0.7) * 10)` would be 4.

    Args:
        sparsity: share of tiles skipped, in [0, 1).
        num_tiles: number of kv tiles.
        rounding: up (ceil) or down (floor).

    Source: up: VSA's code (its paper gives top-k directly); down: DFSAttn's code.
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles must be at least 1, got {num_tiles}")
    topk = (1 - _exact_sparsity(sparsity)) * num_tiles
    topk = math.ceil(topk) if rounding == "up" else math.floor(topk)
    return max(1, min(topk, num_tiles))


def check_points(name: str, points: Sequence[str]) -> tuple[SparsityPoint, ...]:
    """The checked points of an option called `name`, in the order of `SPARSITY_POINTS`."""
    ordered: tuple[SparsityPoint, ...] = tuple(point for point in SPARSITY_POINTS if point in points)
    if not ordered or len(ordered) < len(points):
        raise ValueError(f"{name} must hold some of {', '.join(SPARSITY_POINTS)}, each once, got {list(points)}")
    return ordered


def topk_at(topk: int, num_tiles: int, at: SparsityPoint) -> int:
    """A top-k halved (rounded up) or doubled at these points, unchanged at others; between 1 and num_tiles."""
    target = {"half": -(-topk // 2), "double": 2 * topk}.get(at, topk)
    return max(1, min(target, num_tiles))


def mean_topk(topk: float | Sequence[float], num_tiles: int) -> float:
    """Mean over the layers of the tiles that a query tile keeps.

    Args:
        topk: one number for all layers, or one per layer.
        num_tiles: N, the most that a layer keeps.
    """
    topks = [topk] if isinstance(topk, int | float) else topk
    return sum(min(k, num_tiles) for k in topks) / len(topks)


def expected_topk(topk: Topk, num_layers: int, share: Callable[[float, float], float]) -> float | tuple[float, ...]:
    """Mean over samples of the tiles that a query tile keeps, one number or one per layer.

    Args:
        topk: top-k on one grid.
        num_layers: number of layers of the model.
        share: function of two values, the share of samples whose denoising progress is between them.
    """
    if not isinstance(topk, DenoisingTopk):
        return topk
    rows = [(weight, per_layer(row, num_layers)) for weight, row in topk.weighted(share)]
    means = tuple(math.fsum(weight * row[layer] for weight, row in rows) for layer in range(num_layers))
    return means[0] if len(set(means)) == 1 else means


def exact(name: str, value: float | str) -> Fraction:
    """The exact decimal number of an option called `name`, as it is written."""
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not number.is_finite():
        raise ValueError(f"{name} must be a finite number, got {value}")
    return Fraction(number)


def _exact_sparsity(sparsity: float | str) -> Fraction:
    value = exact("sparsity", sparsity)
    if not 0 <= value < 1:
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity}")
    return value


def constant_topk(topk: Row, plan: DenoisingPlan, num_tiles: int) -> Topk:
    """A top-k on one grid combined with the budgets of a denoising plan, clamped to the number of tiles."""
    own = DenoisingPlan(rounding=plan.rounding)
    return plan.on_grid(topk, lambda budget: ConstantSparsity(**budget._asdict(), denoising=own).target_topk(num_tiles))


@checked
class SparsitySchedule:
    """Top-k by optimizer step and layer, from all tiles to an end value.

    The end value is a `topk`, the same count on every grid (a grid of fewer tiles keeps all of them), or a `sparsity`,
    the same fraction on every grid. With a `budget` it is the value on a grid of `reference_tiles`, and a grid of N
    tiles keeps

        K(N) = ceil(K(reference_tiles) * (N / reference_tiles) ** budget)

    Args:
        topk: tiles that a query tile keeps at the end, at least 1.
        sparsity: share of tiles skipped at the end, in [0, 1). Exactly one of topk and sparsity is required.
        budget: exponent by which the end value follows the number of tiles: count (0), fraction (1) or a number
            between.
        reference_tiles: number of tiles of the grid for which the end value is given; required with a budget.
        dense_layers: layers that always keep all tiles.
        layer_topk: constant top-k of single layers, by layer.
        denoising: plan of changes during a denoising (`denoising@sparsity.denoising=plan`). In training, samples follow
            its ranges by their noise level: the end value of the range replaces that of the schedule, with the same
            annealing, except in layers of layer_topk. Its steps and dense layers apply to sampling only.
    """

    measured = False
    """Whether the top-k depends on measurements that have to be passed to `observe`."""

    def __init__(
        self,
        *,
        topk: AtLeastOne | None = None,
        sparsity: ShareBelowOne | None = None,
        budget: Budget | None = None,
        reference_tiles: AtLeastOne | None = None,
        dense_layers: Sequence[Count] = (),
        layer_topk: LayerTopk | None = None,
        denoising: DenoisingPlan | None = None,
    ):
        if (topk is None) == (sparsity is None):
            raise ValueError(f"expected exactly one of topk and sparsity, got topk={topk} and sparsity={sparsity}")
        if (budget is None) != (reference_tiles is None):
            raise ValueError(
                f"expected both or none of budget and reference_tiles, got budget={budget} and "
                f"reference_tiles={reference_tiles}"
            )
        self._topk, self._sparsity = topk, sparsity
        exponents: dict[Any, Any] = {None: int(topk is None), "count": 0, "fraction": 1}
        self._exponent = exact("budget", exponents.get(budget, budget))
        self._reference_tiles = reference_tiles
        if reference_tiles is not None and topk is not None and topk > reference_tiles:
            raise ValueError(f"topk={topk} is above reference_tiles={reference_tiles}")
        self.dense_layers = tuple(sorted(set(dense_layers)))
        self._layer_topk = {_layer(layer): int(k) for layer, k in (layer_topk or {}).items()}
        both = sorted(self._layer_topk.keys() & self.dense_layers)
        if both:
            raise ValueError(f"layers {both} are both in dense_layers and in layer_topk")
        self.denoising = DenoisingPlan() if denoising is None else denoising
        self._held: int | None = None

    @property
    def budget(self) -> Budget:
        """Dependence of the end value on the number of tiles of a grid: count, fraction or an exponent between them."""
        if self._exponent.denominator == 1:
            return "fraction" if self._exponent else "count"
        return float(self._exponent)

    def topk(self, step: int, num_tiles: int) -> int:
        """Tiles that a query tile keeps, between 1 and num_tiles, in layers without their own top-k.

        Args:
            step: optimizer step, from 0.
            num_tiles: video tiles of a sample.
        """
        raise NotImplementedError

    def final_step(self, num_tiles: int) -> int | None:
        """First step from which the end value holds on a grid of num_tiles; None: it depends on measurements."""
        schedules = (self, *(self._ending_at(*budget) for _, _, budget in self.denoising.ranges))
        ends = [schedule._final_step(num_tiles) for schedule in schedules]
        return None if None in ends else max(end for end in ends if end is not None)

    def _final_step(self, num_tiles: int) -> int | None:
        raise NotImplementedError

    def target_topk(self, num_tiles: int) -> int:
        """The end value on a grid, between 1 and num_tiles."""
        return max(1, min(self._wanted(num_tiles), num_tiles))

    def topk_per_layer(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint = "current") -> Topk:
        """One top-k for all layers, or one per layer where some have their own, with the changes during a denoising.

        Args:
            step: optimizer step, from 0.
            num_tiles: video tiles of a sample.
            num_layers: layers of the model.
            at: current is the top-k of the step, dense all tiles in all layers, target the end value; half and double
                change the top-k of the step, except in `dense_layers`.
        """
        self._check_layers(num_layers)
        if at == "dense":
            return num_tiles
        step = step if self._held is None else self._held
        return self.denoising.on_grid(
            self._row(step, num_tiles, num_layers, at),
            lambda budget: self._ending_at(*budget)._row(step, num_tiles, num_layers, at),
        )

    def held_at(self, step: int) -> Self:
        """This schedule frozen at the top-k of optimizer step `step`, to measure the cost of such a step."""
        changed = copy.copy(self)
        changed._held = step
        return changed

    def with_denoising(self, plan: DenoisingPlan) -> Self:
        """This schedule with another denoising plan."""
        changed = copy.copy(self)
        changed.denoising = plan
        return changed

    def _ending_at(self, topk: int | None, sparsity: float | None) -> SparsitySchedule:
        """This schedule with another end value and the measurements so far."""
        changed = copy.copy(self)
        changed._topk, changed._sparsity = topk, sparsity
        return changed

    def _row(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint) -> Row:
        topk = self.target_topk(num_tiles) if at == "target" else self.topk(step, num_tiles)
        topk = topk_at(topk, num_tiles, at)
        own = dict.fromkeys(self.dense_layers, num_tiles)
        own |= {layer: topk_at(min(k, num_tiles), num_tiles, at) for layer, k in self._layer_topk.items()}
        return tuple(own.get(layer, topk) for layer in range(num_layers)) if own else topk

    def topk_after(self, steps: int, num_tiles: int, num_layers: int, at: SparsityPoint = "current") -> Topk:
        """Top-k of weights after `steps` optimizer steps: that of the last of these steps.

        Validation, diagnostics, sampling, evaluation, export and the logged sparsity all use this function, so that
        their results for one checkpoint refer to one model. Training uses `topk_per_layer` for the next step.

        Args:
            steps: optimizer steps done; for 0 the top-k is that of the first step.
            num_tiles: video tiles of a sample.
            num_layers: layers of the model.
            at: see `topk_per_layer`.
        """
        # steps count from 0: the last of S steps is step S - 1
        return self.topk_per_layer(max(steps - 1, 0), num_tiles, num_layers, at)

    def check(self, num_tiles: int, num_layers: int | None = None) -> None:
        """Raise ValueError if the top-k or the layers of the schedule do not fit a grid or a model.

        Args:
            num_tiles: number of tiles of the largest grid; smaller grids keep all of their tiles.
            num_layers: number of layers of the model; None: layers are not checked.
        """
        self._check_end(num_tiles)
        for budget in (*(budget for _, _, budget in self.denoising.ranges), *(b for _, b in self.denoising.steps)):
            try:
                self._ending_at(*budget)._check_end(num_tiles)
            except ValueError as error:
                raise ValueError(f"denoising: {error}") from None
        if num_layers is not None:
            self._check_layers(num_layers)

    def _check_end(self, num_tiles: int) -> None:
        end_topk = {"topk": self._wanted(num_tiles)}
        end_topk |= {f"layer_topk of layer {layer}": k for layer, k in self._layer_topk.items()}
        for name, k in end_topk.items():
            # a grid of a single tile, as with dense attention, has nothing to select
            if k > num_tiles > 1:
                raise ValueError(f"{name}={k} is above the number of tiles, {num_tiles}")
        if self._sparsity is not None and num_tiles > 1 and (1 - _exact_sparsity(self._sparsity)) * num_tiles < 1:
            most = 1 - 1 / num_tiles
            raise ValueError(f"sparsity={self._sparsity} leaves less than one of {num_tiles} tiles, at most {most:.4g}")

    def observe(self, step: int, missed_share: float) -> None:
        """Process a measurement, see `MissedMassSparsity`; a schedule that depends on the step only ignores it.

        Args:
            step: optimizer steps done.
            missed_share: share of the true attention mass that the selected tiles miss, in [0, 1].
        """

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as plain values for JSON; empty for a pure function of the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but the checkpoint holds that of another schedule")

    def _wanted(self, num_tiles: int) -> int:
        # the end value before it is clamped to the number of tiles
        at = num_tiles if self._reference_tiles is None else self._reference_tiles
        topk = self._topk if self._topk is not None else resolve_topk(self._sparsity or 0, at, self.denoising.rounding)
        if self._reference_tiles is None:
            return topk
        ratio = Fraction(num_tiles, self._reference_tiles)
        if self._exponent.denominator == 1:
            return math.ceil(topk * ratio**self._exponent)
        # decimal powers are the same on every machine; the last digits are rounded off before the ceiling
        power = Decimal(ratio.numerator) / Decimal(ratio.denominator)
        power **= Decimal(self._exponent.numerator) / Decimal(self._exponent.denominator)
        return math.ceil((topk * power).quantize(Decimal("1e-12")))

    def _check_layers(self, num_layers: int) -> None:
        plan = ("denoising.dense_layers", self.denoising.dense_layers)
        for name, layers in (("dense_layers", self.dense_layers), ("layer_topk", self._layer_topk), plan):
            if layers and max(layers) >= num_layers:
                raise ValueError(f"{name} has layer {max(layers)}, but the model's layers are 0 to {num_layers - 1}")


def _layer(key: int | str) -> int:
    # keys of a YAML mapping may arrive as text
    if not str(key).isdecimal():
        raise ValueError(f"layer_topk must name layers from 0 on, by number, got {key!r}")
    return int(key)


class ConstantSparsity(SparsitySchedule):
    """Constant sparsity: the end value at every step; sparsity 0 is dense. Arguments as in `SparsitySchedule`."""

    def topk(self, step: int, num_tiles: int) -> int:
        return self.target_topk(num_tiles)

    def _final_step(self, num_tiles: int) -> int:
        return 0


@checked
class TokenBudgetSparsity(ConstantSparsity):
    """Constant budget of kv tokens per query tile, rounded up to whole tiles: `ceil(tokens / tokens_per_tile)`.

    Args:
        tokens: kv tokens that a query tile attends to, text and cond tokens not counted.
        tokens_per_tile: tokens of a tile of the attention method, 64 for (4, 4, 4).
        budget, reference_tiles, dense_layers, layer_topk, denoising: see `SparsitySchedule`; without a budget every
            grid keeps the same number of tokens.
    """

    def __init__(
        self,
        *,
        tokens: AtLeastOne,
        tokens_per_tile: AtLeastOne,
        budget: Budget | None = None,
        reference_tiles: AtLeastOne | None = None,
        dense_layers: Sequence[Count] = (),
        layer_topk: LayerTopk | None = None,
        denoising: DenoisingPlan | None = None,
    ):
        super().__init__(
            topk=-(-tokens // tokens_per_tile),
            budget=budget,
            reference_tiles=reference_tiles,
            dense_layers=dense_layers,
            layer_topk=layer_topk,
            denoising=denoising,
        )
