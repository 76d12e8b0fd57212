"""Errors of the encoding of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch


class UnusableFiles(ValueError):
    """Files that cannot be encoded.

    Attributes:
        problems: (file or place in the caption file, reason) of each.
    """

    def __init__(self, problems: Sequence[tuple[str, str]], message: str) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class OutOfMemory(ValueError):
    """Too little memory for a clip. The file is not at fault, so it is never skipped for this reason."""


def refuse_overlap(videos: Path, out: Path) -> None:
    """Raise ValueError if one folder contains the other."""
    inner, outer = out.resolve(), videos.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ValueError(f"the folder of shards {out} and the folder of videos {videos} must not contain each other")


def unusable(problems: Sequence[tuple[str, str]], folder: Path) -> UnusableFiles:
    """The error for (file, reason) of some files in a folder, which names the first one and the way out."""
    _, reason = problems[0]
    if len(problems) == 1:
        return UnusableFiles(problems, f"{reason}; --skip-bad leaves it out")
    message = f"{len(problems)} problems with the files in {folder}, first: {reason}; --skip-bad leaves them out"
    return UnusableFiles(problems, message)


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Convert a failed allocation to a one-line error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has no exception type for failed allocations on the CPU
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(f"not enough memory to encode {what}: choose a smaller size or fewer frames") from error
