"""Types of settings: what fits an annotation, how it is said, and what a constructor call refuses."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vsa.settings import AtLeastOne, Bound, Positive, PositiveShare, Share, describe, fits, plain, refusal, validated

Names = Literal["a", "b"]


@pytest.mark.parametrize(
    ("hint", "good", "bad", "words"),
    [
        (int, [0, -3], [2.0, "2", True, None, math.nan], "an integer"),
        (float, [1, 0.5], ["1", True, math.nan, math.inf, None], "a number"),
        (bool, [True, False], [0, 1, "no", None], "true or false"),
        (str, ["", "a"], [1, None, ["a"]], "text"),
        (AtLeastOne, [1], [0, 1.0], "an integer of at least 1"),
        (Positive | None, [0.1, 7, None], [0, "x"], "a number above 0, or null"),
        (Share, [0, 1, 0.5], [-0.1, 1.1, math.nan], "a number from 0 to 1"),
        (PositiveShare, [1, 1e-9], [0, 1e30, math.inf], "a number above 0 and of at most 1"),
        (Names, ["a"], ["c", None, ["a"]], "one of a, b"),
        (Literal[1, "x"], [1, "x"], ["1", 1.5], "one of 1, x"),
        (Sequence[str], [["a"], (), ("a", "b")], ["ab", [1], {"a": 1}], "a list of values, each text"),
        (tuple[Share, Share], [[0, 1]], [[0.5], [0, 2], 0.5], "a list of 2 values, each a number from 0 to 1"),
        (tuple[int, ...], [[1], []], ["12", [1.0]], "a list of values, each an integer"),
        (
            Annotated[Sequence[Share], Bound(">=", 1)],
            [[0.5], (0, 1)],
            [[], [2], 0.5, "a"],
            "a list of at least 1 values, each a number from 0 to 1",
        ),
        (Mapping[str, int], [{"a": 1}, {}], [{1: 1}, {"a": 1.5}, [1]], "a mapping from text to an integer"),
        (Any, [1, "a", None, {}], [], "any value"),
    ],
    ids=str,
)
def test_what_fits_and_how_it_is_said(hint, good, bad, words):
    assert describe(hint) == words
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


SCALARS = st.sampled_from([bool, int, float, str, type(None), Any, Names, Literal[1, "x"], AtLeastOne, Share, Positive])
HINTS = st.recursive(
    SCALARS,
    lambda hints: st.one_of(
        st.builds(lambda a: Sequence[a], hints),
        st.builds(lambda a: list[a], hints),
        st.builds(lambda a: tuple[a, ...], hints),
        st.builds(lambda a, b: tuple[a, b], hints, hints),
        st.builds(lambda a: Mapping[str, a], hints),
        st.builds(lambda a, b: Union[a, b], hints, hints),  # noqa: UP007
        st.builds(lambda a: Annotated[Sequence[a], Bound(">=", 1)], hints),
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -1, 2.0, 0.5, math.nan, math.inf, "", "a", "x", "1", 10**400]),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(st.sampled_from(["k", "m"]), values)),
    max_leaves=5,
)


@settings(deadline=None)  # pydantic is imported on the way
@given(HINTS, VALUES)
@example(Sequence[Sequence[Any]], [""])
@example(Literal[1, "x"], True)
def test_what_fits_is_what_pydantic_takes_without_converting(hint, value):
    pydantic = pytest.importorskip("pydantic")
    assert fits(value, hint) == _accepted(pydantic, value, hint)


def _accepted(pydantic, value, hint):
    """Whether pydantic validates a value; sequences of other kinds, which it converts, never come up here."""
    try:
        pydantic.TypeAdapter(_strict(pydantic, hint)).validate_python(value)
    except pydantic.ValidationError:
        return False
    return True


def _strict(pydantic, hint):
    """A hint of ours in pydantic's words."""
    origin, args = get_origin(hint), get_args(hint)
    names = {">": "gt", ">=": "ge", "<": "lt", "<=": "le"}
    if hint is float:
        return Annotated[float, pydantic.Strict(), pydantic.AllowInfNan(False)]
    if hint in (bool, int, str):
        return Annotated[hint, pydantic.Strict()]
    if hint is Any:
        # pydantic takes a string for Sequence[Any] alone, without looking at its items
        return Annotated[Any, pydantic.AfterValidator(lambda value: value)]
    if origin is Annotated:
        inner = _strict(pydantic, args[0])
        if get_origin(args[0]):
            return Annotated[inner, pydantic.Field(min_length=args[1].limit)]
        return Annotated[inner, pydantic.Field(**{names[bound.sign]: bound.limit for bound in args[1:]})]
    if origin is Union:
        return functools.reduce(operator.or_, (_strict(pydantic, part) for part in args))
    if origin is Literal:
        # pydantic takes True for 1 where the choices have several types
        return Annotated[hint, pydantic.WrapValidator(_without_converting)]
    if not args:
        return hint
    return origin[tuple(part if part is ... else _strict(pydantic, part) for part in args)]


def _without_converting(value, validate):
    choice = validate(value)
    if type(choice) is not type(value):
        raise ValueError(f"{value!r} became {choice!r}")
    return choice


class Other:
    pass


def test_the_part_of_an_annotation_that_yaml_can_say():
    assert plain(Other) is None
    assert plain(str | Other) is str
    assert plain(int | Other | None) == int | None
    assert plain(Sequence[Other]) is None
    for whole in (Positive | None, Sequence[Names], Mapping[str, Mapping[str, Any]], Literal["a"] | Share):
        assert plain(whole) == whole


def test_a_refusal_is_one_line_with_key_value_and_what_is_expected():
    assert refusal("optim.lr", "abc", PositiveShare) == (
        "optim.lr=abc: expected a number above 0 and of at most 1, got 'abc'"
    )
    assert refusal("x", [None, True], Positive) == "x=[null,true]: expected a number above 0, got [None, True]"
    assert refusal("output_dir", None, str) == "output_dir=null: expected text, got null"


@validated
@dataclass(frozen=True, kw_only=True)
class Recipe:
    steps: AtLeastOne
    name: Names = "a"
    other: Other | int | None = None


def test_a_constructor_call_with_impossible_values_names_all_of_them():
    assert Recipe(steps=2, name="b") == Recipe(steps=2, name="b")
    # an annotation with a class of ours is left to the constructor
    assert Recipe(steps=1, other="anything").other == "anything"
    with pytest.raises(ValueError, match=r"^steps=0: expected an integer of at least 1, got 0; name=c: expected one"):
        Recipe(steps=0, name="c")
    with pytest.raises(TypeError, match="steps"):
        Recipe(name="a")


def test_a_subclass_checks_its_own_arguments():
    class Longer(Recipe):
        pass

    with pytest.raises(ValueError, match="steps=0"):
        Longer(steps=0)
