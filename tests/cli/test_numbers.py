"""Numbers on a command line: every option has a range, and what lies outside is refused as it was typed."""

from __future__ import annotations

from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from vsa.cli import COMMANDS
from vsa.cli.values import numbers, plan_options


def _numeric(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType, tuple, list):
        return any(map(_numeric, get_args(hint)))
    return hint in (int, float)


def test_every_number_of_every_command_has_a_range():
    unbounded, bounded = [], 0
    # the functions of these two check what they get, and name it
    for place in {*COMMANDS.values()} - {COMMANDS["tiles"], COMMANDS["simulate"]}:
        module, _, name = place.partition(":")
        for option, hint in get_type_hints(getattr(import_module(module), name), include_extras=True).items():
            if get_origin(hint) is Annotated and _numeric(get_args(hint)[0]):
                bounded += 1
                unbounded += [f"{name} {option}"] if get_args(hint)[1].parser is None else []
    assert unbounded == []
    assert bounded > 80


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("convert", "a", "b", "--max-shard-gb", "0"), "--max-shard-gb"),
        (("latents", "a", "b", "c", "--guidance", "nan"), "--guidance"),
        (("plan", "--memory", "0"), "--memory"),
        (("merge", "a", "b", "--sparse", "c", "--few-step", "d", "--sparse-weight", "inf"), "--sparse-weight"),
        (("inspect", "a", "b", "--seed", "-1"), "--seed"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_number_outside_is_refused_by_its_option(command_line, words, named):
    status, _, err = command_line(*words)
    assert status == 2
    assert f"Invalid value for '{named}': expected a" in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("topk_ranges", "0:2:3"),
        ("sparsity_ranges", "0:0.5:nan"),
        ("step_topk", "-1:3"),
        ("refresh", "0"),
        ("refresh", "2:0"),
        ("refresh", "1,2"),
        ("dense_layers", "-1"),
    ],
)
def test_a_plan_is_refused_as_it_was_typed(option, text):
    with pytest.raises(ValueError) as error:
        plan_options({option: text})
    assert str(error.value).startswith(f"--{option.replace('_', '-')} {text}: expected ")


def test_a_list_of_numbers_is_finite():
    assert numbers("--timesteps", "900,500", float) == [900.0, 500.0]
    for text in ("nan", "1,inf", "", "1,,2"):
        with pytest.raises(ValueError, match=r"--timesteps: expected float values"):
            numbers("--timesteps", text, float)
