"""A row of the reliability scorecard: one kind of fault, provoked many times, and how often it was survived."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened in the tries of a row.

    Args:
        tried: how often the fault was provoked.
        survived: how often the required behaviour followed.
        failures: one line a try that went wrong, with what is needed to repeat it.
        notes: facts worth a line beside the numbers.
    """

    tried: int
    survived: int
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault, and how to provoke it.

    Args:
        name: what a stranger reads in the table, "bit flips in state.json".
        tries: how many tries the full form makes.
        short_tries: how many make the form that `make test` runs, a few seconds at most; 0: too heavy for it, the
            short form is one try and its test is slow.
        run: `run(folder, tries, seed)` provokes the fault in an empty folder; equal seeds provoke equal faults.
        seconds: after which the full form is stopped and has lost its tries.
    """

    name: str
    tries: int
    short_tries: int
    run: Callable[[Path, int, int], Outcome]
    seconds: float = 900
