"""Bad samples, which cannot be trained on: their causes, their errors, and drop lists that name them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vsa.errors import LoaderError
from vsa.files import read_text, write_whole

Cause = Literal["unreadable", "digest", "decode", "metadata", "dtype", "shape", "nan", "inf", "range"]
"""Cause of a bad sample: its bytes are unreadable or differ from the digest, do not decode to tensors, have wrong
metadata, an unexpected dtype or shape, or values that are not valid latents."""

_LINE = re.compile(r"(?:([^/\s]+)/)?([A-Za-z0-9_-]{1,128})")


class BadSampleError(ValueError):
    """A sample that cannot be trained on.

    Attributes:
        cause: kind of the fault.
        shard: name of the shard that holds the sample.
        sample: id of the sample.
    """

    def __init__(self, message: str, *, cause: Cause, shard: str, sample: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.shard, self.sample = shard, sample


class NoGoodSample(LoaderError):
    """All replacements of a bad sample are bad too."""


@dataclass(frozen=True, kw_only=True)
class BadSample:
    """A bad sample that was drawn.

    Args:
        source: name of the data set.
        id: id of the sample.
        shard: name of the shard that holds the sample.
        cause: kind of the fault.
        slot: position in the global batch, which another sample took.
    """

    source: str
    id: str
    shard: str
    cause: Cause
    slot: int


def write_drop_list(path: Path, bad: Mapping[str, str], *, found_by: str) -> None:
    """Write a drop list, the file that `data.drop` reads.

    Args:
        path: file to write.
        bad: reason for each sample, by id or source/id.
        found_by: the command or run that found them.
    """
    lines = [f"# found by {found_by}; training leaves these samples out with data.drop=FILE"]
    lines += [f"{name}\t{reason}" for name, reason in sorted(bad.items())]
    write_whole(path, "\n".join(lines) + "\n")


def read_drop_list(path: Path, samples: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    """The samples of a drop list by source. A line is an id or source/id, optionally with a comment after a tab.

    Args:
        path: the file.
        samples: sample ids by source.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read data.drop={path}: {error}") from None
    dropped: dict[str, set[str]] = {source: set() for source in samples}
    for number, line in enumerate(lines, 1):
        name = line.partition("\t")[0].strip()
        if not name or name.startswith("#"):
            continue
        match = _LINE.fullmatch(name)
        if match is None:
            raise ValueError(f"data.drop={path}, line {number}: expected a sample id, got {name[:80]!r}")
        owners = [source for source in _sources(match[1], samples) if match[2] in samples[source]]
        if not owners:
            raise ValueError(f"data.drop={path}, line {number}: no source has a sample {name}")
        for source in owners:
            dropped[source].add(match[2])
    return {source: frozenset(names) for source, names in dropped.items()}


def _sources(source: str | None, samples: Mapping[str, Collection[str]]) -> Iterable[str]:
    if source is None:
        return samples
    return [source] if source in samples else []
