"""A data set written in parts, so that work goes on after an interruption and can be shared by processes.

Part n holds samples n * size .. (n + 1) * size - 1 and is a small data set of its own in `parts/NNNNN/` until all are
there; then the shards move up and one index is written. What a part holds depends on its samples alone, so neither
interruptions nor the number of processes change a byte of the result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from vsa.data.index import INDEX_NAME, DatasetIndex, Span, pooled_statistics
from vsa.data.own_files import listed_shards, remove_dataset, shard_files
from vsa.files import write_whole
from vsa.progress import progress_bar

_PARTS = "parts"
_DONE = "done.json"

# all that the folder of parts may hold: it is removed as a whole
_PART_ENTRY = re.compile(r"\d{5,}(/(done\.json|index\.json|(latents|text|\.tmp)-[\w.-]+))?")


@dataclass(frozen=True, kw_only=True)
class PartContent:
    """What became of the samples of one part.

    Args:
        skipped: (name, reason) of the samples left out.
        notes: (kind, value) of what is worth telling about the others.
    """

    skipped: Sequence[tuple[str, str]] = ()
    notes: Sequence[tuple[str, Any]] = ()


WritePart = Callable[[Path, range, Callable[[], None]], PartContent]
"""Writes the samples of a range as a data set to a folder, or nothing when all are bad; calls its last argument after
every sample."""


@dataclass(frozen=True, kw_only=True)
class PartsReport:
    """What is in the parts that are done.

    Args:
        samples: how many there are.
        skipped: (name, reason) of what was left out.
        notes: (kind, value) of what is worth telling; see `PartContent`.
        complete: whether no part is missing.
    """

    samples: int
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, Any], ...] = ()
    complete: bool


def check_target(root: str | Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds a finished data set, or other files that writing one would replace or remove.

    Raises:
        ValueError: names the folder or the file.
    """
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is not a folder")
    try:
        own = listed_shards(root)
    except ValueError as error:
        raise ValueError(f"{error}: choose another folder, or remove that file") from error
    if (root / INDEX_NAME).exists() and not overwrite:
        raise ValueError(f"{root} already holds a data set: choose another folder, or replace it with --overwrite")
    parts = root / _PARTS
    if parts.is_dir():
        # an interrupted join leaves shards in the root that no index lists yet
        entries = [Path(folder, name) for folder, *names in os.walk(parts) for name in chain(*names)]
        foreign = [path for path in entries if not _PART_ENTRY.fullmatch(path.relative_to(parts).as_posix())]
    else:
        foreign = [path for path in shard_files(root) if path.name not in own]
    if foreign:
        raise ValueError(f"{min(foreign)} does not belong to a data set in {root}: choose another folder, or move it")


def pending_parts(
    root: str | Path, *, count: int, part_size: int, settings: Mapping[str, Any], rank: int = 0, world_size: int = 1
) -> list[tuple[Path, range]]:
    """Folder and sample numbers of every part that this process has yet to write; arguments as of `write_parts`.

    Where one part has other settings, none is done.

    Raises:
        ValueError: `part_size` or `rank` out of range.
    """
    if part_size < 1:
        raise ValueError(f"samples_per_shard must be at least 1, got {part_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
    mine = _all_parts(Path(root), count, part_size)[rank::world_size]
    anew = bool(_differing(Path(root), {**settings, "samples_per_shard": part_size}))
    return [(folder, span) for folder, span in mine if anew or not (folder / _DONE).is_file()]


def write_parts(
    root: str | Path,
    write: WritePart,
    *,
    count: int,
    part_size: int,
    settings: Mapping[str, Any],
    overwrite: bool = False,
    rank: int = 0,
    world_size: int = 1,
    title: str = "writing",
    progress: bool = True,
) -> PartsReport:
    """Writes the parts of this process that are not done yet; `join_parts` makes the data set of them.

    Args:
        root: folder of the data set.
        write: writes one part.
        count: samples of the data set.
        part_size: samples of a part; what an interruption can cost.
        settings: everything that decides what the samples are, as JSON values; parts of other settings are refused.
        overwrite: parts of other settings are removed at once, a finished data set when `join_parts` replaces it; parts
            of the same settings are kept.
        rank: of this process, which writes parts rank, rank + world_size, ...
        world_size: processes that share the work.
        title: what the progress bar says.
        progress: show it.

    Returns:
        What all parts hold that are done by now, those of other processes included.

    Raises:
        ValueError: a finished data set or parts of other settings are there; settings are named with both values.
    """
    root = Path(root)
    share = {"count": count, "part_size": part_size, "rank": rank, "world_size": world_size}
    find_pending = partial(pending_parts, root, **share, settings=settings)
    # refuses a share out of range before anything is removed
    find_pending()
    if overwrite and world_size > 1:
        raise ValueError(f"overwrite needs one process, got {world_size}: remove {root} first")
    settings = {**settings, "samples_per_shard": part_size}
    check_target(root, overwrite=overwrite)
    _make_room(root, settings, overwrite=overwrite)

    parts, pending = _all_parts(root, count, part_size), find_pending()
    total, left = (sum(len(span) for _, span in group) for group in (parts[rank::world_size], pending))
    with progress_bar(title, total, done=total - left, disable=not progress) as advance:
        for folder, span in pending:
            _write_part(folder, span, write, settings, partial(advance, 1))
    done = [json.loads((folder / _DONE).read_text()) for folder, _ in parts if (folder / _DONE).is_file()]
    return PartsReport(
        samples=sum(part["samples"] for part in done),
        skipped=tuple((name, reason) for part in done for name, reason in part["skipped"]),
        # parts of earlier versions have none
        notes=tuple((kind, value) for part in done for kind, value in part.get("notes", ())),
        complete=len(done) == len(parts),
    )


def join_parts(root: str | Path) -> DatasetIndex:
    """Makes the data set of the parts in `root`, all of which must be done; it can be interrupted and called again.

    Returns:
        The index of the whole.
    """
    root = Path(root)
    # only now is there something to replace it with
    remove_dataset(root)
    numbers: dict[str, int] = {}
    indexes: list[DatasetIndex] = []
    for folder in sorted((root / _PARTS).iterdir()):
        if not (folder / INDEX_NAME).is_file():
            continue
        index = DatasetIndex.load(folder / INDEX_NAME)
        names = {}
        for name in sorted(index.shards):
            stem = name.rpartition("-")[0]
            names[name] = f"{stem}-{numbers.get(stem, 0):05d}.tar"
            numbers[stem] = numbers.get(stem, 0) + 1
            # missing when an earlier call came this far
            if (folder / name).exists():
                if (root / names[name]).exists():
                    raise ValueError(f"{root / names[name]} does not belong to the data set in {root}: move it")
                os.replace(folder / name, root / names[name])
        indexes.append(_renamed(index, names))
    mean, std = pooled_statistics(indexes)
    whole = replace(
        indexes[0],
        latent_mean=tuple(mean.tolist()),
        latent_std=tuple(std.tolist()),
        shards={name: shard for index in indexes for name, shard in index.shards.items()},
        samples={name: sample for index in indexes for name, sample in index.samples.items()},
    )
    write_whole(root / INDEX_NAME, whole.to_json())
    shutil.rmtree(root / _PARTS)
    return whole


def _all_parts(root: Path, count: int, part_size: int) -> list[tuple[Path, range]]:
    spans = [range(start, min(start + part_size, count)) for start in range(0, count, part_size)]
    return [(root / _PARTS / f"{n:05d}", span) for n, span in enumerate(spans)]


def _make_room(root: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
    """Removes begun parts of other settings, or refuses to."""
    differing = _differing(root, settings)
    if differing and not overwrite:
        name, old, new = differing[0]
        raise ValueError(
            f"{root} was begun with {name} {old}, now it is {new}: go on with the old setting, or start anew with "
            "--overwrite"
        )
    if differing:
        shutil.rmtree(root / _PARTS)


def _differing(root: Path, settings: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, old and new value of the settings in which begun parts differ."""
    settings = json.loads(json.dumps(settings))
    begun = [json.loads(path.read_text()) for path in sorted((root / _PARTS).glob(f"*/{_DONE}"))]
    return [
        (name, part["settings"].get(name), settings.get(name))
        for part in begun
        for name in sorted({*settings, *part["settings"]})
        if part["settings"].get(name) != settings.get(name)
    ]


def _write_part(
    folder: Path, span: range, write: WritePart, settings: Mapping[str, Any], advance: Callable[[], None]
) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        part = write(folder, span, advance)
        content = {"samples": len(span) - len(part.skipped), **asdict(part), "settings": settings}
        write_whole(folder / _DONE, json.dumps(content))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        # gone when this was the first part
        with suppress(OSError):
            folder.parent.rmdir()
        raise


def _renamed(index: DatasetIndex, names: Mapping[str, str]) -> DatasetIndex:
    """The index with shards under new names."""

    def span(old: Span) -> Span:
        return replace(old, shard=names[old.shard])

    return replace(
        index,
        null_text=span(index.null_text),
        shards={names[name]: replace(shard, name=names[name]) for name, shard in index.shards.items()},
        samples={
            name: replace(sample, latent=span(sample.latent), text=span(sample.text))
            for name, sample in index.samples.items()
        },
    )
