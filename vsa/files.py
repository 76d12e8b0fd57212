"""Atomic writes: a file or folder gets its final name only when it is complete; errors of a full disk."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vsa.errors import NO_ROOM


class DiskFullError(OSError):
    """The disk is full; `strerror` is the complete message."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def writing(path: Path, temporary: Path | None = None, *, needed: int | None = None) -> Iterator[None]:
    """Add the path to an OSError of a write in the block, which Python's message does not contain.

    Args:
        path: final path of the file or folder.
        temporary: path that is written to until then.
        needed: total bytes, None if unknown.

    Raises:
        DiskFullError: the disk is full; the message gives the needed, written and free bytes.
    """
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        if error.errno in NO_ROOM:
            raise DiskFullError(error.errno, _message(error, path, temporary or path, needed), str(path)) from error
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _message(error: OSError, path: Path, temporary: Path, needed: int | None) -> str:
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    parts = [] if needed is None else [f"{_size(needed)} needed"]
    parts += [f"{_size(_bytes(temporary))} written", f"{_size(shutil.disk_usage(nearest).free)} free"]
    # the text of the error itself may contain the temporary name
    return f"cannot write {path}: {os.strerror(error.errno or 0)} ({', '.join(parts)})"


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it is renamed to `path` when the block ends without an error.

    The temporary file is in the same folder, hence on the same file system, so that one rename completes the write; the
    file is flushed to the disk before it and the folder after it. On an error the temporary file is removed and `path`
    does not change.

    Args:
        path: the final path; its folder is created if missing.

    Raises:
        DiskFullError: the disk is full; the message gives `path`, the written and the free bytes.
    """
    path = Path(path)
    # keeps the suffix, because some writers choose the format by it
    temporary = path.parent / f".tmp-{secrets.token_hex(8)}{path.suffix}"
    try:
        with writing(path, temporary):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            flush_to_disk(temporary)
            os.replace(temporary, path)
            flush_to_disk(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write text or bytes to a file, atomically as in `atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_folder(path: Path, *, needed: int | None = None, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `path` to write into; it is renamed to `path` when the block ends without an error.

    All files and folders in it are flushed to the disk before the rename, and the parent folder after it. On an error
    the temporary folder is removed and `path` does not change.

    Args:
        path: the final path; its parent folders are created if missing.
        needed: total bytes, None if unknown.
        replace: remove an existing folder `path` right before the rename.

    Raises:
        DiskFullError: the disk is full; the message gives `path`, the written and the free bytes.
    """
    temporary = temporary_folder(path)
    try:
        with writing(path, temporary, needed=needed):
            # may be left over from a killed write
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            for inside in (*sorted(temporary.rglob("*")), temporary):
                flush_to_disk(inside)
            if replace and path.exists():
                remove_folder(path)
            os.replace(temporary, path)
            flush_to_disk(path.parent)
    except BaseException:
        # frees the space that a full disk needs
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_folder(path: Path) -> Path:
    """The temporary folder of `atomic_folder` for `path`."""
    return path.with_name(f".writing-{path.name}")


def remove_folder(path: Path) -> None:
    """Delete a folder; it is renamed first, so that an interruption leaves no partial folder under its name."""
    doomed = path.with_name(f".removing-{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def file_digest(path: Path) -> str:
    """SHA-256 of the bytes of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole_lines(file: TextIO) -> Iterator[str]:
    """Lines of a file, without a last one that lacks its end, whose last number may be cut."""
    return (line for line in file if line.endswith("\n"))
