"""Revisions of a data set that has grown, and those that a run uses.

A run uses one revision, or goes on with newer ones in phases, each from a first step on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from vsa.data.index import INDEX_NAME, DatasetIndex, index_text
from vsa.settings import AtLeastOne, Count, shown

Phases = Sequence[tuple[Count, AtLeastOne]]
"""First step and revision of every phase, the first at step 0."""

Versions = Callable[[str], str | None]
"""Function from the source of samples to its version now, see `vsa.data.index.About`; None: not known."""


def replaced(index: DatasetIndex, versions: Versions) -> list[tuple[str, str, str]]:
    """(source, stored version, version now) of files that are not those of the samples any more."""
    made = {(sample.about.source or "", sample.about.version) for sample in index.samples.values()}
    now = {name: versions(name) for name, old in made if old}
    return [(name, old, new) for name, old in sorted(made, key=str) if old and (new := now.get(name)) and new != old]


def earlier_index(revision: int) -> str:
    """Name of the index of a revision that is not the newest one."""
    return f"index-{revision}.json"


def index_digest(text: str) -> str:
    """SHA-256 of an index, which the next revision holds."""
    return hashlib.sha256(text.encode()).hexdigest()


def open_revision(
    read: Callable[[str], str], place: str, revision: int | None = None
) -> tuple[DatasetIndex, DatasetIndex]:
    """The index of a revision of a data set, and that of its newest one.

    Args:
        read: function from the name of a file of the set to its text.
        place: folder or URL of the set, for messages.
        revision: number of the revision; None: the newest one.

    Raises:
        ValueError: there is no such revision, or an index is damaged or not the one that the next revision grew from.
    """
    index = newest = DatasetIndex.parse(read(INDEX_NAME), f"{place}/{INDEX_NAME}")
    if revision is not None and revision > newest.revision:
        raise ValueError(
            f"data.revision={revision}: {place} has only revision{'s 1 to' * (newest.revision > 1)} {newest.revision}"
        )
    while revision is not None and revision < index.revision:
        name = earlier_index(index.revision - 1)
        text = read(name)
        if index_digest(text) != index.previous:
            raise ValueError(
                f"{place}/{name} is not the revision that revision {index.revision} of the data set grew from"
            )
        index = DatasetIndex.parse(text, f"{place}/{name}")
    return index, newest


def open_local_index(root: Path, revision: int | None = None) -> tuple[DatasetIndex, DatasetIndex]:
    """`open_revision` of a folder."""
    return open_revision(lambda name: index_text(root / name), str(root), revision)


def phases_of(revision: int | Phases | Mapping[str, int | Phases] | None, source: str) -> list[tuple[int, int | None]]:
    """First steps and revisions of a source; None stands for the newest revision.

    Args:
        revision: the setting `data.revision`, a mapping has an entry for some sources.
        source: name of the source.

    Raises:
        ValueError: phases that do not begin at step 0, or do not ascend.
    """
    chosen = revision.get(source) if isinstance(revision, Mapping) else revision
    if chosen is None or isinstance(chosen, int):
        return [(0, chosen)]
    rows = [(first, number) for first, number in chosen]
    if not rows or rows[0][0] or not all(a < c and b < d for (a, b), (c, d) in pairwise(rows)):
        raise ValueError(
            f"revision={shown(rows)}: expected pairs of first step and revision, both ascending, the first at step 0"
        )
    return [*rows]


def revision_at(phases: Sequence[tuple[int, int | None]], step: int) -> int | None:
    """The revision of a step."""
    return [revision for first, revision in phases if first <= step][-1]


def continued(
    phases: list[tuple[int, int | None]], recorded: Sequence[Sequence[int]], step: int, place: str
) -> list[tuple[int, int | None]]:
    """Phases of a resumed run: those of its record, or those of the settings if they agree up to its step.

    Args:
        phases: those of the settings.
        recorded: those of the checkpoint.
        step: number of steps that the run has made.
        place: folder of the data set, for the message.
    """
    before: list[tuple[int, int | None]] = [(first, revision) for first, revision in recorded]
    if phases == [(0, None)]:
        return before
    used, own = ([row for row in rows if row[0] < max(step, 1)] for rows in (before, phases))
    if used != own:
        raise ValueError(
            f"data.revision={shown(phases)}: up to step {step} the run has used {shown(used)} of {place}; a new phase "
            f"begins at step {step} or later, data.revision={shown([*used, (step, (used[-1][1] or 1) + 1)])}"
        )
    return phases
