"""Statistics of a report against independent computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsa.evaluation.figures import running_mean
from vsa.pages.charts import thinned
from vsa.reports.statistics import (
    band,
    fit_power_law,
    holm,
    paired_difference,
    pareto_front,
    t_p_value,
    t_quantile,
)


def integrated_p(t: float, freedom: int) -> float:
    """Two-sided p by the trapezoid rule over the density of Student's t."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    x = np.linspace(0, abs(t), 200_001)
    return 1 - 2 * float(np.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 199])
def test_p_values_are_the_integral_of_the_density(freedom):
    for t in (0.0, 0.3, -1.7, 4.0):
        assert t_p_value(t, freedom) == pytest.approx(integrated_p(t, freedom), abs=1e-8)
    # control: a degree of freedom more shows
    assert abs(t_p_value(1.7, freedom) - integrated_p(1.7, freedom + 1)) > 1e-6
    assert t_p_value(t_quantile(freedom, 0.01), freedom) == pytest.approx(0.01)


@pytest.mark.parametrize(("freedom", "tabled"), [(1, 12.706), (2, 4.303), (10, 2.228), (30, 2.042), (120, 1.980)])
def test_quantiles_are_those_of_the_tables(freedom, tabled):
    assert t_quantile(freedom) == pytest.approx(tabled, abs=5e-4)


def losses_of(values: list[float], level: float = 0.5) -> dict[tuple[str, float], float]:
    return {(f"sample-{i}", level): value for i, value in enumerate(values)}


def test_paired_difference_of_textbook_numbers():
    # sleep data of Student (1908): ten patients, two drugs; t = -4.0621, p = 0.002833, interval -2.46 to -0.70
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired_difference([losses_of(first)], [losses_of(second)])
    assert result is not None
    assert result.mean == pytest.approx(-1.58)
    assert t_p_value(-4.062128, 9) == pytest.approx(0.002833, abs=1e-6)
    # ten are too few to say so
    assert result.p is None
    assert (result.low, result.high) == (pytest.approx(-2.4598858), pytest.approx(-0.7001142))
    # the pairing is what finds it: unpaired it is not there
    reverse = paired_difference([losses_of(first)], [losses_of(second[::-1])])
    assert reverse is not None
    assert reverse.low < 0 < reverse.high
    assert reverse.mean == pytest.approx(result.mean)


def test_rows_of_one_sample_count_once():
    rng = np.random.default_rng(0)
    values = rng.normal(0.1, 1, 20)
    once = paired_difference([losses_of(values.tolist())], [losses_of([0.0] * 20)])
    # each of three seeds says the same: no more is known than from one
    seeds = [losses_of(values.tolist(), level) for level in (0.1, 0.2, 0.3)]
    thrice = paired_difference(seeds, [{key: 0.0 for key in seed} for seed in seeds])
    assert once is not None
    assert thrice is not None
    assert thrice.samples == 20
    assert (thrice.low, thrice.high, thrice.p) == pytest.approx((once.low, once.high, once.p))
    # control: counted as 60 they would seem surer
    assert paired_difference([losses_of([*values] * 3)], [losses_of([0.0] * 60)]).p < once.p  # type: ignore[union-attr]


def test_what_cannot_be_paired_is_not_compared():
    ours = losses_of([1.0, 2.0, 3.0])
    assert paired_difference([ours], [losses_of([1.0, 2.0, 3.0], level=0.6)]) is None
    assert paired_difference([ours], [losses_of([1.0, 2.0])]) is None
    assert paired_difference([{}], [{}]) is None
    assert paired_difference([losses_of([1.0])], [losses_of([2.0])]) is None
    assert paired_difference([losses_of([1.0, math.nan])], [losses_of([1.0, 2.0])]) is None
    same = paired_difference([ours], [ours])
    assert same is not None
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, None)


def test_a_p_value_needs_twenty_samples():
    for count in (2, 19, 20):
        values = np.random.default_rng(3).normal(1, 0.1, count).tolist()
        result = paired_difference([losses_of(values)], [losses_of([0.0] * count)])
        assert result is not None
        assert (result.p is None) == (count < 20)
    same = paired_difference([losses_of([1.0] * 20)], [losses_of([1.0] * 20)])
    assert same is not None
    assert same.p == 1.0


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        result = paired_difference([losses_of(rng.normal(0.3, 1, 20).tolist())], [losses_of([0.0] * 20)])
        assert result is not None
        assert result.p is not None
        hits += result.low <= 0.3 <= result.high
        # it holds 0 exactly where p is above 5%
        assert (result.low <= 0 <= result.high) == (result.p >= 0.05)
    assert 930 <= hits <= 970


def test_holm_is_the_definition():
    p = [0.01, 0.04, 0.03, 0.005]
    # smallest times 4, next times 3, ...; never below the one before
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_pareto_front_is_the_definition(points):
    def beaten(one, other):
        return other[0] <= one[0] and other[1] <= one[1] and other != one

    expected = [i for i, one in enumerate(points) if not any(beaten(one, other) for other in points)]
    assert sorted(pareto_front(points)) == expected


def test_a_known_power_law_is_found():
    sizes = np.array([1e16, 1e17, 1e18, 1e19])
    exact = fit_power_law(sizes.tolist(), (3.0 * sizes**-0.05).tolist())
    assert exact is not None
    assert exact.exponent == pytest.approx(-0.05)
    assert exact.scale == pytest.approx(3.0)
    # with 1% noise the interval holds the exponent as often as it says
    rng, hits, line_hits = np.random.default_rng(2), 0, 0
    for _ in range(500):
        noisy = 3.0 * sizes**-0.05 * np.exp(rng.normal(0, 0.01, 4))
        fit = fit_power_law(sizes.tolist(), noisy.tolist())
        assert fit is not None
        hits += fit.interval[0] <= -0.05 <= fit.interval[1]
        middle, low, high = fit.at(np.array([1e20]))
        assert low[0] < middle[0] < high[0]
        line_hits += low[0] <= 3.0 * 1e20**-0.05 <= high[0]
    assert 460 <= hits <= 490
    assert 460 <= line_hits <= 490


@pytest.mark.parametrize(("sizes", "losses"), [([1, 2, 2], [3, 2, 1]), ([1, 2, 3], [1, 0, 1]), ([1, 2], [2, 1])])
def test_too_little_for_a_power_law(sizes, losses):
    assert fit_power_law(sizes, losses) is None


def test_bands_are_by_step():
    result = band([(np.array([1, 2, 4]), np.array([1.0, 2.0, 4.0])), (np.array([2, 4]), np.array([4.0, math.nan]))])
    assert result.steps.tolist() == [1, 2, 4]
    assert result.mean.tolist() == [1.0, 3.0, 4.0]
    assert result.low.tolist() == [1.0, 2.0, 4.0]
    assert result.high.tolist() == [1.0, 4.0, 4.0]
    assert len(band([]).steps) == 0


def test_smoothing_and_thinning():
    values = np.arange(10.0)
    assert running_mean(values, 3).tolist() == pytest.approx([values[max(0, i - 2) : i + 1].mean() for i in range(10)])
    assert thinned(5, 10).tolist() == [0, 1, 2, 3, 4]
    indices = thinned(10_000, 300)
    assert len(indices) == 300
    assert (indices[0], indices[-1]) == (0, 9999)
    assert len(thinned(0, 3)) == 0
