"""Resumable writer: a data set written in parts, which survive an interruption and can be shared by processes.

Part n holds samples n * size .. (n + 1) * size - 1 and is a small data set in `parts/NNNNN/` until all parts are
complete; then the shards move up and one index is written. The content of a part depends on its samples only, so
neither interruptions nor the number of processes change a byte of the result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, Literal

from vsa.data.index import INDEX_NAME, DatasetIndex, Span, index_text
from vsa.data.index_statistics import pooled_statistics
from vsa.data.own_files import listed_shards, remove_dataset, shard_files
from vsa.data.revisions import Versions, earlier_index, index_digest, replaced
from vsa.errors import refuse_unwritable
from vsa.files import read_json, write_whole
from vsa.progress import progress_bar
from vsa.settings import Count
from vsa.threads import each_in_threads

_PARTS = "parts"
_DONE = "done.json"
_RECORD = {"samples": Count, "skipped": list[tuple[str, str]], "notes": list[tuple[str, Any]], "settings": dict}

# the only entries of the folder of parts, which is removed as a whole
_PART_ENTRY = re.compile(r"\d{5,}(/(done\.json|index\.json|(latents|text|\.tmp)-[\w.-]+))?")


@dataclass(frozen=True, kw_only=True)
class PartContent:
    """Skipped samples and notes of one part.

    Args:
        skipped: (name, reason) of the skipped samples.
        notes: (kind, value) notes about the other samples, for the summary.
    """

    skipped: Sequence[tuple[str, str]] = ()
    notes: Sequence[tuple[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How a data set is written, and by how many processes.

    Args:
        dtype: dtype of the stored latents.
        samples_per_shard: samples in a full shard, the most that an interruption can cost.
        overwrite: whether parts with other settings are removed at once, and a finished data set when `join_parts`
            replaces it; parts with the same settings are kept.
        add: whether a finished data set gets the samples as a new revision.
        rank: rank of this process, which writes parts rank, rank + world_size, ...
        world_size: number of processes that share the work; a last call with a single process joins their parts.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float16"
    samples_per_shard: int = 256
    overwrite: bool = False
    add: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.samples_per_shard < 1:
            raise ValueError(f"samples_per_shard must be at least 1, got {self.samples_per_shard}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {self.rank}")
        if self.overwrite and self.world_size > 1:
            raise ValueError(f"overwrite needs one process, got {self.world_size}: remove the data set first")
        if self.overwrite and self.add:
            raise ValueError("--overwrite replaces a data set and --add keeps it: expected one of them")


WritePart = Callable[[Path, range, Callable[[int], None]], PartContent]
"""Function that writes the samples of a range as a data set to a folder, or nothing if all are bad, and calls its last
argument with the work that is done."""


@dataclass(frozen=True, kw_only=True)
class PartsReport:
    """Content of the finished parts.

    Args:
        samples: number of samples.
        skipped: (name, reason) of the skipped samples.
        notes: (kind, value) notes; see `PartContent`.
        complete: whether all parts are finished.
    """

    samples: int
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, Any], ...] = ()
    complete: bool


def check_target(root: str | Path, *, overwrite: bool, add: bool = False) -> None:
    """Raise ValueError for a folder with a finished data set, or with other files that writing would replace."""
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is not a folder")
    try:
        own = listed_shards(root)
    except ValueError as error:
        raise ValueError(f"{error}: choose another folder, or remove that file") from error
    if (root / INDEX_NAME).exists() and not (overwrite or add):
        raise ValueError(
            f"{root} already holds a data set: choose another folder, replace it with --overwrite, or add to it with "
            "--add"
        )
    parts = root / _PARTS
    if parts.is_dir():
        # after an interrupted join, the root holds shards that no index lists yet
        entries = [Path(folder, name) for folder, *names in os.walk(parts) for name in chain(*names)]
        foreign = [path for path in entries if not _PART_ENTRY.fullmatch(path.relative_to(parts).as_posix())]
    else:
        foreign = [path for path in shard_files(root) if path.name not in own]
    if foreign:
        raise ValueError(f"{min(foreign)} is not part of a data set in {root}: choose another folder, or move it")
    refuse_unwritable(root)


def pending_parts(
    root: str | Path,
    *,
    count: int,
    settings: Mapping[str, Any],
    output: OutputOptions,
    versions: Versions | None = None,
) -> list[tuple[Path, range]]:
    """Folder and sample numbers of every part that this process has yet to write; arguments as in `write_parts`.

    If one part has other settings, or is of a file that was replaced, all parts are pending.
    """
    mine = _all_parts(Path(root), count, output)[output.rank :: output.world_size]
    settings = {**settings, "samples_per_shard": output.samples_per_shard}
    anew = bool(_differing(Path(root), settings, versions))
    return [(folder, span) for folder, span in mine if anew or not (folder / _DONE).is_file()]


def write_parts(
    root: str | Path,
    write: WritePart,
    *,
    count: int,
    settings: Mapping[str, Any],
    output: OutputOptions,
    title: str,
    frames: Sequence[int] | None = None,
    threads: int = 1,
    versions: Versions | None = None,
) -> PartsReport:
    """Write the parts of this process that are not finished; `join_parts` joins them to a data set.

    Args:
        root: folder of the data set.
        write: function that writes one part.
        count: samples of the data set.
        settings: all settings that determine the samples, as JSON values; parts with other settings are an error.
        output: size of the parts, and the share of this process.
        title: title of the progress bar.
        frames: frames of each sample, which the progress bar counts (None: it counts samples).
        threads: parts that are written at the same time.
        versions: versions of the sources now; parts of another version are an error.

    Returns:
        Content of all finished parts, those of other processes included.
    """
    root = Path(root)
    check_target(root, overwrite=output.overwrite, add=output.add)
    parts, settings = _all_parts(root, count, output), {**settings, "samples_per_shard": output.samples_per_shard}
    _make_room(root, _differing(root, settings, versions), overwrite=output.overwrite)
    pending = pending_parts(root, count=count, settings=settings, output=output, versions=versions)
    mine = parts[output.rank :: output.world_size]
    total, remaining = (
        sum(len(span) if frames is None else sum(frames[i] for i in span) for _, span in group)
        for group in (mine, pending)
    )
    with progress_bar(title, total, done=total - remaining, unit="frames" if frames else "") as advance:
        each_in_threads(
            lambda part, stop: _write_part(part[0], part[1], write, settings, partial(_advance, advance, stop)),
            pending,
            threads,
        )
    records = [read_json(folder / _DONE, kind=_RECORD) for folder, _ in parts if (folder / _DONE).is_file()]
    return PartsReport(
        samples=sum(part["samples"] for part in records),
        skipped=tuple((name, reason) for part in records for name, reason in part["skipped"]),
        notes=tuple((kind, value) for part in records for kind, value in part["notes"]),
        complete=len(records) == len(parts),
    )


def join_parts(root: str | Path, *, add: bool = False) -> DatasetIndex:
    """Join the parts in `root`, all of which must be finished, to a data set; can be interrupted and called again.

    Args:
        root: folder of the parts.
        add: whether they are added to the data set in `root`, if there is one, as its next revision.

    Returns:
        The index of the whole.
    """
    root = Path(root)
    grows = add and (root / INDEX_NAME).exists()
    indexes = [DatasetIndex.load(root / INDEX_NAME)] if grows else []
    if not grows:
        # an existing data set is removed only now, when its replacement is complete
        remove_dataset(root)
    numbers = Counter(name.rpartition("-")[0] for index in indexes for name in index.shards)
    for folder in sorted((root / _PARTS).iterdir()):
        if not (folder / INDEX_NAME).is_file():
            continue
        index = DatasetIndex.load(folder / INDEX_NAME)
        names = {}
        for name in sorted(index.shards):
            stem = name.rpartition("-")[0]
            names[name] = f"{stem}-{numbers[stem]:05d}.tar"
            numbers[stem] += 1
            # missing if an earlier, interrupted call has moved it
            if (folder / name).exists():
                if (root / names[name]).exists():
                    raise ValueError(f"{root / names[name]} is not part of the data set in {root}: move it")
                os.replace(folder / name, root / names[name])
        indexes.append(_renamed(index, names))
    ids = Counter(chain(*(index.samples for index in indexes)))
    if twice := [name for name, uses in ids.items() if uses > 1]:
        raise ValueError(f"{root} would hold {len(twice)} samples twice, first {twice[0]}")
    mean, std = pooled_statistics(indexes)
    whole = replace(
        indexes[0],
        latent_mean=tuple(mean.tolist()),
        latent_std=tuple(std.tolist()),
        shards={name: shard for index in indexes for name, shard in index.shards.items()},
        samples={name: sample for index in indexes for name, sample in index.samples.items()},
    )
    if grows:
        before = index_text(root / INDEX_NAME)
        write_whole(root / earlier_index(whole.revision), before)
        whole = replace(whole, revision=whole.revision + 1, previous=index_digest(before))
    write_whole(root / INDEX_NAME, whole.to_json())
    shutil.rmtree(root / _PARTS)
    return whole


def _advance(advance: Callable[[int], None], stopping: Event, count: int) -> None:
    if stopping.is_set():
        raise RuntimeError("another part failed")
    advance(count)


def _all_parts(root: Path, count: int, output: OutputOptions) -> list[tuple[Path, range]]:
    part_size = output.samples_per_shard
    spans = [range(start, min(start + part_size, count)) for start in range(0, count, part_size)]
    return [(root / _PARTS / f"{n:05d}", span) for n, span in enumerate(spans)]


def _make_room(root: Path, differing: Sequence[tuple[str, Any, Any]], *, overwrite: bool) -> None:
    """Remove parts with other settings, or raise ValueError without `overwrite`."""
    # an interruption has left them after they had been added
    added = any(name == "revision" and (old or 1) < (new or 1) for name, old, new in differing)
    if differing and not (overwrite or added):
        name, old, new = differing[0]
        raise ValueError(
            f"{root} was started with {name} {old}, got {new}: continue with the old setting, or start over with "
            "--overwrite"
        )
    if differing:
        shutil.rmtree(root / _PARTS)


def _differing(root: Path, settings: Mapping[str, Any], versions: Versions | None) -> list[tuple[str, Any, Any]]:
    """Name, old and new value of the settings, and before them of the files, in which existing parts differ."""
    settings = json.loads(json.dumps(settings))
    indexes = sorted((root / _PARTS).glob(f"*/{INDEX_NAME}"))
    changed = [change for path in indexes if versions for change in replaced(DatasetIndex.load(path), versions)]
    records = [read_json(path, kind=_RECORD) for path in sorted((root / _PARTS).glob(f"*/{_DONE}"))]
    return [(f"{name} of digest", old[:12], now[:12]) for name, old, now in changed] + [
        (name, part["settings"].get(name), settings.get(name))
        for part in records
        for name in sorted({*settings, *part["settings"]})
        if part["settings"].get(name) != settings.get(name)
    ]


def _write_part(
    folder: Path, span: range, write: WritePart, settings: Mapping[str, Any], advance: Callable[[int], None]
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
        # the folder of parts is removed if this was the first part
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
