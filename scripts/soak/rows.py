"""Rows of the reliability scorecard: one kind of fault each, which is provoked many times."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

Attempts = Generator[tuple[str, str | None], None, tuple[str, ...] | None]
"""Tries of a row, one by one: the name of a try, with the values that are needed to repeat it, and its failure, None if
it had the required behaviour. A row may return notes: further facts, one line each."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the tries of a row.

    Args:
        tried: number of tries.
        survived: number of tries with the required behaviour.
        failures: one line per failed try.
        notes: see `Attempts`.
    """

    tried: int
    survived: int
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def counted(attempts: Attempts) -> Outcome:
    """Make the tries of a row and count them."""
    tried, failures = 0, []
    while True:
        try:
            name, failure = next(attempts)
        except StopIteration as end:
            notes = end.value or ()
            return Outcome(tried=tried, survived=tried - len(failures), failures=tuple(failures), notes=notes)
        tried += 1
        if failure is not None:
            failures.append(" ".join(f"{name}: {failure}".split())[:600])


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kind of fault and the function that provokes it.

    Args:
        name: name in the table, like "bit flips in state.json".
        tries: number of tries of the full form.
        short_tries: number of tries of the short form in `make test`, which takes a few seconds at most; 0: too slow
            for it, the short form is one try and its test is marked as slow.
        run: `run(folder, tries, seed)` provokes the fault in an empty folder; equal seeds provoke equal faults.
        seconds: time limit of the full form, after which it is stopped and all of its tries are lost.
    """

    name: str
    tries: int
    short_tries: int
    run: Callable[[Path, int, int], Attempts]
    seconds: float = 900
