"""Lists given as one value, `1000,757,522`."""

from __future__ import annotations

from typing import TypeVar

Number = TypeVar("Number", int, float)


def numbers(option: str, text: str | None, kind: type[Number]) -> list[Number] | None:
    """The numbers of an option; None when it is left out.

    Raises:
        ValueError: names the option with what was given.
    """
    try:
        return None if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: expected {kind.__name__} values with commas between them, got {text}") from None
