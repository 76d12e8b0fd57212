"""A file system that loses its power: what was not flushed to the disk is gone, zeroed, cut or still what it was.

It knows what `os.fsync`, `os.replace` and `os.rename` of this process did. As ext4 does, a flush of a file also keeps
the name under which it was made, and renames are kept in their order, from a flush of their folder on at the latest.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Place = str | bytes | os.PathLike[Any]


@dataclass
class Rename:
    """A rename that is not flushed yet, and what it has replaced: a file's content, or None."""

    source: Path
    target: Path
    replaced: bytes | None


class Disk:
    """What is on the disk of a folder, kept up to date while the calls of `os` are those of `watched`.

    Args:
        folder: everything below it is lost with the power, but for what was flushed.
        at: called before every flush and rename, with their number so far.
    """

    def __init__(self, folder: Path, at: Callable[[int], object] = lambda number: None):
        self._folder, self._at = folder.resolve(), at
        # content of flushed files by inode; what is there has survived the cuts before
        files = [path for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink()]
        self.flushed = {path.stat().st_ino: path.read_bytes() for path in files}
        self.renames: list[Rename] = []
        self.number = 0
        self.whole: list[Path] = []
        """Targets of the flushed renames, in their order."""
        self._fsync, self._replace = os.fsync, os.replace

    def fsync(self, descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        self._next()
        self._fsync(descriptor)
        if not path.is_relative_to(self._folder):
            return
        if path.is_dir():
            # the journal is in order
            last = max((n for n, each in enumerate(self.renames) if each.target.parent == path), default=-1)
            self.whole += [each.target for each in self.renames[: last + 1]]
            del self.renames[: last + 1]
        else:
            self.flushed[path.stat().st_ino] = path.read_bytes()

    def replace(self, source: Place, target: Place, **options: Any) -> None:
        old, new = Path(os.fsdecode(source)).absolute(), Path(os.fsdecode(target)).absolute()
        self._next()
        replaced = new.read_bytes() if new.is_file() else None
        self._replace(source, target, **options)
        if new.is_relative_to(self._folder):
            self.renames.append(Rename(old, new, replaced))

    def _next(self) -> None:
        self._at(self.number)
        self.number += 1

    def lose_power(self, draw: random.Random) -> list[str]:
        """Leave in the folder what a cut leaves there; returns what it has done to which file."""
        done, kept = [], draw.randint(0, len(self.renames))
        for each in reversed(self.renames[kept:]):
            if not each.target.exists():
                continue
            if each.source.parent.is_dir() and not each.source.exists():
                self._replace(each.target, each.source)
                if each.replaced is not None:
                    each.target.write_bytes(each.replaced)
                    self.flushed[each.target.stat().st_ino] = each.replaced
                done.append(f"{each.target.name}: not renamed")
        for path in sorted(self._folder.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            content, flushed = path.read_bytes(), self.flushed.get(path.stat().st_ino)
            if content == flushed:
                continue
            how = draw.choice(("as it is", "missing", "empty", "zeroed", "cut", "flushed"))
            same = next((n for n, (a, b) in enumerate(zip(content, flushed or b"", strict=False)) if a != b), None)
            same = min(len(content), len(flushed or b"")) if same is None else same
            if flushed is not None and how in ("missing", "empty"):
                how = "flushed"
            if how == "missing":
                path.unlink()
            elif how != "as it is":
                zeros = content[:same] + bytes(len(content) - same)
                left = content[: draw.randint(same, len(content))]
                path.write_bytes({"empty": b"", "zeroed": zeros, "cut": left, "flushed": flushed or b""}[how])
            done.append(f"{path.relative_to(self._folder)}: {how}")
        return done

    def watched(self, patch: Any) -> None:
        """Take the place of the calls of `os`."""
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "replace", self.replace)
        patch.setattr(os, "rename", self.replace)
