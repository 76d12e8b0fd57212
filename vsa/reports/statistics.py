"""Statistics of a comparison of runs: spread over seeds, a paired test, the Pareto front, power laws.

The module needs only numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_SAMPLES = 20
"""Fewest validation samples of a p-value, since the t-test assumes that their mean is normally distributed."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Mean and range of several curves.

    Args:
        steps: steps at which at least one curve has a value.
        mean, low, high: mean, smallest and largest value at each step, over the curves that have one.
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band:
    """Mean, smallest and largest value of curves (steps, values) by step, over the curves that have the step."""
    steps = np.unique(np.concatenate([np.asarray(steps) for steps, _ in curves] or [np.array([])]))
    table = np.full((len(curves), len(steps)), np.nan)
    for row, (own, values) in zip(table, curves, strict=True):
        row[np.searchsorted(steps, own)] = values
    if not table.size:
        return Band(steps=steps, mean=steps, low=steps, high=steps)
    # a NaN counts as a missing value
    values = np.ma.masked_where(np.isnan(table), table)
    mean, low, high = (edge.filled(np.nan) for edge in (values.mean(0), values.min(0), values.max(0)))
    return Band(steps=steps, mean=mean, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of paired differences.

    Args:
        mean: mean of first minus second.
        low, high: 95% confidence interval of the mean.
        p: two-sided p-value of the hypothesis that the mean is 0; None for fewer than `FEWEST_SAMPLES`.
        samples: number of pairs that count as independent.
    """

    mean: float
    low: float
    high: float
    p: float | None
    samples: int


def paired_difference(
    first: Sequence[Mapping[tuple[str, float], float]], second: Sequence[Mapping[tuple[str, float], float]]
) -> Difference | None:
    """Student's paired t-test of losses on the same (sample, noise level), run by run.

    The differences of a sample at all its noise levels and in all runs are averaged first, since they are not
    independent. The interval therefore covers the choice of samples for these runs; the spread over seeds covers the
    choice of seeds.

    Args:
        first: losses of each run by (sample, noise level).
        second: losses of the runs that they are compared with, in the same order.

    Returns:
        The difference; None if a run and its partner were validated on different pairs, or on fewer than two samples.
    """
    by_sample: dict[str, list[float]] = {}
    for ours, theirs in zip(first, second, strict=True):
        if not ours or set(ours) != set(theirs):
            return None
        for key, loss in ours.items():
            by_sample.setdefault(key[0], []).append(loss - theirs[key])
    differences = np.array([np.mean(values) for values in by_sample.values()])
    n = len(differences)
    if n < 2 or not np.isfinite(differences).all():
        return None
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(n)
    reach = t_quantile(n - 1) * error
    p = None if n < FEWEST_SAMPLES else t_p_value(mean / error, n - 1) if error else float(mean == 0)
    return Difference(mean=mean, low=mean - reach, high=mean + reach, p=p, samples=n)


def t_p_value(t: float, freedom: int) -> float:
    """Two-sided p-value of Student's t with `freedom` degrees of freedom.

    The sums are finite and exact (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cos2 = math.cos(angle) ** 2
    odd = freedom % 2
    # odd: cos + 2/3 cos^3 + (2 4)/(3 5) cos^5 + ...; even: 1 + 1/2 cos^2 + (1 3)/(2 4) cos^4 + ...
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return min(1.0, max(0.0, 1 - inside))


def t_quantile(freedom: int, p: float = 0.05) -> float:
    """The t with two-sided p-value `p`."""
    low, high = 0.0, 1.0
    while t_p_value(high, freedom) > p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_p_value(middle, freedom) > p else (low, middle)
    return (low + high) / 2


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values with Holm's correction for multiple comparisons (Holm, 1979)."""
    adjusted = [0.0] * len(p_values)
    most = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = most
    return adjusted


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the Pareto-optimal points, where smaller is better in both coordinates, sorted by the first one."""
    front: list[int] = []
    best = math.inf
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best or (front and points[i] == points[front[-1]]):
            front.append(i)
            best = points[i][1]
    return front


class PowerLaw:
    """`loss = scale * size ** exponent`: a straight line between the logarithms by least squares.

    The fit has no irreducible loss: a handful of sizes cannot distinguish one from a smaller exponent.

    Args:
        sizes: at least three different sizes, above 0.
        losses: their losses, above 0.

    Attributes:
        exponent: exponent, negative if larger sizes are better.
        interval: 95% confidence interval of the exponent, Student's.
        scale: loss at size 1.
    """

    def __init__(self, sizes: Sequence[float], losses: Sequence[float]):
        x, y = np.log(sizes), np.log(losses)
        self._points, self._mean_log, self._spread = len(x), float(x.mean()), float(((x - x.mean()) ** 2).sum())
        self.exponent = float(((x - x.mean()) * (y - y.mean())).sum()) / self._spread
        self.scale = math.exp(y.mean() - self.exponent * x.mean())
        squares = float(((y - math.log(self.scale) - self.exponent * x) ** 2).sum())
        # standard deviation of the residuals of ln loss, times t
        self._reach = t_quantile(len(x) - 2) * math.sqrt(squares / (len(x) - 2))
        reach = self._reach / math.sqrt(self._spread)
        self.interval = (self.exponent - reach, self.exponent + reach)

    def at(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Loss at `sizes`, and the limits of the 95% confidence interval of the line there (not of a single run)."""
        logs = np.log(sizes)
        line = math.log(self.scale) + self.exponent * logs
        reach = self._reach * np.sqrt(1 / self._points + (logs - self._mean_log) ** 2 / self._spread)
        return np.exp(line), np.exp(line - reach), np.exp(line + reach)


def fit_power_law(sizes: Sequence[float], losses: Sequence[float]) -> PowerLaw | None:
    """The fit; None for fewer than three different sizes, or a value that is not positive and finite."""
    if len(set(sizes)) < 3 or min(*sizes, *losses) <= 0 or not np.isfinite([*sizes, *losses]).all():
        return None
    return PowerLaw(sizes, losses)
