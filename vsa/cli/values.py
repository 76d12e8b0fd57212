"""Conversion of option values to arguments of the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_type_hints

Number = TypeVar("Number", int, float)
Made = TypeVar("Made")


def numbers(option: str, text: str | None, kind: type[Number]) -> list[Number] | None:
    """The numbers of a list written as one value, `1000,757,522`; None without the option."""
    try:
        values = None if text is None else [kind(part) for part in text.split(",")]
        if values is not None and not all(map(math.isfinite, values)):
            raise ValueError
        return values
    except ValueError:
        raise ValueError(f"{option}: expected {kind.__name__} values with commas between them, got {text}") from None


def rows(option: str, text: str, *kinds: type[int] | type[float]) -> list[tuple[float, ...]]:
    """Rows of numbers written as one value, `0:0.5:8,0.5:1:4`, with one number of each kind per row."""
    try:
        parts = [row.split(":") for row in text.split(",")]
        return [tuple(kind(part) for kind, part in zip(kinds, row, strict=True)) for row in parts]
    except ValueError:
        shape = ":".join({int: "int", float: "float"}[kind] for kind in kinds)
        raise ValueError(f"{option}: expected {shape} values with commas between them, got {text}") from None


def made_of(kind: Callable[..., Made], options: Mapping[str, Any]) -> Made:
    """A dataclass, and those in its fields, built from the options of the same names; others keep their defaults."""
    from vsa.settings import hints_of

    nested = {name: hint for name, hint in hints_of(kind).items() if isinstance(hint, type) and is_dataclass(hint)}
    values = {name: options.get(name) for name in hints_of(kind)}
    values |= {name: made_of(hint, options) for name, hint in nested.items() if name not in options}
    return kind(**{name: value for name, value in values.items() if value is not None})


def refuse_options(command: Callable[..., None], options: Mapping[str, Any], panel: str, owner: str) -> None:
    """Raise ValueError for an option of one panel of the help, which only `owner` supports."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        option_info: Any = getattr(hint, "__metadata__", (None,))[0]
        if options.get(name) is not None and option_info.rich_help_panel == panel:
            raise ValueError(f"--{name.replace('_', '-')} applies to {owner} only")


_ROWS: Mapping[str, tuple[type[int] | type[float], ...]] = {
    "topk_ranges": (float, float, int),
    "sparsity_ranges": (float, float, float),
    "step_topk": (int, int),
    "step_sparsity": (int, float),
}
PLAN = ("dense_layers", "dense_steps", *_ROWS, "refresh", "shared_cache")
"""Options of a `DenoisingPlan`."""


def plan_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a `DenoisingPlan` from the values of a command line; ValueError names them as they are typed."""
    from vsa.attention.denoising import DenoisingPlan
    from vsa.settings import describe, fits, hints_of

    options = dict(given)
    for name in options.keys() & _ROWS.keys():
        options[name] = rows(f"--{name.replace('_', '-')}", options[name], *_ROWS[name])
    if "dense_layers" in options:
        options["dense_layers"] = numbers("--dense-layers", options["dense_layers"], int)
    if "refresh" in options:
        by_step = ":" in options["refresh"]
        steps = rows("--refresh", options["refresh"], *((int, int) if by_step else (int,)))
        options["refresh"] = steps if by_step or len(steps) > 1 else steps[0][0]
    hints = hints_of(DenoisingPlan)
    for name, value in options.items():
        if not fits(value, hints[name]):
            raise ValueError(f"--{name.replace('_', '-')} {given[name]}: expected {describe(hints[name])}")
    return options
