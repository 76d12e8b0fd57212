"""A data set written in parts, so that work goes on after an interruption and can be shared by processes.

Part n holds samples n * size .. (n + 1) * size - 1 and is a small data set of its own in `parts/NNNNN/` until all are
there; then the shards move up and one index is written. What a part holds depends on its samples alone, so neither
interruptions nor the number of processes change a byte of the result.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vsa.data.atomic import atomic_file
from vsa.data.index import INDEX_NAME, DatasetIndex, Span, pooled_statistics

_PARTS = "parts"
_DONE = "done.json"

WritePart = Callable[[Path, range, Callable[[], None]], list[tuple[str, str]]]
"""Writes the samples of a range as a data set to a folder, or nothing when all are bad; calls its last argument after
every sample and returns what was left out as (name, reason)."""


@dataclass(frozen=True, kw_only=True)
class PartsReport:
    """What is in the parts that are done: samples, files left out with the reason, and whether no part is missing."""

    samples: int
    skipped: tuple[tuple[str, str], ...]
    complete: bool


def check_target(root: str | Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds a finished data set, before anything is loaded.

    Raises:
        ValueError: it does and `overwrite` is off.
    """
    if (Path(root) / INDEX_NAME).exists() and not overwrite:
        raise ValueError(f"{root} already holds a data set; choose another folder or overwrite it")


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
    if part_size < 1:
        raise ValueError(f"samples_per_shard must be at least 1, got {part_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
    if overwrite and world_size > 1:
        raise ValueError(f"overwrite needs one process, got {world_size}: remove {root} first")
    settings = json.loads(json.dumps({**settings, "samples_per_shard": part_size}))
    check_target(root, overwrite=overwrite)
    _make_room(root, settings, overwrite=overwrite)

    folders = [root / _PARTS / f"{n:05d}" for n in range(-(-count // part_size))]
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not progress) as bar:
        mine = range(rank, len(folders), world_size)
        spans = [range(n * part_size, min((n + 1) * part_size, count)) for n in mine]
        task = bar.add_task(title, total=sum(map(len, spans)))
        for n, span in zip(mine, spans, strict=True):
            if (folders[n] / _DONE).is_file():
                bar.advance(task, len(span))
                continue
            _write_part(folders[n], span, write, settings, lambda: bar.advance(task))
    done = [json.loads((f / _DONE).read_text()) for f in folders if (f / _DONE).is_file()]
    return PartsReport(
        samples=sum(part["samples"] for part in done),
        skipped=tuple((name, reason) for part in done for name, reason in part["skipped"]),
        complete=len(done) == len(folders),
    )


def join_parts(root: str | Path) -> DatasetIndex:
    """Makes the data set of the parts in `root`, all of which must be done; it can be interrupted and called again.

    Returns:
        The index of the whole.
    """
    root = Path(root)
    if (root / INDEX_NAME).exists():
        # only now is there something to replace it with
        _remove_dataset(root)
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
    with atomic_file(root / INDEX_NAME) as temporary:
        temporary.write_text(whole.to_json(), encoding="utf-8")
    shutil.rmtree(root / _PARTS)
    return whole


def _make_room(root: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
    """Removes begun parts of other settings, or refuses to."""
    begun = [json.loads(path.read_text()) for path in sorted((root / _PARTS).glob(f"*/{_DONE}"))]
    differing = [
        (name, part["settings"].get(name), settings.get(name))
        for part in begun
        for name in sorted({*settings, *part["settings"]})
        if part["settings"].get(name) != settings.get(name)
    ]
    if differing and not overwrite:
        name, old, new = differing[0]
        raise ValueError(
            f"{root} was begun with {name} {old}, now it is {new}: go on with the old setting, or overwrite it"
        )
    if differing:
        shutil.rmtree(root / _PARTS)


def _remove_dataset(root: Path) -> None:
    # the index first: a folder without one is no data set
    (root / INDEX_NAME).unlink()
    for pattern in ("latents-*.tar", "text-*.tar"):
        for shard in root.glob(pattern):
            shard.unlink()


def _write_part(
    folder: Path, span: range, write: WritePart, settings: Mapping[str, Any], advance: Callable[[], None]
) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        skipped = write(folder, span, advance)
        content = {"samples": len(span) - len(skipped), "skipped": skipped, "settings": settings}
        with atomic_file(folder / _DONE) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")
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
