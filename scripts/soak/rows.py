"""Rows of the reliability scorecard: one kind of fault each, which is provoked many times."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the tries of a row.

    Args:
        tried: number of tries.
        survived: number of tries with the required behaviour.
        failures: one line per failed try, with the values that are needed to repeat it.
        notes: further facts, one line each.
    """

    tried: int
    survived: int
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


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
    run: Callable[[Path, int, int], Outcome]
    seconds: float = 900
