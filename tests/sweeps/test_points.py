"""Which points a sweep has, and what is refused."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsa.config import Sweep
from vsa.sweeps.points import Point, at_learning_rates, at_seeds, learning_rates, variants_of
from vsa.training.sparsity_overrides import without_tiles_kept

STAGED = ("attention=staged", "attention.stages=l")


def names(points):
    return [point.name for point in points]


def test_variants_meet_every_combination_of_the_axes():
    sweep = Sweep(variants={"l": STAGED, "all": ()}, axes={"tile_thw": [[2, 2, 2], [4, 4, 4]]}, control=False)
    points = variants_of(sweep, {"optim.lr": ["1e-3", "0.1"]})
    assert len(points) == 2 * 2 * 2
    assert Point("l-tile_thw2x2x2-lr1e-3", (*STAGED, "tile_thw=[2,2,2]", "optim.lr=1e-3")) in points
    assert names(points)[-1] == "all-tile_thw4x4x4-lr0.1"


def test_every_point_has_the_dense_control_of_its_own_data_and_model():
    size = "data.toy.size=[8,64,64]"
    sweep = Sweep(
        variants={"l": STAGED, "short": (size, "sparsity.topk=4"), "full": ("attention=full",)},
        axes={"sparsity.sparsity": [0.5, 0.75]},
    )
    points = variants_of(sweep, {"model": ["small", "large"]})
    controls = {point.name: point.overrides for point in points if point.control and point.name.startswith("dense")}
    # "full" is dense itself: a point beside which no other control of the whole grid is wanted
    assert controls == {
        "dense-short-small": (size, "model=small", "attention=full"),
        "dense-short-large": (size, "model=large", "attention=full"),
    }
    full = [point.name for point in points if point.name.startswith("full")]
    assert [point.name for point in points if point.control and not point.name.startswith("dense")] == full
    without = variants_of(Sweep(variants={"l": STAGED}, control=False), {})
    assert [point.control for point in without] == [False]
    (_, control) = variants_of(Sweep(variants={"l": STAGED}), {})
    assert control == Point("dense", ("attention=full",), control=True)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (Sweep(), "the sweep has no point"),
        (Sweep(axes={"seed": []}), "the sweep has no point"),
        (Sweep(variants={"a/b": ()}), "the sweep's point=a/b is not a name"),
        (Sweep(variants={"dense": STAGED}), "two points of the sweep have the name dense"),
        (Sweep(axes={"a.x": [1], "b.x": [1, "1 "]}, control=False), "two points of the sweep have the name x1-x1"),
    ],
)
def test_what_is_no_sweep_is_refused(sweep, message):
    with pytest.raises(ValueError, match=message):
        variants_of(sweep, {})


@given(count=st.integers(1, 9), factor=st.floats(1.1, 10), centre=st.floats(1e-6, 1))
def test_learning_rates_lie_around_the_configured_one(count, factor, centre):
    rates = learning_rates(Sweep(lr=count, lr_factor=factor), centre)
    assert len(rates) == count
    assert math.prod(rates) ** (1 / count) == pytest.approx(centre, rel=1e-4)
    assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx([factor] * (count - 1), rel=1e-4)
    if count % 2:
        assert rates[count // 2] == pytest.approx(centre, rel=1e-5)


def test_points_are_named_after_what_differs():
    variant = Point("c_f", STAGED)
    assert at_seeds(variant, None, None) == [variant]
    assert at_seeds(variant, [3], 0.5) == [Point("c_f", (*STAGED, "optim.lr=0.5", "seed=3"))]
    assert names(at_seeds(variant, [0, 1], None)) == ["c_f-seed0", "c_f-seed1"]
    (low, high) = at_learning_rates(variant, [0.001, 0.002], 7)
    assert low == Point("c_f-lr0.001", (*STAGED, "seed=7", "optim.lr=0.001"))
    assert high.name == "c_f-lr0.002"


def of_selecting(own):
    """What stays of the overrides where these two select nothing."""
    return without_tiles_kept(own) if {"attention=neighborhood", "attention=full"} & set(own) else own


def test_attention_that_selects_no_tiles_leaves_out_how_many_are_kept():
    """An axis of sparsity is one point there, and its name says nothing of it."""
    sweep = Sweep(
        variants={"sparse": (), "windows": ("attention=neighborhood",), "few": ("attention=full", "sparsity.topk=2")},
        axes={"sparsity.sparsity": [0.5, 0.75]},
        control=False,
    )
    points = variants_of(
        sweep,
        {"model": ["small", "large"]},
        shared=("sparsity=linear",),
        used=of_selecting,
    )
    assert {point.name: point.overrides for point in points} == {
        **{
            f"sparse-sparsity{share}-{size}": ("sparsity=linear", f"sparsity.sparsity={share}", f"model={size}")
            for share in (0.5, 0.75)
            for size in ("small", "large")
        },
        **{f"windows-{size}": ("attention=neighborhood", f"model={size}") for size in ("small", "large")},
        **{f"few-{size}": ("attention=full", f"model={size}") for size in ("small", "large")},
    }
    alone = Sweep(axes={"sparsity.sparsity": [0.5, 0.75]})
    with pytest.raises(ValueError, match=r"point sparsity0.5 says how many tiles are kept, but its attention has no"):
        variants_of(alone, {}, used=without_tiles_kept)


def test_a_prediction_is_kept_over_steps_where_there_is_no_topk():
    axes = {"sparsity.denoising.refresh": [2, 4]}
    sweep = Sweep(variants={"sparge": ("attention=sparge",)}, axes=axes, control=False)
    points = variants_of(sweep, {}, shared=("sparsity.topk=2",), used=partial(without_tiles_kept, predicts=True))
    assert {point.name: point.overrides for point in points} == {
        f"sparge-refresh{n}": ("attention=sparge", f"sparsity.denoising.refresh={n}") for n in (2, 4)
    }
    # the control: attention that predicts nothing
    assert names(variants_of(sweep, {}, used=without_tiles_kept)) == ["sparge"]
