"""The tuner against a search written out: every setting of every head as a layer of its own."""

from __future__ import annotations

import math

import pytest
import torch

from tests.attention.sparge.test_method import SIZES, fields
from vsa.attention.context import AttnContext
from vsa.attention.full import dense_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.sparge.tune import Input, Search, tune_layer

BLOCKS = {"q_tokens": 8, "kv_tokens": 4}
GRIDS = [(2, 6, 5), (3, 5, 4)]
SEARCH = Search(l1=0.45, l2=0.5, taus=(0.5, 0.8), thetas=(-1.0, 0.3), thresholds=(-0.5, -1.5))


def inputs():
    # the last head attends to everything alike, so that it is hard to make sparse
    scale = torch.tensor([3.0, 2.0, 1.5, 0.1]).double().view(1, 1, 4, 1)
    for seed, grid in enumerate(GRIDS):
        q, k, v = fields(grid, seed=seed)
        yield Input(q * scale, k, v, grid)


def measured(head, **setting):
    """Sparsity and error of one head over the inputs, from what the layer records."""
    error = size = skips = products = 0.0
    for q, k, v, grid in inputs():
        method, records = SpargeAttention(**SIZES, **BLOCKS, **setting), {}
        layout = method.layout([Segment(grid)])
        ctx = AttnContext(
            layout=layout, topk=KeptTiles.of(1), recorder=lambda _, tensors, into=records: into.update(tensors)
        )
        out = layout.unpermute(method(*(layout.permute(x) for x in (q, k, v)), {}, ctx))[:, :, head]
        dense = dense_attn(q, k, v)[:, :, head]
        error, size = error + (out - dense).abs().sum(), size + dense.abs().sum()
        rows, columns = layout.num_blocks, layout.kv_blocks.num
        products += 2 * 2 * rows * columns
        skips += 2 * (2 * rows * columns - int(records["kv_num_blocks"][:, head].sum()))
        if "skipped" in records:
            # slices of two rows
            for i, tokens in enumerate(layout.blocks.sizes.tolist()):
                skips += int(records["skipped"][:, head, i].sum()) / math.ceil(tokens / 2)
    return float(skips / products), float(error / size)


def test_the_sparsest_setting_below_the_bounds_is_chosen():
    choices, trials = tune_layer(SpargeAttention(**SIZES, **BLOCKS), inputs, SEARCH)
    assert len(trials) == 4 * (4 + 2)
    table = {(p.head, p.tau, p.theta, p.threshold): (p.sparsity, p.error) for p in trials}
    for head in range(4):
        first = {(1.0, -1.0): (0.0, 0.0)}
        for tau in SEARCH.taus:
            for theta in SEARCH.thetas:
                measurement = measured(head, tau=tau, theta=theta)
                assert measurement == pytest.approx(table[head, tau, theta, None], abs=1e-12)
                if measurement[1] < SEARCH.l1:
                    first[tau, theta] = measurement
        tau, theta = max(first, key=lambda key: first[key][0])
        best, sparsity = (tau, theta, None), first[tau, theta][0]
        for threshold in SEARCH.thresholds:
            measurement = measured(head, tau=tau, theta=theta, threshold=threshold)
            assert measurement == pytest.approx(table[head, tau, theta, threshold], abs=1e-12)
            if measurement[1] < SEARCH.l2 and measurement[0] > sparsity:
                best, sparsity = (tau, theta, threshold), measurement[0]
        assert (choices[head].tau, choices[head].theta, choices[head].threshold) == best
        assert choices[head].sparsity == pytest.approx(sparsity)
    # heads differ, and both stages do something
    assert len({(h.tau, h.theta, h.threshold) for h in choices}) > 1
    assert any(h.threshold is not None for h in choices)
    assert max(h.sparsity for h in choices) > 0.2


def test_a_bound_that_nothing_meets_leaves_dense_attention():
    search = Search(l1=1e-9, l2=1e-9, taus=(0.5, 0.8), thetas=(-1.0,), thresholds=(-0.5,))
    choices, _ = tune_layer(SpargeAttention(**SIZES, **BLOCKS), inputs, search)
    assert {(h.tau, h.threshold, h.sparsity, h.error) for h in choices} == {(1.0, None, 0.0, 0.0)}
    loose = Search(l1=0.8, l2=0.9, taus=(0.5, 0.8), thetas=(-1.0,), thresholds=())
    choices, trials = tune_layer(SpargeAttention(**SIZES, **BLOCKS), inputs, loose)
    assert all(h.tau < 1 and h.threshold is None for h in choices)
    assert len(trials) == 4 * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"l1": 0.1, "l2": 0.05}, "0 < l1 <= l2, got l1=0.1 and l2=0.05"),
        ({"l1": 0.0}, "0 < l1 <= l2, got l1=0"),
        ({"taus": (0.5, 1.5)}, "taus must be numbers above 0 and below 1, got 1.5"),
        ({"taus": ()}, "taus must hold at least one number"),
        ({"thetas": (math.nan,)}, "thetas must be numbers finite, got nan"),
        ({"thresholds": (-1.0, 2.0)}, "thresholds must be numbers of at most 0, got 2"),
    ],
)
def test_bad_searches_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Search(**settings)
