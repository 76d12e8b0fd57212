"""Checks of the values of `index.json`: their type, and the range that a data set can have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vsa.files import shown

LARGEST_VALUE = 65504.0
"""Largest latent, mean or standard deviation: the largest float16."""

# the standard deviation of a constant channel is stored as 1
_SMALLEST_DEVIATION = 1e-9
_DIGEST = re.compile(r"[0-9a-f]{64}")


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A checked integer from least to most."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={shown(value)}: expected an integer from {least} to {most}")
    return value


def reals(name: str, values: Any, *, positive: bool = False) -> tuple[float, ...]:
    """A checked list of numbers, each of at most `LARGEST_VALUE` in magnitude.

    Args:
        name: name of the value in the message.
        values: the value to check.
        positive: whether each number must be above 0.
    """
    if not isinstance(values, list):
        raise ValueError(f"{name}={shown(values)}: expected a list of numbers")
    least = _SMALLEST_DEVIATION if positive else -LARGEST_VALUE
    for i, value in enumerate(values):
        # comparisons with NaN are false
        if type(value) not in (int, float) or not least <= value <= LARGEST_VALUE:
            raise ValueError(f"{name}[{i}]={shown(value)}: expected a number from {least:g} to {LARGEST_VALUE:g}")
    return tuple(float(value) for value in values)


def channel_statistics(
    values: Mapping[str, Any], where: str = "", *, kind: str = "latent", channels: int | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Checked means and standard deviations of latents by channel.

    Args:
        values: content of a file.
        where: beginning of the message, which names the file.
        kind: beginning of the keys `KIND_mean` and `KIND_std`.
        channels: channels of the latents, by default those of the `latent_shapes` in the same file.
    """
    names = f"{kind}_mean", f"{kind}_std"
    mean, std = (reals(where + name, values.get(name), positive=name == names[1]) for name in names)
    if channels is None:
        shapes = values.get("latent_shapes") or [[len(mean)]]
        channels = shapes[0][0] if isinstance(shapes, list) and isinstance(shapes[0], list) and shapes[0] else None
    if not len(mean) == len(std) == channels:
        got = f"{len(mean)} and {len(std)} values for {channels} channels"
        raise ValueError(f"{where}{names[0]} and {names[1]} of other latents: {got}")
    return mean, std


def wholes(name: str, values: Any, count: int, most: int) -> tuple[int, ...]:
    """A checked list of `count` integers from 1 to `most`."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name}={shown(values)}: expected a list of {count} integers")
    return tuple(whole(f"{name}[{i}]", value, 1, most) for i, value in enumerate(values))


def words(name: str, value: Any, *, most: int = 4096) -> str:
    """A checked text of 1 to `most` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise ValueError(f"{name}={shown(value)}: expected text")
    return value


def digest(name: str, value: Any) -> str:
    """A checked SHA-256 in hexadecimal."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{name}={shown(value)}: expected a SHA-256")
    return value
