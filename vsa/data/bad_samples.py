"""Samples that cannot be trained on: why, where they lie, and the files that name them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vsa.files import write_whole

Cause = Literal["unreadable", "digest", "decode", "metadata", "dtype", "shape", "nan", "inf", "range"]
"""Why a sample is bad: its bytes cannot be read or are not those of the index, they are no tensors, what is said about
them is wrong, they have another type or shape than they should, or hold values that are no latents."""

_LINE = re.compile(r"(?:([^/\s]+)/)?([A-Za-z0-9_-]{1,128})")


class BadSampleError(ValueError):
    """A sample that cannot be trained on.

    Attributes:
        cause: the kind of fault.
        shard: name of the file that holds it.
        sample: its id.
    """

    def __init__(self, message: str, *, cause: Cause, shard: str, sample: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.shard, self.sample = shard, sample


class NoGoodSample(ValueError):
    """Every sample that was drawn in place of a bad one is bad too."""

    def __init__(self, message: str) -> None:
        # a loader hands the error of a worker on as its whole traceback, of which the last line is ours
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


@dataclass(frozen=True, kw_only=True)
class BadSample:
    """A bad sample that was drawn.

    Args:
        source: name of its data set.
        id: of the sample.
        shard: name of the file that holds it.
        cause: the kind of fault.
        slot: position in the global batch that another sample took.
    """

    source: str
    id: str
    shard: str
    cause: Cause
    slot: int


def write_drop_list(path: Path, bad: Mapping[str, str], *, found_by: str) -> None:
    """Write a file that `data.drop` takes.

    Args:
        path: file to write.
        bad: what is wrong with each sample, by id or source/id.
        found_by: the command or run that found them.
    """
    lines = [f"# found by {found_by}; training leaves these samples out with data.drop=FILE"]
    lines += [f"{name}\t{reason}" for name, reason in sorted(bad.items())]
    write_whole(path, "\n".join(lines) + "\n")


def read_drop_list(path: Path, samples: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    """The samples of a drop list by source: lines of id or source/id, and after a tab whatever helps people.

    Args:
        path: the file.
        samples: sample ids by source.

    Raises:
        ValueError: the file cannot be read, a line is no sample id, or no source has it; names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read data.drop={path}: {error}") from None
    dropped: dict[str, set[str]] = {source: set() for source in samples}
    for number, line in enumerate(lines, 1):
        name = line.partition("\t")[0].strip()
        if not name or name.startswith("#"):
            continue
        match = _LINE.fullmatch(name)
        if match is None:
            raise ValueError(f"data.drop={path}, line {number}: {name[:80]!r} is no sample id")
        owners = [source for source in _sources(match[1], samples) if match[2] in samples[source]]
        if not owners:
            raise ValueError(f"data.drop={path}, line {number}: no source has a sample {name}")
        for source in owners:
            dropped[source].add(match[2])
    return {source: frozenset(names) for source, names in dropped.items()}


def _sources(named: str | None, samples: Mapping[str, Collection[str]]) -> Iterable[str]:
    if named is None:
        return samples
    return [named] if named in samples else []
