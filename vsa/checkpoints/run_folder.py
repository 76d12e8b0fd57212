"""Run folder: lock of the writing process, and an old run that is set aside for a new one."""

from __future__ import annotations

import errno
import glob
import json
import os
import secrets
import shutil
import signal
import socket
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from vsa.checkpoints.manifest import PROJECT, has_manifest, local_time, note_commit, write_manifest
from vsa.checkpoints.places import MANIFEST
from vsa.checkpoints.retention import put_back, set_aside, shared_step
from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.errors import refuse_unwritable
from vsa.files import read_json, set_damaged_aside, write_whole
from vsa.signals import handled_by

# lock of a folder that is writable but cannot be renamed
_INNER_LOCK = ".lock"
# what a run that made no step has written by itself
_FIRST_FILES = {MANIFEST, "config.yaml", "metrics.csv", "tensorboard", "wandb", _INNER_LOCK}
_CANNOT_MOVE = "overwrite=true cannot set {} aside: {}, name another run with run=NAME or run_dir=FOLDER"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder, which need not exist, for the duration of the block or until this process ends.

    The lock file is next to the folder, which may be moved and replaced meanwhile, or inside it if the parent is not
    writable. The lock file and folders created for it are removed at the end. A run that was moved aside by a process
    which ended before its first step is put back.

    Raises:
        ValueError: another process has the lock, or the folder is not writable.
    """
    folder = folder.resolve()
    path = folder.parent / f".{folder.name}.lock"
    if folder.is_dir() and os.access(folder, os.W_OK) and not os.access(folder.parent, os.W_OK):
        path = folder / _INNER_LOCK
    refuse_unwritable(path.parent)
    new_parents = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    # half a second is enough for a process that is ending; none waits for a whole run
    lock = FileLock(path, timeout=0.5)
    try:
        with lock:
            # on a file system without locks, filelock uses the content of the file and removes it itself
            if isinstance(lock, SoftFileLock):
                _put_back(folder)
                yield
                return
            try:
                # on a full disk, other processes cannot read the name of this one
                with suppress(OSError):
                    path.write_text(
                        json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": local_time()})
                    )
                _put_back(folder)
                yield
            finally:
                path.unlink(missing_ok=True)
    except Timeout as timeout:
        # the error of another lock, raised within the block
        if timeout.lock_file != str(path):
            raise
        raise ValueError(
            f"run folder {folder} is in use by {_holder(path)}: wait until it ends, or name another run with run=NAME"
        ) from None
    finally:
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()


def in_use(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder, see `locked`; False if this is unknown."""
    folder = folder.resolve()
    for path in (folder.parent / f".{folder.name}.lock", folder / _INNER_LOCK):
        # opening a missing lock file would create it
        if path.is_file():
            try:
                with FileLock(path, timeout=0):
                    pass
            except Timeout:
                return True
            except OSError:
                continue
    return False


def _holder(lock: Path) -> str:
    try:
        owner = read_json(lock, kind={"pid": int, "host": str, "since": str})
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError):
        return "another process"


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that a run must not write to, or that must not be set aside for it.

    Args:
        folder: the run folder, which need not exist.
        overwrite: whether it will be set aside.

    Raises:
        ValueError: names the problem and its solution.
    """
    if folder.is_symlink():
        raise ValueError(
            f"run folder {folder} is a symbolic link to {os.readlink(folder)}: "
            "remove the link, or name the folder itself with run_dir="
        )
    refuse_inside_run(folder.absolute().parent, f"run folder {folder}")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"run folder {folder} is not a folder: name another run with run=NAME")
    if overwrite and not os.access(folder.resolve().parent, os.W_OK):
        raise ValueError(_CANNOT_MOVE.format(folder, "the folder above it cannot be written to"))
    if not _holds_files(folder):
        return
    if not overwrite:
        # versions before the manifest wrote checkpoints only
        if not has_manifest(folder) and not list_checkpoints(folder / "checkpoints"):
            raise ValueError(
                f"run folder {folder} holds files of something else (it has no {MANIFEST}): "
                "a run could replace them, name another one with run=NAME or run_dir=FOLDER"
            )
        for link in folder.rglob("*"):
            # wandb links its logs to its cache, in a folder of every start
            own = "wandb" in link.relative_to(folder).parts[:-1]
            if link.is_symlink() and not own and not Path(os.path.realpath(link)).is_relative_to(folder.resolve()):
                raise ValueError(f"run folder {folder} has a link out of it, {link} -> {os.readlink(link)}: remove it")
        return
    if Path.cwd().is_relative_to(folder.resolve()):
        raise ValueError(f"overwrite=true cannot set {folder} aside: the command was started inside it")
    if not has_manifest(folder):
        raise ValueError(
            f"overwrite=true cannot set {folder} aside: it has no {MANIFEST} that shows it to be a run of {PROJECT}. "
            "Move it by hand, or name another run with run=NAME; a run of an older version gets one when it is "
            "resumed with ckpt_path=last"
        )


def refuse_inside_run(folder: Path, what: str) -> None:
    """Raise ValueError if a folder is that of a run or within one, where another one may not write."""
    outer = next((path for path in (folder.resolve(), *folder.resolve().parents) if has_manifest(path)), None)
    if outer is not None:
        raise ValueError(f"{what} is inside a run, {outer}: choose another folder")


def _holds_files(folder: Path, own: Collection[str] = (_INNER_LOCK,)) -> bool:
    # a kill leaves temporary files
    return any(path.name not in own and not path.name.startswith(".tmp-") for path in folder.iterdir())


def set_run_aside(folder: Path, hidden: Path | None = None) -> Path:
    """Rename a run folder, with all that is in it, to a free name beside it: NAME.1, NAME.2, ...; returns the new path.

    Args:
        folder: the run folder.
        hidden: its present name, if it was moved before.
    """
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    # a sweep has a log beside each run; a name in use is that of a run which has no folder yet
    aside = next(n for n in names if not (os.path.lexists(n) or os.path.lexists(f"{n}.log") or in_use(n)))
    os.rename(hidden or folder, aside)
    return aside


class RunFolder:
    """A run folder that is opened within a `with` block, and restored if the block ends with an error before `keep`.

    Args:
        path: the folder, which need not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        # to undo the opening: a folder to remove, one to put back, or files with their content (None: remove)
        self._opened = False
        self._new = False
        self._old: Path | None = None
        self._before: dict[str, bytes | None] = {}
        self._aside: Path | None = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.keep()
        elif self._opened:
            # signals are ignored: a run that ends anyway must restore the folder first
            with handled_by(signal.SIG_IGN):
                self._undo()

    def open(self, config: str, *, overwrite: bool, resume: Path | None = None) -> Path | None:
        """Create the folder with its manifest and its config.

        Args:
            config: content of `config.yaml`.
            overwrite: whether to start with an empty folder; the present one is moved, and gets its new name in `keep`.
            resume: checkpoint to resume; later checkpoints of the folder are moved aside.

        Returns:
            folder of the moved checkpoints; None: there were none.

        Raises:
            ValueError: see `check_folder`.
        """
        check_folder(self.path, overwrite=overwrite)
        # a relative path would change its meaning with the working directory
        self.path = self.path.resolve()
        self._opened = True
        if overwrite and self.path.exists():
            try:
                self._old = _moved(self.path, "overwritten")
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                raise ValueError(_CANNOT_MOVE.format(self.path, "it is a mount point")) from error
        self._new = not self.path.exists()
        if not self._new:
            self._before = {name: _content(self.path / name) for name in (MANIFEST, "config.yaml", "metrics.csv")}
        self.path.mkdir(parents=True, exist_ok=True)
        if has_manifest(self.path):
            note_commit(self.path)
        else:
            if os.path.lexists(self.path / MANIFEST):
                aside = set_damaged_aside(self.path / MANIFEST)
                warnings.warn(f"{self.path / MANIFEST} is damaged: it was moved to {aside.name}", stacklevel=2)
            write_manifest(self.path)
        write_whole(self.path / "config.yaml", config)
        if resume is not None:
            checkpoints = self.path / "checkpoints"
            self._aside = set_aside(checkpoints, shared_step(checkpoints, resume))
        return self._aside

    def keep(self) -> list[Path]:
        """Make the opening permanent, and remove remnants of new runs that made no step; returns the paths at which the
        runs before are now, see `set_run_aside`."""
        if not self._opened:
            return []
        self._opened, self._new, self._old, self._before, self._aside = False, False, None, {}, None
        runs = []
        for old in _beside(self.path, "overwritten"):
            try:
                runs.append(set_run_aside(self.path, old))
            except OSError as error:
                warnings.warn(f"{old}, which was the run folder {self.path}, keeps this name: {error}", stacklevel=2)
        for doomed in _beside(self.path, "removing"):
            shutil.rmtree(doomed, ignore_errors=True)
        return runs

    def _undo(self) -> None:
        # errors become warnings, since the error that ends the run is more important
        try:
            if self._new or self._old is not None:
                _replace(self.path, self._old)
            if self._aside is not None:
                put_back(self._aside)
        except OSError as failure:
            old = f", the run before is {self._old}" if self._old is not None and self._old.exists() else ""
            warnings.warn(f"run folder {self.path} could not be put back: {failure}{old}", stacklevel=3)
        # files are removed first, which frees space for the others
        for name, content in sorted(self._before.items(), key=lambda item: item[1] is not None):
            path = self.path / name
            try:
                if content is None:
                    path.unlink(missing_ok=True)
                elif _content(path) != content:
                    write_whole(path, content)
            except OSError as failure:
                warnings.warn(f"{path} could not be put back: {failure}", stacklevel=3)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _beside(folder: Path, why: str) -> list[Path]:
    """Paths renamed to a hidden name next to a run folder, the oldest first."""
    paths = folder.parent.glob(glob.escape(f".{folder.name}.{why}-") + "*")
    return sorted(paths, key=lambda path: path.stat().st_ctime_ns)


def _moved(folder: Path, why: str) -> Path:
    """Rename a run folder to a hidden name next to it; returns the new path."""
    aside = folder.with_name(f".{folder.name}.{why}-{secrets.token_hex(4)}")
    os.rename(folder, aside)
    return aside


def _replace(folder: Path, old: Path | None) -> None:
    """Remove a folder, which need not exist, and rename `old` to it; a kill never leaves a partial folder there."""
    doomed = _moved(folder, "removing") if folder.exists() else None
    if old is not None:
        os.rename(old, folder)
    if doomed is not None:
        shutil.rmtree(doomed, ignore_errors=True)


def _put_back(folder: Path) -> None:
    """Undo an overwrite whose process was killed before its first step, if the old run was not removed yet."""
    olds = [path for path in _beside(folder, "overwritten") if has_manifest(path)]
    own = list_checkpoints(folder / "checkpoints")
    # a folder with foreign files is refused later
    if not olds or own or (folder.exists() and not has_manifest(folder) and _holds_files(folder)):
        return
    if folder.exists() and _holds_files(folder, _FIRST_FILES):
        # what somebody put there since
        set_run_aside(folder)
    _replace(folder, olds[-1])
    warnings.warn(
        f"run folder {folder}: put its old run back, which was to be overwritten by one that made no step", stacklevel=2
    )
