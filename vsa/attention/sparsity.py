"""How many tiles a query tile keeps, by optimizer step and layer.

Sparsity is the share of kv tiles skipped per query tile. N tiles of a grid, K of them kept.
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
"""Where to look at a schedule: what the step asks for, all tiles, its end value, half or double what the step asks."""

Budget = Literal["count", "fraction"] | Share
LayerTopk = Mapping[Any, AtLeastOne]

SPARSITY_POINTS: tuple[SparsityPoint, ...] = ("current", "dense", "target", "half", "double")


def resolve_topk(sparsity: float | str, num_tiles: int, rounding: Rounding = "up") -> int:
    """Tiles kept at a sparsity: `clamp(ceil((1 - sparsity) * num_tiles), 1, num_tiles)`, or the floor.

    The sparsity is taken as the decimal number it is written as: in binary floats `(1 - 0.7) * 10` ceils to 4.

    Args:
        sparsity: share of tiles skipped, in [0, 1).
        num_tiles: kv tiles there are.
        rounding: up (ceil) or down (floor).

    Raises:
        ValueError: sparsity outside [0, 1) or not a number, num_tiles below 1.

    Source: up: VSA's code (methods 1.1), its paper gives top-k directly; down: DFSAttn's code (methods 5.2).
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles must be at least 1, got {num_tiles}")
    kept = (1 - _exact_sparsity(sparsity)) * num_tiles
    kept = math.ceil(kept) if rounding == "up" else math.floor(kept)
    return max(1, min(kept, num_tiles))


def check_points(name: str, points: Sequence[str]) -> tuple[SparsityPoint, ...]:
    """The points of an option called `name`.

    Raises:
        ValueError: none, one twice, or one that is not in SPARSITY_POINTS.
    """
    ordered: tuple[SparsityPoint, ...] = tuple(point for point in SPARSITY_POINTS if point in points)
    if not ordered or len(ordered) < len(points):
        raise ValueError(f"{name} must hold some of {', '.join(SPARSITY_POINTS)}, each once, got {list(points)}")
    return ordered


def topk_at(topk: int, num_tiles: int, at: SparsityPoint) -> int:
    """A top-k between 1 and num_tiles halved (rounded up), doubled, or as it is at every other point."""
    wanted = {"half": -(-topk // 2), "double": 2 * topk}.get(at, topk)
    return max(1, min(wanted, num_tiles))


def mean_topk(topk: float | Sequence[float], num_tiles: int) -> float:
    """Tiles a query tile keeps in the mean over the layers.

    Args:
        topk: one for all layers, or one per layer.
        num_tiles: N; no layer keeps more.
    """
    topks = [topk] if isinstance(topk, int | float) else topk
    return sum(min(k, num_tiles) for k in topks) / len(topks)


def expected_topk(topk: Topk, num_layers: int, share: Callable[[float, float], float]) -> float | tuple[float, ...]:
    """Tiles kept in the mean over samples, of all layers or of each.

    Args:
        topk: on one grid.
        num_layers: of the model.
        share: of the samples whose denoising progress lies between two values.
    """
    if not isinstance(topk, DenoisingTopk):
        return topk
    rows = [(weight, per_layer(row, num_layers)) for weight, row in topk.weighted(share)]
    means = tuple(math.fsum(weight * row[layer] for weight, row in rows) for layer in range(num_layers))
    return means[0] if len(set(means)) == 1 else means


def exact(name: str, value: float | str) -> Fraction:
    """The decimal number that an option called `name` is written as.

    Raises:
        ValueError: no finite number.
    """
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
    """A top-k on one grid with the other budgets of a plan, none of which keeps more than all tiles."""
    own = DenoisingPlan(rounding=plan.rounding)
    return plan.on_grid(topk, lambda budget: ConstantSparsity(**budget._asdict(), denoising=own).target_topk(num_tiles))


@checked
class SparsitySchedule:
    """Top-k of each optimizer step and layer, on the way from all tiles to an end value.

    The end value is a `topk`, the same count on every grid (a grid of fewer tiles keeps all of its own), or a
    `sparsity`, the same fraction on every grid. With a `budget` it is the value on a grid of `reference_tiles`, and a
    grid of N keeps

        K(N) = ceil(K(reference_tiles) * (N / reference_tiles) ** budget)

    Args:
        topk: tiles kept in the end, at least 1.
        sparsity: share of tiles skipped in the end, in [0, 1). Exactly one of the two is given.
        budget: count (exponent 0), fraction (1) or the exponent, between 0 and 1.
        reference_tiles: N of the grid that the end value is meant for; given with a budget only.
        dense_layers: layers that always keep all tiles.
        layer_topk: top-k of the layers that have one of their own, the same at every step.
        denoising: what differs during a denoising (`denoising@sparsity.denoising=plan`). Samples of training follow
            its ranges by their noise level: the end value of a range takes the place of the schedule's, on the same
            way down, except in layers that have a top-k of their own. Its steps and dense layers are of sampling alone.

    Raises:
        ValueError: a value out of range, or options that exclude or need each other.
    """

    measured = False
    """Whether the top-k follows `observe`, so that somebody has to call it."""

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
            raise ValueError(f"give exactly one of topk and sparsity, got topk={topk} and sparsity={sparsity}")
        if (budget is None) != (reference_tiles is None):
            raise ValueError(
                f"budget and reference_tiles come together, got budget={budget} and reference_tiles={reference_tiles}"
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
            raise ValueError(f"layers {both} are in dense_layers and in layer_topk: a layer has one top-k")
        self.denoising = DenoisingPlan() if denoising is None else denoising
        self._held: int | None = None

    @property
    def budget(self) -> Budget:
        """How the end value follows the number of tiles of a grid: count, fraction or the exponent between them."""
        if self._exponent.denominator == 1:
            return "fraction" if self._exponent else "count"
        return float(self._exponent)

    def topk(self, step: int, num_tiles: int) -> int:
        """Tiles a query tile keeps in layers without a top-k of their own, between 1 and num_tiles.

        Args:
            step: optimizer step, from 0.
            num_tiles: video tiles of a sample.
        """
        raise NotImplementedError

    def final_step(self, num_tiles: int) -> int | None:
        """First step from which the end values hold on a grid of num_tiles; None: it depends on measurements."""
        schedules = (self, *(self._ending_at(*budget) for _, _, budget in self.denoising.ranges))
        ends = [schedule._final_step(num_tiles) for schedule in schedules]
        return None if None in ends else max(end for end in ends if end is not None)

    def _final_step(self, num_tiles: int) -> int | None:
        raise NotImplementedError

    def target_topk(self, num_tiles: int) -> int:
        """The end value on a grid, between 1 and num_tiles."""
        return max(1, min(self._wanted(num_tiles), num_tiles))

    def topk_per_layer(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint = "current") -> Topk:
        """One top-k for all layers, or one per layer when some layers have their own; with what differs in a denoising.

        Args:
            step: optimizer step, from 0.
            num_tiles: video tiles of a sample.
            num_layers: layers of the model.
            at: current follows the step, dense keeps all tiles in all layers, target is the end value; half and double
                are of what the step asks, except in `dense_layers`.

        Raises:
            ValueError: a layer with a top-k of its own that the model does not have.
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
        """This schedule with the top-k of optimizer step `step` at every step, to measure what such a step takes."""
        changed = copy.copy(self)
        changed._held = step
        return changed

    def with_denoising(self, plan: DenoisingPlan) -> Self:
        """This schedule with another plan."""
        changed = copy.copy(self)
        changed.denoising = plan
        return changed

    def _ending_at(self, topk: int | None, sparsity: float | None) -> SparsitySchedule:
        """This schedule, with what it measured so far, and another end value."""
        changed = copy.copy(self)
        changed._topk, changed._sparsity = topk, sparsity
        if self._reference_tiles is None:
            changed._exponent = exact("budget", int(topk is None))
        return changed

    def _row(self, step: int, num_tiles: int, num_layers: int, at: SparsityPoint) -> Row:
        topk = self.target_topk(num_tiles) if at == "target" else self.topk(step, num_tiles)
        topk = topk_at(topk, num_tiles, at)
        own = dict.fromkeys(self.dense_layers, num_tiles)
        own |= {layer: topk_at(min(k, num_tiles), num_tiles, at) for layer, k in self._layer_topk.items()}
        return tuple(own.get(layer, topk) for layer in range(num_layers)) if own else topk

    def topk_after(self, steps: int, num_tiles: int, num_layers: int, at: SparsityPoint = "current") -> Topk:
        """Top-k of weights after `steps` optimizer steps, wherever they are looked at: that of the last of these steps.

        Validation, diagnostics, sampling, evaluation, export and the logged sparsity all ask here, so that what they
        say of one checkpoint is about one model. Training itself asks `topk_per_layer` for the step to come.

        Args:
            steps: optimizer steps done; after none the top-k is that of the first step.
            num_tiles: video tiles of a sample.
            num_layers: layers of the model.
            at: see `topk_per_layer`.

        Raises:
            ValueError: see `topk_per_layer`.
        """
        # steps count from 0: the last of S steps is step S - 1
        return self.topk_per_layer(max(steps - 1, 0), num_tiles, num_layers, at)

    def check(self, num_tiles: int, num_layers: int | None = None) -> None:
        """Refuse a grid or a model that cannot give what the schedule asks for.

        Args:
            num_tiles: of the largest grid; smaller ones keep all of their tiles.
            num_layers: layers of the model; None leaves the layers unchecked.

        Raises:
            ValueError: a top-k above num_tiles, a sparsity that leaves less than a tile, a layer that does not exist.
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
        wanted = {"topk": self._wanted(num_tiles)}
        wanted |= {f"layer_topk of layer {layer}": k for layer, k in self._layer_topk.items()}
        for name, k in wanted.items():
            # a grid in one tile, dense attention among them, has nothing to select
            if k > num_tiles > 1:
                raise ValueError(f"{name}={k} is above the number of tiles, {num_tiles}")
        if self._sparsity is not None and num_tiles > 1 and (1 - _exact_sparsity(self._sparsity)) * num_tiles < 1:
            most = 1 - 1 / num_tiles
            raise ValueError(f"sparsity={self._sparsity} leaves less than one of {num_tiles} tiles, at most {most:.4g}")

    def observe(self, step: int, missed_share: float) -> None:
        """Take in a measurement, see `MissedMassSparsity`; a schedule that follows the step alone ignores it.

        Args:
            step: optimizer steps done.
            missed_share: share of the true attention mass that the selected tiles miss, in [0, 1].
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep, as plain values for JSON; empty for a pure function of the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ValueError: the state is that of another schedule.
        """
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, the checkpoint has that of another schedule")

    def _wanted(self, num_tiles: int) -> int:
        # the end value before it is held to the tiles there are
        at = num_tiles if self._reference_tiles is None else self._reference_tiles
        kept = self._topk if self._topk is not None else resolve_topk(self._sparsity or 0, at, self.denoising.rounding)
        if self._reference_tiles is None:
            return kept
        ratio = Fraction(num_tiles, self._reference_tiles)
        if self._exponent.denominator == 1:
            return math.ceil(kept * ratio**self._exponent)
        # decimal powers are the same on every machine; the last digits are rounded off before the ceiling
        power = Decimal(ratio.numerator) / Decimal(ratio.denominator)
        power **= Decimal(self._exponent.numerator) / Decimal(self._exponent.denominator)
        return math.ceil((kept * power).quantize(Decimal("1e-12")))

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
    """The end value at every step; sparsity 0 is dense. Args: those of `SparsitySchedule`."""

    def topk(self, step: int, num_tiles: int) -> int:
        return self.target_topk(num_tiles)

    def _final_step(self, num_tiles: int) -> int:
        return 0


@checked
class TokenBudgetSparsity(ConstantSparsity):
    """So many kv tokens per query tile at every step, in whole tiles: `ceil(tokens / tokens_per_tile)` of them.

    Args:
        tokens: kv tokens a query tile attends to, text and cond tokens not counted.
        tokens_per_tile: tile volume of the attention method, 64 for (4, 4, 4).
        budget, reference_tiles, dense_layers, layer_topk, denoising: see `SparsitySchedule`; without a budget every
            grid keeps the same number of tokens.

    Raises:
        ValueError: see `SparsitySchedule`.
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
