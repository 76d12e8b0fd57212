"""Files of a folder that may be replaced or removed: those that an index lists, and leftovers of a writer."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Collection
from pathlib import Path

from vsa.data.index import INDEX_NAME, DatasetIndex
from vsa.data.revisions import earlier_index

# owner of every member of our shards
_OWNER = "vsa"
# index of a data set during its removal: shards that only it lists belong to us
_REMOVED_INDEX = f".removed-{INDEX_NAME}"
# temporary names of `atomic_file`
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}\.(tar|json)")


def shard_files(root: Path) -> list[Path]:
    """The files of a folder with names of shards, whoever wrote them."""
    return sorted(path for pattern in ("latents-*.tar", "text-*.tar") for path in root.glob(pattern))


def is_leftover(path: Path) -> bool:
    """Whether an interrupted writer left the file, judged by its temporary name or by the owner of its members."""
    if _TEMPORARY.fullmatch(path.name):
        return True
    try:
        with tarfile.open(path, "r:") as tar:
            first = tar.next()
    except (OSError, tarfile.TarError):
        return False
    return first is not None and first.uname == _OWNER


def listed_shards(root: Path) -> Collection[str]:
    """Names of the shards of the data set in `root`, also if its removal was interrupted."""
    index = _own_index(root)
    return () if index is None else index.shards


def _own_index(root: Path) -> DatasetIndex | None:
    names = [name for name in (INDEX_NAME, _REMOVED_INDEX) if (root / name).exists()]
    return DatasetIndex.load(root / names[0]) if names else None


def remove_dataset(root: Path) -> None:
    """Remove the index of a folder, those of earlier revisions, and the shards that it lists; other files stay.

    An interrupted removal leaves no data set, and the next call continues it.
    """
    index, removed = _own_index(root), root / _REMOVED_INDEX
    if (root / INDEX_NAME).exists():
        os.replace(root / INDEX_NAME, removed)
    for name in () if index is None else (*map(earlier_index, range(1, index.revision)), *index.shards):
        (root / name).unlink(missing_ok=True)
    removed.unlink(missing_ok=True)
