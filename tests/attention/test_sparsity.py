from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from vsa.attention.kept_tiles import Budget, KeptTiles
from vsa.attention.sparsity import (
    ConstantSparsity,
    SparsitySchedule,
    TokenBudgetSparsity,
    check_points,
)
from vsa.attention.sparsity_schedules import CosineSparsity, LinearSparsity, MissedMassSparsity, StaircaseSparsity
from vsa.settings import arguments_of

CONFIGS = Path(__file__).parents[2] / "configs"


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
    assert Budget(sparsity=sparsity).tiles(num_tiles) == topk


@given(st.integers(0, 9999), st.integers(1, 5000))
def test_is_the_exact_ceiling(ten_thousandths, num_tiles):
    topk = Budget(sparsity=float(Decimal(ten_thousandths) / 10000)).tiles(num_tiles)
    count = Fraction(10000 - ten_thousandths, 10000) * num_tiles
    assert topk == max(1, -(-count.numerator // count.denominator))
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
        (lambda: ConstantSparsity(topk=0), "topk=0: expected an integer of at least 1, or null, got 0"),
        (
            lambda: ConstantSparsity(sparsity=1.0),
            "sparsity=1.0: expected a number of at least 0 and below 1",
        ),
        (lambda: ConstantSparsity(sparsity=-0.1), "got -0.1"),
        (lambda: ConstantSparsity(sparsity=float("nan")), "got nan"),
        (lambda: Budget(sparsity="most").tiles(4), "sparsity must be a number, got 'most'"),
        (lambda: Budget(sparsity=0.5).tiles(0), "num_tiles must be at least 1, got 0"),
        (lambda: ConstantSparsity(topk=33).check(32), "topk=33 is above the number of tiles, 32"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# schedules on their way down


TARGETS = st.one_of(
    st.integers(1, 400).map(lambda k: {"topk": k}),
    st.integers(0, 999).map(lambda s: {"sparsity": float(Decimal(s) / 1000)}),
)
DENSE = st.integers(0, 60)


def exact_target(target: dict, num_tiles: int) -> int:
    if "topk" in target:
        return min(target["topk"], num_tiles)
    count = (1 - Fraction(str(target["sparsity"]))) * num_tiles
    return max(1, -(-count.numerator // count.denominator))


def assert_goes_down(schedule: SparsitySchedule, target: dict, num_tiles: int, dense_steps: int) -> None:
    """Dense first, never up, exactly the target from `final_step` on and not one step before."""
    end, last = exact_target(target, num_tiles), schedule.final_step(num_tiles)
    assert last is not None
    steps = sorted({*range(min(last, 40)), *range(0, last, max(1, last // 30)), last - 1, last, last + 999})
    topks = [schedule.topk(step, num_tiles) for step in steps if step >= 0]
    assert all(1 <= end <= k <= num_tiles for k in topks)
    assert topks == sorted(topks, reverse=True)
    if dense_steps:
        assert schedule.topk(dense_steps - 1, num_tiles) == num_tiles
    assert schedule.topk(last, num_tiles) == schedule.topk(10**9, num_tiles) == schedule.target_topk(num_tiles) == end
    if last:
        assert schedule.topk(last - 1, num_tiles) > end


@settings(max_examples=1000, deadline=None)
@given(TARGETS, st.integers(1, 1200), DENSE, st.integers(1, 60), st.integers(1, 50))
def test_staircase_by_tiles_ends_at_the_target(target, num_tiles, dense, interval, tiles):
    schedule = StaircaseSparsity(dense_steps=dense, interval=interval, tiles=tiles, **target)
    assert_goes_down(schedule, target, num_tiles, dense)
    # one step down at a time
    for drop in range(3):
        expected = max(exact_target(target, num_tiles), num_tiles - tiles * (drop + 1))
        assert schedule.topk(dense + drop * interval, num_tiles) == expected


@settings(max_examples=1000, deadline=None)
@given(TARGETS, st.integers(1, 1200), DENSE, st.integers(1, 60), st.integers(1, 1000))
def test_staircase_by_fraction_ends_at_the_target(target, num_tiles, dense, interval, thousandths):
    fraction = float(Decimal(thousandths) / 1000)
    schedule = StaircaseSparsity(dense_steps=dense, interval=interval, fraction=fraction, **target)
    assert_goes_down(schedule, target, num_tiles, dense)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([LinearSparsity, CosineSparsity]), TARGETS, st.integers(1, 1200), DENSE, st.integers(1, 5000))
def test_linear_and_cosine_end_at_the_target(kind, target, num_tiles, dense, total):
    schedule = kind(dense_steps=dense, total_steps=total, **target)
    assert_goes_down(schedule, target, num_tiles, dense)
    assert schedule.final_step(num_tiles) in (0, dense + total)


@pytest.mark.parametrize(
    ("rate", "target", "short"), [(0.03, 0.9, False), (0.025, 0.875, True), (0.05, 0.9, True), (0.1, 0.7, True)]
)
def test_rates_that_a_float_floor_misses(rate, target, short):
    schedule = StaircaseSparsity(dense_steps=50, interval=50, fraction=rate, sparsity=target)
    assert schedule.topk(10**6, 364) == Budget(sparsity=target).tiles(364)
    # control: whole steps of the rate by a float floor stop short
    whole_steps = target // rate * rate
    assert (Budget(sparsity=whole_steps).tiles(364) != Budget(sparsity=target).tiles(364)) == short


def test_the_papers_annealing():
    schedule = instantiate(OmegaConf.load(CONFIGS / "sparsity" / "staircase.yaml"), _convert_="all")
    assert [schedule.topk(s, 364) for s in (0, 49, 50, 99, 100, 1649, 1650, 1699, 1700, 4000)] == [
        *(364, 364, 354, 354, 344, 44, 34, 34, 32, 32)
    ]
    assert schedule.final_step(364) == 1700
    schedule.check(364, 30)
    with pytest.raises(ValueError, match=r"topk=32 is above the number of tiles, 31"):
        schedule.check(31)


def test_shapes_of_the_curves():
    linear = LinearSparsity(dense_steps=10, total_steps=100, topk=4)
    assert [linear.topk(s, 24) for s in (0, 10, 11, 15, 60, 109, 110)] == [24, 24, 24, 23, 14, 5, 4]
    cosine = CosineSparsity(dense_steps=10, total_steps=90, topk=4)
    # a third of the way: cos 60 degrees, a quarter done, without a rounding tile
    assert [cosine.topk(s, 24) for s in (10, 40, 55, 70, 99, 100)] == [24, 19, 14, 9, 5, 4]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"topk": 32}, [32, 32, 16]),
        ({"topk": 32, "budget": "count", "reference_tiles": 256}, [32, 32, 16]),
        ({"topk": 32, "budget": "fraction", "reference_tiles": 256}, [128, 32, 2]),
        ({"topk": 32, "budget": 1, "reference_tiles": 256}, [128, 32, 2]),
        ({"topk": 32, "budget": 0.5, "reference_tiles": 256}, [64, 32, 8]),
        ({"sparsity": 0.875, "budget": "count", "reference_tiles": 256}, [32, 32, 16]),
        ({"sparsity": 0.875}, [128, 32, 2]),
    ],
)
def test_budgets_follow_the_grid(options, wanted):
    schedule = ConstantSparsity(**options)
    assert [schedule.topk(0, n) for n in (1024, 256, 16)] == wanted


@given(st.integers(1, 500), st.integers(0, 500), st.integers(1, 2000), st.integers(0, 100))
def test_a_budget_is_the_ceiling_of_its_power(topk, more, num_tiles, hundredths):
    reference, power = topk + more, hundredths / 100
    schedule = ConstantSparsity(topk=topk, budget=power, reference_tiles=reference)
    exact = topk * (num_tiles / reference) ** power
    assert schedule.topk(0, reference) == topk
    assert exact - 1e-6 <= schedule.topk(0, num_tiles) < exact + 1 + 1e-6 or schedule.topk(0, num_tiles) == num_tiles


def test_a_token_budget_is_in_whole_tiles():
    assert TokenBudgetSparsity(tokens=2048, tokens_per_tile=64).topk(0, 364) == 32
    assert TokenBudgetSparsity(tokens=2049, tokens_per_tile=64).topk(7, 364) == 33
    assert TokenBudgetSparsity(tokens=2048, tokens_per_tile=64).topk(0, 20) == 20
    root = TokenBudgetSparsity(tokens=2048, tokens_per_tile=64, budget=0.5, reference_tiles=100)
    assert root.topk(0, 400) == 64


def test_layers_with_a_topk_of_their_own():
    schedule = StaircaseSparsity(
        dense_steps=2, interval=1, tiles=8, topk=4, dense_layers=[0, 3], layer_topk={"2": 6, 1: 99}
    )
    assert schedule.topk_per_layer(0, 16, 5).layers == (16, 16, 6, 16, 16)
    assert schedule.topk_per_layer(2, 16, 5).layers == (16, 16, 6, 16, 8)
    assert schedule.topk_per_layer(0, 16, 5, "target").layers == (16, 16, 6, 16, 4)
    assert schedule.topk_per_layer(9, 16, 5, "dense") == KeptTiles((16,))
    plain = ConstantSparsity(topk=4)
    assert plain.topk_per_layer(0, 16, 5) == plain.topk_per_layer(0, 16, 5, "target") == KeptTiles((4,))
    assert KeptTiles((16, 99, 6, 16, 8)).mean(16) == 12.4
    with pytest.raises(ValueError, match="dense_layers has layer 3, but the model's layers are 0 to 2"):
        schedule.topk_per_layer(0, 16, 3)
    with pytest.raises(ValueError, match="layer_topk of layer 1=99 is above the number of tiles, 16"):
        schedule.check(16, 5)


def test_weights_are_looked_at_with_the_topk_of_their_last_step():
    schedule = StaircaseSparsity(dense_steps=2, interval=1, tiles=8, topk=4, dense_layers=[1])
    in_step = [schedule.topk_per_layer(step, 16, 2) for step in range(4)]
    assert [topk.layers for topk in in_step] == [(16, 16), (16, 16), (8, 16), (4, 16)]
    # after no step the weights are those that the first one starts with
    assert [schedule.topk_after(steps, 16, 2) for steps in range(5)] == [in_step[0], *in_step]
    assert schedule.topk_after(3, 16, 2, "target").layers == (4, 16)
    assert schedule.topk_after(3, 16, 2, "dense") == KeptTiles((16,))


def test_half_and_double_are_of_the_step_and_stay_between_one_and_all_tiles():
    schedule = StaircaseSparsity(dense_steps=1, interval=1, tiles=11, topk=1, dense_layers=[1], layer_topk={2: 3})
    at = lambda point: [schedule.topk_per_layer(step, 16, 4, point).layers for step in range(3)]  # noqa: E731
    assert at("current") == [(16, 16, 3, 16), (5, 16, 3, 5), (1, 16, 3, 1)]
    assert at("half") == [(8, 16, 2, 8), (3, 16, 2, 3), (1, 16, 2, 1)]
    assert at("double") == [(16, 16, 6, 16), (10, 16, 6, 10), (2, 16, 6, 2)]
    assert ConstantSparsity(topk=4).topk_per_layer(0, 16, 2, "half") == KeptTiles((2,))


def test_missed_mass_goes_down_only_while_little_is_missed():
    schedule = MissedMassSparsity(max_missed=0.2, dense_steps=10, interval=5, tiles=4, topk=3)
    assert schedule.measured
    assert schedule.final_step(16) is None
    topks = {}
    for step, mass in ((5, 0.0), (10, 0.0), (12, 0.0), (15, 0.2), (20, 0.3), (25, 0.21), (30, 0.1), (40, 0.0)):
        schedule.observe(step, mass)
        topks[step] = schedule.topk(step, 16)
    # too early, down, too soon, down, too much missed twice, down, down to the target
    assert topks == {5: 16, 10: 12, 12: 12, 15: 8, 20: 8, 25: 8, 30: 4, 40: 3}
    # the past stays what it was
    assert [schedule.topk(step, 16) for step in (0, 9, 10, 14, 15, 29, 30, 39)] == [16, 16, 12, 12, 8, 8, 4, 4]
    with pytest.raises(ValueError, match="got 40 after 40"):
        schedule.observe(40, 0.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 29))
def test_missed_mass_resumes_from_json(measured, cut):
    def fresh() -> MissedMassSparsity:
        return MissedMassSparsity(max_missed=0.4, dense_steps=3, interval=2, tiles=3, sparsity=0.9)

    whole, first = fresh(), fresh()
    for step, mass in enumerate(measured):
        whole.observe(step, mass)
        if step < cut:
            first.observe(step, mass)
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, mass in list(enumerate(measured))[cut:]:
        second.observe(step, mass)
    assert second.state_dict() == whole.state_dict()
    assert [second.topk(s, 40) for s in range(40)] == [whole.topk(s, 40) for s in range(40)]
    topks = [whole.topk(s, 40) for s in range(40)]
    assert topks == sorted(topks, reverse=True)
    assert min(topks) >= whole.target_topk(40) == 4


def test_schedules_without_a_state_refuse_one():
    constant, staircase = (
        ConstantSparsity(topk=2),
        MissedMassSparsity(max_missed=0.1, dense_steps=0, interval=1, tiles=1, topk=1),
    )
    assert constant.state_dict() == {}
    constant.observe(3, 0.5)
    constant.load_state_dict({})
    with pytest.raises(ValueError, match="ConstantSparsity has no state"):
        constant.load_state_dict(staircase.state_dict())
    with pytest.raises(ValueError, match="MissedMassSparsity needs its measurements"):
        staircase.load_state_dict({})


# those that build on another are composed in tests/training/test_configs.py
WHOLE = [path for path in sorted((CONFIGS / "sparsity").glob("*.yaml")) if "defaults:" not in path.read_text()]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_sparsity_configs_hold_options_of_their_schedule(path):
    config = OmegaConf.load(path)
    schedule = instantiate(config, _convert_="all")
    assert isinstance(schedule, SparsitySchedule)
    assert schedule.target_topk(256) == 32
    assert set(config) - {"_target_"} <= set(arguments_of(type(schedule)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StaircaseSparsity(dense_steps=1, interval=1, topk=1), "tiles=None and fraction=None"),
        (
            lambda: StaircaseSparsity(dense_steps=1, interval=1, topk=1, tiles=1, fraction=0.1),
            "tiles=1 and fraction=0.1",
        ),
        (
            lambda: StaircaseSparsity(dense_steps=1, interval=0, topk=1, tiles=1),
            "interval=0: expected an integer",
        ),
        (
            lambda: StaircaseSparsity(dense_steps=-1, interval=1, topk=1, tiles=1),
            "dense_steps=-1: expected an integer of at least 0, got -1",
        ),
        (
            lambda: StaircaseSparsity(dense_steps=1, interval=1, topk=1, fraction=1.5),
            "fraction=1.5: expected a number above 0 and of at most 1, or null, got 1.5",
        ),
        (
            lambda: LinearSparsity(dense_steps=1, total_steps=0, topk=1),
            "total_steps=0: expected an integer of at least 1",
        ),
        (lambda: LinearSparsity(dense_steps=1, total_steps=1), "got topk=None and sparsity=None"),
        (
            lambda: MissedMassSparsity(max_missed=2, dense_steps=0, interval=1, tiles=1, topk=1),
            "max_missed=2: expected a number from 0 to 1, got 2",
        ),
        (lambda: ConstantSparsity(topk=1, budget="count"), "budget=count and reference_tiles=None"),
        (
            lambda: ConstantSparsity(topk=1, budget="square", reference_tiles=4),
            "budget=square: expected",
        ),
        (
            lambda: ConstantSparsity(topk=1, budget=2, reference_tiles=4),
            "budget=2: expected one of count, fr",
        ),
        (lambda: ConstantSparsity(topk=5, budget=1, reference_tiles=4), "topk=5 is above reference_tiles=4"),
        (
            lambda: ConstantSparsity(topk=1, dense_layers=[1], layer_topk={"1": 2}),
            "are both in dense_layers",
        ),
        (
            lambda: ConstantSparsity(topk=1, dense_layers=[-1]),
            r"dense_layers=\[-1\]: expected a list of",
        ),
        (lambda: ConstantSparsity(topk=1, layer_topk={"first": 2}), "by number, got 'first'"),
        (
            lambda: ConstantSparsity(topk=1, layer_topk={0: 0}),
            "expected a mapping .* of at least 1",
        ),
        (
            lambda: TokenBudgetSparsity(tokens=0, tokens_per_tile=64),
            "tokens=0: expected an integer of at least 1",
        ),
        (lambda: check_points("validate_at", ["sparse"]), r"validate_at must hold some of .* got \['sparse'\]"),
        (lambda: check_points("validate_at", []), "got"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
