"""The folder of a run: which process writes into it, whose it is, and how a new run takes the place of an old one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.errors import refuse_unwritable
from vsa.files import atomic_file

MANIFEST = "run.json"
PROJECT = "vsa-train"


def check_name(key: str, value: str) -> None:
    """Refuse a setting that is not the name of one folder.

    Raises:
        ValueError: names the key and the value.
    """
    # a leading dot also covers "." and "..", and the hidden names used here
    if not value or value == "None" or value.startswith(".") or {"/", os.sep, "\0"} & set(value):
        raise ValueError(f"{key}={value} is not a name: expected one folder name without / and without a leading dot")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder, which need not exist, until the block ends or this process does.

    The lock lies beside the folder, which may be moved and replaced meanwhile. It and the folders made for it are
    removed at the end.

    Raises:
        ValueError: another process has it, or nothing can be written there.
    """
    folder = folder.resolve()
    refuse_unwritable(folder.parent)
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    # no process waits for a whole run; half a second is for one that is just ending
    lock = FileLock(path, timeout=0.5)
    try:
        with lock:
            # on a file system without locks filelock keeps a file that it reads and removes itself
            if isinstance(lock, SoftFileLock):
                yield
                return
            try:
                path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}))
                yield
            finally:
                path.unlink(missing_ok=True)
    except Timeout as timeout:
        # one of the block's own is none of ours
        if timeout.lock_file != str(path):
            raise
        raise ValueError(
            f"run folder {folder} is in use by {_holder(path)}: wait until it ends, or name another run with run=NAME"
        ) from None
    finally:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _holder(lock: Path) -> str:
    try:
        known = json.loads(lock.read_text())
        return f"process {known['pid']} on {known['host']} since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that a run must not write into, or that must not be removed for it.

    Args:
        folder: of the run; need not exist.
        overwrite: whether it is to be replaced.

    Raises:
        ValueError: says what is in the way and what to do.
    """
    if folder.is_symlink() and (overwrite or not folder.exists()):
        raise ValueError(
            f"run folder {folder} is a symbolic link to {os.readlink(folder)}: "
            "remove the link, or name the folder itself with run_dir="
        )
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"run folder {folder} is not a folder: name another run with run=NAME")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        if not _is_run(folder):
            raise ValueError(
                f"run folder {folder} holds files of something else (it has no {MANIFEST}): "
                "a run could replace them, name another one with run=NAME or run_dir=FOLDER"
            )
        return
    if Path.cwd().is_relative_to(folder.resolve()):
        raise ValueError(f"overwrite=true cannot remove {folder}: the command was started inside it")
    if not _has_manifest(folder):
        raise ValueError(
            f"overwrite=true cannot remove {folder}: it has no {MANIFEST} that shows it to be a run of {PROJECT}. "
            "Remove it by hand, or name another run with run=NAME; a run of an older version gets one when it is "
            "resumed with ckpt_path=last"
        )
    inner = next((path for path in _folders_below(folder) if _is_run(path)), None)
    if inner is not None:
        raise ValueError(f"overwrite=true cannot remove {folder}: it contains another run, {inner}")


def _is_run(folder: Path) -> bool:
    # versions before the manifest left checkpoints only
    return _has_manifest(folder) or bool(list_checkpoints(folder / "checkpoints"))


def _has_manifest(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("written_by") == PROJECT


def _folders_below(folder: Path) -> Iterator[Path]:
    for path, names, _ in os.walk(folder):
        yield from (Path(path) / name for name in names)


class RunFolder:
    """A run folder that is opened inside a `with` block, and what undoes that until the run has got going.

    When the block ends with an error before `keep`, the folder is again what it was.

    Args:
        path: the folder; need not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        # what undoes the opening: a folder to remove, one to put back, or files with their content (None: remove)
        self._new = False
        self._old: Path | None = None
        self._before: dict[str, bytes | None] = {}

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.keep()
        else:
            self._undo()

    def open(self, config: str, *, overwrite: bool) -> None:
        """Make the folder with its manifest and its config.

        Args:
            config: content of `config.yaml`.
            overwrite: begin with an empty folder; what stands there is moved aside, and removed by `keep`.

        Raises:
            ValueError: see `check_folder`.
        """
        check_folder(self.path, overwrite=overwrite)
        # a relative name could mean another folder later
        self.path = self.path.resolve()
        if overwrite and self.path.exists():
            self._old = _moved_aside(self.path)
        self._new = not self.path.exists()
        if not self._new:
            self._before = {name: _content(self.path / name) for name in (MANIFEST, "config.yaml", "metrics.csv")}
        self.path.mkdir(parents=True, exist_ok=True)
        if not _has_manifest(self.path):
            write_manifest(self.path)
        with atomic_file(self.path / "config.yaml") as path:
            path.write_text(config)

    def keep(self) -> None:
        """Make the opening final: the run that was moved aside is removed."""
        old = self._old
        self._new, self._old, self._before = False, None, {}
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
            if old.exists():
                warnings.warn(f"{old}, which was the run folder {self.path}, could not be removed", stacklevel=2)

    def _undo(self) -> None:
        if self._new:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._old is not None:
            os.rename(self._old, self.path)
        for name, content in self._before.items():
            if content is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                (self.path / name).write_bytes(content)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _moved_aside(folder: Path) -> Path:
    """Rename a folder to a hidden name beside it, and return that."""
    prefix = f".{folder.name}.overwritten-"
    # left by a process that was killed before it had removed what it moved
    for left in [path for path in folder.parent.iterdir() if path.name.startswith(prefix)]:
        shutil.rmtree(left, ignore_errors=True)
    aside = folder.with_name(prefix + secrets.token_hex(4))
    os.rename(folder, aside)
    return aside


def write_manifest(folder: Path) -> None:
    """Mark a folder as a run of this project."""
    try:
        installed = version(PROJECT)
    except PackageNotFoundError:
        installed = "not installed"
    manifest = {"written_by": PROJECT, "version": installed, "run_id": secrets.token_hex(8), "created": _now()}
    with atomic_file(folder / MANIFEST) as path:
        path.write_text(json.dumps(manifest, indent=1) + "\n")
