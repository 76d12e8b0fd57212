"""Intervals of a bootstrap: those of a normal mean, which they hold about as often as they say."""

from __future__ import annotations

import math

import pytest
import torch

from vsa.evaluation.bootstrap import mean_interval, resample_counts


def test_counts_are_those_of_draws_with_replacement():
    drawn = torch.randint(5, (40, 5), generator=torch.Generator().manual_seed(3))
    expected = [[row.count(item) for item in range(5)] for row in drawn.tolist()]
    assert resample_counts(5, 40, torch.Generator().manual_seed(3)).tolist() == expected


def test_intervals_are_those_of_a_normal_mean():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = mean_interval(values.tolist(), draws=4000)
    reach = 1.96 * float(values.std()) / math.sqrt(len(values))
    assert (low, high) == pytest.approx((float(values.mean()) - reach, float(values.mean()) + reach), abs=0.08 * reach)
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5)


def test_intervals_hold_the_mean_about_as_often_as_they_say():
    sets = 2 + torch.randn(300, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ends = torch.tensor([mean_interval(values.tolist()) for values in sets])
    assert 0.88 < float(((ends[:, 0] < 2) & (ends[:, 1] > 2)).double().mean()) < 0.97
    # control: half of their width
    middle, reach = ends.mean(1), (ends[:, 1] - ends[:, 0]) / 4
    assert float(((middle - 2).abs() < reach).double().mean()) < 0.8


def test_one_value_has_no_interval():
    with pytest.raises(ValueError, match="an interval needs at least 2 values, got 1"):
        mean_interval([1.0])
