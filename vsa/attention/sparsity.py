"""Sparsity schedules: the number of kv tiles that a query tile keeps, by optimizer step and layer.

Sparsity is the share of kv tiles that a query tile skips. N tiles of a grid, K kept tiles.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, Self

from vsa.attention.denoising import DenoisingPlan
from vsa.attention.kept_tiles import Budget, KeptTiles, exact
from vsa.settings import AtLeastOne, Count, Share, ShareBelowOne, validated

SparsityPoint = Literal["current", "dense", "target", "half", "double", "quadruple"]
"""Point of a schedule: the top-k of the step, all tiles, the end value, half, double or four times the top-k of
the step."""

Scaling = Literal["count", "fraction"] | Share
"""How the end value follows the number of tiles: the same count, the same fraction, or an exponent between them."""

SPARSITY_POINTS: tuple[SparsityPoint, ...] = ("current", "dense", "target", "half", "double", "quadruple")


def check_points(name: str, points: Sequence[str]) -> tuple[SparsityPoint, ...]:
    """The checked points of an option called `name`, in the order of `SPARSITY_POINTS`."""
    ordered: tuple[SparsityPoint, ...] = tuple(point for point in SPARSITY_POINTS if point in points)
    if not ordered or len(ordered) < len(points):
        raise ValueError(f"{name} must hold some of {', '.join(SPARSITY_POINTS)}, each once, got {list(points)}")
    return ordered


def topk_at(topk: int, num_tiles: int, at: SparsityPoint) -> int:
    """A top-k halved (rounded up), doubled or four times as large at these points; between 1 and num_tiles."""
    target = {"half": -(-topk // 2), "double": 2 * topk, "quadruple": 4 * topk}.get(at, topk)
    return max(1, min(target, num_tiles))


@validated
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
        budget: Scaling | None = None,
        reference_tiles: AtLeastOne | None = None,
        dense_layers: Sequence[Count] = (),
        layer_topk: Mapping[Any, AtLeastOne] | None = None,
        denoising: DenoisingPlan | None = None,
    ):
        if (topk is None) == (sparsity is None):
            raise ValueError(f"expected exactly one of topk and sparsity, got topk={topk} and sparsity={sparsity}")
        if (budget is None) != (reference_tiles is None):
            raise ValueError(
                f"expected both or none of budget and reference_tiles, got budget={budget} and "
                f"reference_tiles={reference_tiles}"
            )
        self._end = Budget(topk, sparsity)
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
    def budget(self) -> Scaling:
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
        schedules = (self, *(self._ending_at(budget) for _, _, budget in self.denoising.ranges))
        ends = [schedule._final_step(num_tiles) for schedule in schedules]
        return None if None in ends else max(end for end in ends if end is not None)

    def _final_step(self, num_tiles: int) -> int | None:
        raise NotImplementedError

    def target_topk(self, num_tiles: int) -> int:
        """The end value on a grid, between 1 and num_tiles."""
        return max(1, min(self._wanted(num_tiles), num_tiles))

    def topk_per_layer(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint = "current") -> KeptTiles:
        """Tiles kept in a step: of all layers, or of each where some have their own, with the changes in a denoising.

        Args:
            step: optimizer step, from 0.
            num_tiles: video tiles of a sample.
            num_layers: layers of the model.
            at: current is the top-k of the step, dense all tiles in all layers, target the end value; half, double and
                quadruple change the top-k of the step, except in `dense_layers`.
        """
        self._check_layers(num_layers)
        if at == "dense":
            return KeptTiles((num_tiles,))
        step = step if self._held is None else self._held
        return self.denoising.on_grid(
            self._layers(step, num_tiles, num_layers, at),
            lambda budget: self._ending_at(budget)._layers(step, num_tiles, num_layers, at),
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

    def _ending_at(self, end: Budget) -> SparsitySchedule:
        """This schedule with another end value and the measurements so far."""
        changed = copy.copy(self)
        changed._end = end
        return changed

    def _layers(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint) -> tuple[float, ...]:
        topk = self.target_topk(num_tiles) if at == "target" else self.topk(step, num_tiles)
        topk = topk_at(topk, num_tiles, at)
        own = dict.fromkeys(self.dense_layers, num_tiles)
        own |= {layer: topk_at(min(k, num_tiles), num_tiles, at) for layer, k in self._layer_topk.items()}
        return tuple(own.get(layer, topk) for layer in range(num_layers if own else 1))

    def topk_after(self, steps: int, num_tiles: int, num_layers: int, at: SparsityPoint = "current") -> KeptTiles:
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
                self._ending_at(budget)._check_end(num_tiles)
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
        if self._end.topk is None:
            self._end.check(num_tiles)

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
        topk = self._end.wanted(at, self.denoising.rounding)
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


@validated
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
        budget: Scaling | None = None,
        reference_tiles: AtLeastOne | None = None,
        dense_layers: Sequence[Count] = (),
        layer_topk: Mapping[Any, AtLeastOne] | None = None,
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
