"""Which files of a folder are ours to replace or remove: those that an index lists, or an interrupted writer left."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

from vsa.data.index import INDEX_NAME, DatasetIndex

# the owner that every member of our shards has
_OWNER = "vsa"
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


def remove_dataset(root: Path) -> None:
    """Removes the shards that the index of a folder lists, then the index; what else lies there stays.

    Raises:
        ValueError: there is no index, or it is not one of ours.
    """
    for name in DatasetIndex.load(root / INDEX_NAME).shards:
        (root / name).unlink(missing_ok=True)
    (root / INDEX_NAME).unlink()
