"""What the rows of the kernels call equal: the plain formula against numbers worked out by hand, and wrong results."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from vsa_kernels import block_sparse_attn
from vsa_kernels.testing import define, make_case, run

from scripts.soak.gpu_kernels import long_views
from scripts.soak.kernels import BACKENDS, LAYOUTS, difference, problem, with_lists


def test_the_plain_formula_on_numbers_worked_out_by_hand():
    # weights 1/4 and 3/4 of values 4 and 8; the second query sees the second key, the third none
    q = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64).view(1, 3, 1, 1)
    k, v = (torch.tensor(x, dtype=torch.float64).view(1, 2, 1, 1) for x in ([0.0, math.log(3)], [4.0, 8.0]))
    case = make_case([1, 1, 1], [1, 1], head_dim=1, dtype=torch.float64)
    lists = torch.tensor([[True, True], [False, True], [False, False]])[None, None]
    results = define(with_lists(replace(case, q=q, k=k, v=v, scale=1.0), lists))
    torch.testing.assert_close(results["out"].flatten(), torch.tensor([7.0, 8.0, 0.0], dtype=torch.float64))
    expected = torch.tensor([math.log(4), 5 * math.log(3), -math.inf], dtype=torch.float64)
    torch.testing.assert_close(results["lse"].flatten(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_wrong_results_are_noticed(dtype, backend):
    p = problem(7, dtype, empty=False)
    right = run(p, backend)
    assert difference(p, right) is None
    # one block of one row is forgotten
    listed = p.index.to_dense(p.kv_blocks.num)
    listed[0, 0, 0, listed[0, 0, 0].nonzero()[0]] = False
    assert difference(p, run(with_lists(p, listed), backend)) is not None
    for name in right:
        assert name in (difference(p, {**right, name: right[name] * 1.2}) or "")
    nan = right["dk"].clone()
    nan[0, 0, 0, 0] = torch.nan
    assert difference(p, {**right, "dk": nan}) is not None


def test_every_layout_holds_the_same_values_elsewhere():
    x = torch.randn(2, 6, 3, 8)
    for name, laid in LAYOUTS.items():
        y = laid(x[:1] if name == "strides past 2**31" else x)
        assert torch.equal(y, x[: len(y)]), name
        assert not y.is_contiguous() or name == "strides past 2**31"
    assert LAYOUTS["strides past 2**31"](x[:1]).stride(0) > 2**31


def test_the_row_of_long_strides_on_a_few_tokens(monkeypatch):
    # the row itself takes 4.3 GB
    few = {"tokens": 201, "heads": 2, "head_dim": 16, "seed": 0, "device": torch.device("cpu"), "dtype": torch.float32}
    assert long_views(**few, backend="gather") is None

    def no_scale(q, k, v, index, **how):
        return block_sparse_attn(q, k, v, index, **how, scale=1.0)

    def no_strides(q, k, v, index, **how):
        # addresses a view as if it were contiguous
        return block_sparse_attn(q, torch.as_strided(k, k.shape, k.contiguous().stride()), v, index, **how)

    for wrong, message in ((no_scale, "from fp64"), (no_strides, "differ from those of contiguous")):
        monkeypatch.setattr("scripts.soak.gpu_kernels.block_sparse_attn", wrong)
        assert message in (long_views(**few, backend="gather") or "")
