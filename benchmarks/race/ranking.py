"""Variants compared seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from benchmarks.race.legs import REFERENCE
from vsa.reports.runs import Run
from vsa.reports.statistics import holm, t_p_value, t_quantile


@dataclass(frozen=True, kw_only=True)
class Row:
    """A variant beside the reference.

    Args:
        name: the variant.
        runs: its runs.
        apart: difference of its loss from the reference by seed.
        reach: half of the 95% interval of their mean; None for the reference, or with fewer than two seeds.
        p: p-value of their mean, corrected by Holm's method for all variants of the leg.
    """

    name: str
    runs: Sequence[Run]
    apart: Sequence[float] = ()
    reach: float | None = None
    p: float | None = None

    @property
    def loss(self) -> float:
        return fmean(loss_of(run) for run in self.runs)

    @property
    def verdict(self) -> str:
        """`before` or `behind` where every seed says so and the seeds' noise does not explain it, otherwise `level`."""
        if self.p is None:
            return ""
        same = all(x < 0 for x in self.apart) or all(x > 0 for x in self.apart)
        return ("before" if self.apart[0] < 0 else "behind") if same and self.p < 0.05 else "level"


def ranked(runs_by_name: Mapping[str, Sequence[Run]], reference: str = REFERENCE) -> list[Row]:
    """Variants from the lowest loss to the highest, each compared with the reference seed by seed.

    The noise of a run is what variant and seed do not explain, over all variants of the leg (a randomised block design,
    whose blocks are the seeds), since two or three seeds of one variant say little about it.
    """
    losses = {name: {run.seed: loss_of(run) for run in runs} for name, runs in runs_by_name.items()}
    seeds = sorted(set.intersection(*(set(own) for own in losses.values())))
    whole = np.array([[own[seed] for seed in seeds] for own in losses.values()])
    freedom = (len(whole) - 1) * (len(seeds) - 1)
    if freedom > 0:
        rest = whole - whole.mean(1, keepdims=True) - whole.mean(0) + whole.mean()
        noise = math.sqrt(2 * (rest**2).sum() / freedom)
    rows = []
    for name, runs in runs_by_name.items():
        apart = [
            losses[name][seed] - losses[reference][seed] for seed in losses[name] if seed in losses.get(reference, {})
        ]
        row = Row(name=name, runs=runs, apart=[] if name == reference else apart)
        if row.apart and freedom > 0:
            error = noise / math.sqrt(len(apart))
            p = t_p_value(fmean(apart) / error, freedom)
            row = replace(row, reach=t_quantile(freedom) * error, p=p)
        rows.append(row)
    p_values = {row.name: row.p for row in rows if row.p is not None}
    corrected = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    return sorted((replace(row, p=corrected.get(row.name)) for row in rows), key=lambda row: row.loss)


def loss_of(run: Run) -> float:
    """Its last validation loss."""
    assert run.val_loss is not None
    return run.val_loss
