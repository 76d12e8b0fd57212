"""Points of a sweep: named variants and axes, with dense controls, learning rates and seeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from vsa.config import Sweep
from vsa.places import check_name
from vsa.settings import shown

DENSE = "attention=full"
SPARSE_GROUPS = ("attention", "sparsity", "start", "tile_thw")
"""Groups of sparse attention settings; the dense control of a point has all its other overrides."""


@dataclass(frozen=True)
class Point:
    """A run of a sweep.

    Args:
        name: name of its folder.
        overrides: overrides that distinguish it from the other points.
        control: whether it is a dense run for comparison with the others.
    """

    name: str
    overrides: tuple[str, ...]
    control: bool = False


def variants_of(
    sweep: Sweep,
    axes: Mapping[str, Sequence[str]],
    *,
    shared: Sequence[str] = (),
    used: Callable[[Sequence[str]], tuple[str, ...]] = tuple,
) -> list[Point]:
    """All points before learning rates and seeds, each with its dense control unless controls are disabled.

    Points omit overrides that do not apply to their attention (how many tiles are kept, if it selects none). Points
    that are equal without such overrides are merged.

    Args:
        sweep: settings of the sweep; its variants are combined with its axes.
        axes: further axes from the command line, with values as text.
        shared: overrides of all points that change how many tiles are kept.
        used: function that selects the overrides of a point that apply to its attention.

    Raises:
        ValueError: no point, an invalid name, or two points with the same name.
    """
    parts: list[list[tuple[str, tuple[str, ...]]]] = []
    if sweep.variants:
        parts.append([(str(name), tuple(overrides)) for name, overrides in sweep.variants.items()])
    for key, values in (*sweep.axes.items(), *axes.items()):
        parts.append([(_label(key, value), (f"{key}={shown(value)}",)) for value in values])
    points: list[Point] = []
    for combination in product(*parts) if parts else ():
        overrides = (*shared, *(o for _, own in combination for o in own))
        used_overrides = used(overrides)
        labels = [label for label, own in combination if not own or set(own) & set(used_overrides)]
        if not labels:
            title = ", ".join(label for label, _ in combination)
            raise ValueError(f"the sweep's point {title} says how many tiles are kept, but its attention has no top-k")
        point = Point("-".join(labels), used_overrides, DENSE in used_overrides)
        if used_overrides == overrides or point not in points:
            points.append(point)
    if sweep.control:
        control_overrides = {_kept(point.overrides) for point in points if point.control}
        for combination in product(*parts) if parts else ():
            control_parts = [(label, _kept(own)) for label, own in combination]
            overrides = tuple(o for _, own in control_parts for o in own)
            if overrides not in control_overrides:
                control_overrides.add(overrides)
                name = "-".join(["dense", *(label for label, own in control_parts if own)])
                points.append(Point(name, (*overrides, DENSE), control=True))
    if not points:
        raise ValueError("the sweep has no point: give sweep.variants, sweep.axes or a list of values, KEY=A,B")
    names = [point.name for point in points]
    for name in names:
        check_name("the sweep's point", name)
        if names.count(name) > 1:
            raise ValueError(f"two points of the sweep have the name {name}: give them names in sweep.variants")
    return points


def _kept(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides that do not concern sparse attention."""
    return tuple(o for o in overrides if re.split(r"[.=@]", o.lstrip("+~"))[0] not in SPARSE_GROUPS)


def _label(key: str, value: Any) -> str:
    """A value as part of a folder name: names are used as they are, numbers follow the key."""
    text = re.sub(r"[^\w.+-]+", "x", shown(value)).strip("x.") or "empty"
    return text if re.match(r"[A-Za-z]", text) and not isinstance(value, bool) else f"{key.rpartition('.')[2]}{text}"


def learning_rates(sweep: Sweep, centre: float) -> list[float]:
    """The rates of a learning-rate sweep around `centre`, with ratio `sweep.lr_factor`."""
    count = sweep.lr or 0
    return [float(f"{centre * sweep.lr_factor ** (i - (count - 1) / 2):.6g}") for i in range(count)]


def at_learning_rates(variant: Point, rates: Sequence[float], seed: int, settings: Sequence[str] = ()) -> list[Point]:
    """A variant at several learning rates, with a seed that no comparison uses and with separate settings."""
    own = (*variant.overrides, f"seed={seed}", *settings)
    return [Point(f"{variant.name}-lr{rate:g}", (*own, f"optim.lr={rate}"), variant.control) for rate in rates]


def at_seeds(variant: Point, seeds: Sequence[int] | None, rate: float | None) -> list[Point]:
    """A variant at every seed, with the learning rate chosen for it."""
    overrides = variant.overrides if rate is None else (*variant.overrides, f"optim.lr={rate}")
    if seeds is None:
        return [Point(variant.name, overrides, variant.control)]
    several = len(seeds) > 1
    return [
        Point(f"{variant.name}-seed{seed}" if several else variant.name, (*overrides, f"seed={seed}"), variant.control)
        for seed in seeds
    ]
