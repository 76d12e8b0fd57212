"""What only shows a run must not end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.rank_zero import rank_zero_info


@contextmanager
def never_fatal(what: str) -> Iterator[None]:
    """A picture, clip or upload that fails costs one line: weights and metrics do not depend on it.

    For what one rank does by itself, or what fails on all ranks alike: none may be left waiting for another.

    Args:
        what: for the line, a path as a rule.
    """
    try:
        yield
    except AssertionError:
        # a defect of ours
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        rank_zero_info(f"warning: {what} is missing: {type(error).__name__}: {reason}")
