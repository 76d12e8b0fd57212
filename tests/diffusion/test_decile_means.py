import math

import pytest
import torch

from vsa.diffusion.decile_means import DecileMeans

VALUES, SIGMAS = torch.tensor([1.0, math.nan, 3.0, math.inf]), torch.tensor([0.1, 0.1, 0.5, 0.9])


def test_what_is_not_finite_is_left_out_where_it_is_asked_for():
    means = DecileMeans(finite_only=True)
    means.add(VALUES, SIGMAS)
    assert means.metrics("x") == {"x": 2, "x_decile_1": 1, "x_decile_5": 3}


def test_elsewhere_it_is_seen():
    means = DecileMeans()
    means.add(VALUES, SIGMAS)
    metrics = means.metrics("x")
    assert math.isnan(metrics["x"])
    assert metrics["x_decile_9"] == math.inf


def test_means_weigh_every_sample_alike_over_ranks_and_calls():
    class TwoRanks:
        def reduce(self, table, reduce_op):
            assert reduce_op == "sum"
            return table * 2

    means = DecileMeans()
    assert means.metrics("x") == {}
    means.add(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
    means.add(torch.tensor([6.0]), torch.tensor([0.95]))
    means.gather(TwoRanks())
    assert means.table.sum(1).tolist() == [18, 6]
    assert means.metrics("x") == {"x": 3, "x_decile_0": 1, "x_decile_9": pytest.approx(4)}
