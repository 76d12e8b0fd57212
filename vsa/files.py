"""Files and folders that appear under their final name complete or not at all, and what a full disk says."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vsa.errors import NO_ROOM


class DiskFullError(OSError):
    """There is no room for a file; its text is the whole message."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def writing(path: Path, temporary: Path | None = None, *, needed: int | None = None) -> Iterator[None]:
    """Let an OSError inside name what is being written; Python's own names nothing when a write fails.

    Args:
        path: file or folder, under the name it gets in the end.
        temporary: where it is written until then.
        needed: bytes of the whole, where they are known.

    Raises:
        DiskFullError: there is no room; says how much was needed, how much is written and how much is free.
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


def _message(error: OSError, path: Path, written: Path, needed: int | None) -> str:
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    parts = [] if needed is None else [f"{_size(needed)} needed"]
    parts += [f"{_size(_bytes(written))} written", f"{_size(shutil.disk_usage(nearest).free)} free"]
    # not the error's own words, which may hold the temporary name
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
            flush_to_disk(temporary)
            os.replace(temporary, path)
            flush_to_disk(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file of some text or bytes, see `atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_folder(path: Path, *, needed: int | None = None, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `path` to write into; it gets the final name when the block ends without an error.

    Every file and folder in it is flushed to the disk first, the folder above it after the rename. On an error the
    temporary folder is removed and `path` stays as it was.

    Args:
        path: the final name; folders above it are created when missing.
        needed: bytes of the whole, where they are known.
        replace: remove a folder that has the name, right before the rename.

    Raises:
        DiskFullError: names `path`, what was written of it and what is free.
    """
    temporary = temporary_folder(path)
    try:
        with writing(path, temporary, needed=needed):
            # litter of a write that was killed
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
        # a full disk needs the room
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_folder(path: Path) -> Path:
    """Where `atomic_folder` writes what gets the name `path`."""
    return path.with_name(f".writing-{path.name}")


def remove_folder(path: Path) -> None:
    """Delete a folder so that no half of it can ever be taken for a whole one."""
    doomed = path.with_name(f".removing-{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """Return when a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
