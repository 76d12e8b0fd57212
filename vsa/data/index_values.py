"""Values of `index.json` as they may be: of their type, and in a range that a data set can have."""

from __future__ import annotations

import re
from typing import Any

LARGEST_VALUE = 65504.0
"""Largest latent, mean or deviation: what a float16 holds."""

# deviations of channels that do not vary are stored as 1
_SMALLEST_DEVIATION = 1e-9
_DIGEST = re.compile(r"[0-9a-f]{64}")


def whole(name: str, value: Any, least: int, most: int) -> int:
    """An integer.

    Raises:
        ValueError: it is none, or outside of least..most; names it.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={_short(value)}: expected an integer from {least} to {most}")
    return value


def reals(name: str, values: Any, *, positive: bool = False) -> tuple[float, ...]:
    """A list of numbers, each at most `LARGEST_VALUE` in size.

    Args:
        name: for the error.
        values: what should be one.
        positive: each must be above 0.

    Raises:
        ValueError: it is none; names the first wrong value.
    """
    if not isinstance(values, list):
        raise ValueError(f"{name}={_short(values)}: expected a list of numbers")
    least = _SMALLEST_DEVIATION if positive else -LARGEST_VALUE
    for i, value in enumerate(values):
        # comparisons with NaN are false
        if type(value) not in (int, float) or not least <= value <= LARGEST_VALUE:
            raise ValueError(f"{name}[{i}]={_short(value)}: expected a number from {least:g} to {LARGEST_VALUE:g}")
    return tuple(float(value) for value in values)


def wholes(name: str, values: Any, count: int, most: int) -> tuple[int, ...]:
    """A list of so many integers from 1 to `most`.

    Raises:
        ValueError: it is none; names it.
    """
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name}={_short(values)}: expected a list of {count} integers")
    return tuple(whole(f"{name}[{i}]", value, 1, most) for i, value in enumerate(values))


def words(name: str, value: Any, *, most: int = 4096) -> str:
    """Some text of at most so many characters.

    Raises:
        ValueError: it is none; names it.
    """
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise ValueError(f"{name}={_short(value)}: expected text")
    return value


def digest(name: str, value: Any) -> str:
    """A SHA-256 in hexadecimal.

    Raises:
        ValueError: it is none; names it.
    """
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{name}={_short(value)}: expected a SHA-256")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
