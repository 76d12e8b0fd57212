"""The runs of each leg: variants, learning rates and seeds, of which later legs take the best of earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.race.archive import archived, finished, unscored
from benchmarks.race.legs import BEST, DENSE, LEGS, REFERENCE, START, folder
from benchmarks.race.ranking import loss_of, ranked
from vsa.reports.runs import Run


def variants(name: str) -> dict[str, list[str]]:
    """Settings of the variants of a leg.

    Raises:
        ValueError: a leg that decides on them is incomplete.
    """
    leg = LEGS[name]
    if leg.best_of is None:
        return leg.variants
    if to_go(leg.best_of):
        raise ValueError(f"{name} trains the best of {leg.best_of}, of which runs are missing")
    order = [row.name for row in ranked(finished(leg.best_of)) if row.name not in (REFERENCE, DENSE)]
    return {key: leg.variants[key] for key in (REFERENCE, DENSE, *order[:BEST])}


def best_rates() -> dict[str, float]:
    """The learning rate of each variant that has the lowest loss in the leg `rates`.

    Raises:
        ValueError: one of its runs is missing.
    """
    if to_go("rates"):
        raise ValueError("learning rates come from the leg rates, of which runs are missing: run and pack it first")
    losses = {key: {rate_of(run): loss_of(run) for run in runs} for key, runs in finished("rates").items()}
    return {key: min(own, key=own.__getitem__) for key, own in losses.items()}


def rate_of(run: Run) -> float:
    """Its learning rate."""
    return float(run.settings["optim.lr"])


def points(name: str, seeds: Sequence[int]) -> dict[str, list[str]]:
    """Settings of the runs of a leg, seed by seed.

    Raises:
        ValueError: a leg that decides on variants or learning rates is incomplete.
    """
    leg = LEGS[name]
    if leg.repeats:
        return {key: own for key, own in points(leg.repeats, seeds).items() if key in unscored(leg.repeats)}
    best = {} if leg.rates or not leg.own_rate else best_rates()
    all_points = {}
    for seed in seeds:
        for variant, settings in variants(name).items():
            own = [*leg.settings, *settings, f"seed={seed}"]
            if name == "finetune":
                own.append(f"init_from={folder(START) / DENSE}-seed{seed}")
            for rate in leg.rates:
                all_points[f"{variant}-lr{rate:g}-seed{seed}"] = [*own, f"optim.lr={rate}"]
            if not leg.rates:
                all_points[f"{variant}-seed{seed}"] = [*own, *([f"optim.lr={best[variant]}"] if best else [])]
    return all_points


def to_go(name: str) -> int:
    """Number of runs of a leg that its archive has not."""
    leg = LEGS[name]
    if leg.repeats:
        return len(unscored(leg.repeats) - archived(name))
    count = BEST + 2 if leg.best_of else len(leg.variants)
    return count * len(leg.seeds) * max(1, len(leg.rates)) - len(archived(name))


def missing() -> Iterator[str]:
    """A line for each leg: runs to go and their GPU minutes."""
    total = 0.0
    for name, leg in LEGS.items():
        runs = to_go(name)
        total += runs * leg.minutes
        yield f"{name:10} {runs:4} of {runs + len(archived(name))} runs, {runs * leg.minutes:.0f} GPU minutes"
    yield f"{'all':10} {total:.0f} GPU minutes, with five runs on a GPU at a time"
