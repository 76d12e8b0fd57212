from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsa.attention.schedule import ConstantSparsity, resolve_topk


@pytest.mark.parametrize(
    ("sparsity", "num_tiles", "topk"),
    [
        (0.7, 10, 3),
        (0.875, 256, 32),
        (0.9, 1200, 120),
        (0.912, 364, 33),
        (0.9, 624, 63),
        ("0.9", 930, 93),
        (0, 17, 17),
        (0.0, 17, 17),
        (0.99, 5, 1),
        (0.5, 1, 1),
        (1e-9, 64, 64),
    ],
)
def test_known_values(sparsity, num_tiles, topk):
    assert resolve_topk(sparsity, num_tiles) == topk


@given(st.integers(0, 9999), st.integers(1, 5000))
def test_is_the_exact_ceiling(ten_thousandths, num_tiles):
    topk = resolve_topk(float(Decimal(ten_thousandths) / 10000), num_tiles)
    kept = Fraction(10000 - ten_thousandths, 10000) * num_tiles
    assert topk == max(1, -(-kept.numerator // kept.denominator))
    assert 1 <= topk <= num_tiles


def test_constant():
    assert ConstantSparsity(topk=32).topk(0, 364) == 32
    assert ConstantSparsity(topk=32).topk(10**6, 16) == 16
    assert [ConstantSparsity(sparsity=0.875).topk(step, 32) for step in (0, 7)] == [4, 4]
    assert ConstantSparsity(sparsity=0).topk(3, 9) == 9
    ConstantSparsity(topk=9).check(9)
    # dense attention: one tile
    ConstantSparsity(topk=9).check(1)
    ConstantSparsity(sparsity=0.5).check(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantSparsity(topk=8, sparsity=0.5), "got topk=8 and sparsity=0.5"),
        (lambda: ConstantSparsity(), "got topk=None and sparsity=None"),
        (lambda: ConstantSparsity(topk=0), "topk must be at least 1, got 0"),
        (lambda: ConstantSparsity(sparsity=1.0), r"sparsity must be in \[0, 1\), got 1.0"),
        (lambda: ConstantSparsity(sparsity=-0.1), "got -0.1"),
        (lambda: ConstantSparsity(sparsity=float("nan")), "got nan"),
        (lambda: resolve_topk("most", 4), "sparsity must be a number, got 'most'"),
        (lambda: resolve_topk(0.5, 0), "num_tiles must be at least 1, got 0"),
        (lambda: ConstantSparsity(topk=33).check(32), "topk=33 is above the number of tiles, 32"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
