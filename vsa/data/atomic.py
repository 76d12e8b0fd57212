"""Files that appear under their final name complete or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from vsa.disk import writing


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it gets the final name when the block ends without an error.

    The temporary file lies in the same folder, hence on the same file system, so the last step is one rename; file and
    folder are flushed to the disk around it. On an error the temporary file is removed and `path` stays as it was.

    Args:
        path: the final name; its folder is created when missing.

    Raises:
        DiskFullError: names `path`, what was written of it and what is free.
    """
    path = Path(path)
    # keeps the suffix, by which some writers choose the format
    temporary = path.parent / f".tmp-{secrets.token_hex(8)}{path.suffix}"
    try:
        with writing(path, temporary):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _fsync(temporary)
            os.replace(temporary, path)
            _fsync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
