"""Which files of a folder are ours to replace or remove: those that an index lists, or an interrupted writer left."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Collection
from pathlib import Path

from vsa.data.index import INDEX_NAME, DatasetIndex

# the owner that every member of our shards has
_OWNER = "vsa"
# the index of a data set that is being removed: shards that only it lists are ours
_REMOVED_INDEX = f".removed-{INDEX_NAME}"
# the names that `atomic_file` gives
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}\.(tar|json)")


def shard_files(root: Path) -> list[Path]:
    """The files of a folder that are named as shards are, whoever wrote them."""
    return sorted(path for pattern in ("latents-*.tar", "text-*.tar") for path in root.glob(pattern))


def is_leftover(path: Path) -> bool:
    """Whether an interrupted writer left a file: by its temporary name, or by the owner of what is in it."""
    if _TEMPORARY.fullmatch(path.name):
        return True
    try:
        with tarfile.open(path, "r:") as tar:
            first = tar.next()
    except (OSError, tarfile.TarError):
        return False
    return first is not None and first.uname == _OWNER


def listed_shards(root: Path) -> Collection[str]:
    """Names of the shards that are known to be those of a data set in `root`: there, or in the middle of its removal.

    Raises:
        ValueError: the index is not one of ours.
    """
    for name in (INDEX_NAME, _REMOVED_INDEX):
        if (root / name).exists():
            return DatasetIndex.load(root / name).shards
    return ()


def remove_dataset(root: Path) -> None:
    """Removes the index of a folder and the shards that it lists; what else lies there stays.

    An interrupted removal leaves no data set, and goes on at the next call.

    Raises:
        ValueError: the index is not one of ours.
    """
    shards, removed = listed_shards(root), root / _REMOVED_INDEX
    if (root / INDEX_NAME).exists():
        os.replace(root / INDEX_NAME, removed)
    for name in shards:
        (root / name).unlink(missing_ok=True)
    removed.unlink(missing_ok=True)
