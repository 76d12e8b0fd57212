"""Which code stands under a row of the soak: a row is as old as the last change of what its tests can reach.

Used by the table (`tests/soak/plugin.py`), which stores a digest of these files in each row, and by the pages
(`scripts/docs_hooks.py`), which say where it is another one now.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"vsa": ROOT / "vsa", "vsa_kernels": ROOT / "kernels" / "vsa_kernels", "tests": ROOT / "tests"}
"""Folders of the packages whose files count."""

MARK = re.compile(r"mark\.soak\(\s*\"([^\"]+)\"")
ROW = re.compile(r"^\| (?P<case>.+) \| (?P<numbers>[^|]+ \| [^|]+ \| [^|]+) \| `(?P<digest>[0-9a-f]{12})` \|$", re.M)


@functools.cache
def tests_of() -> dict[str, tuple[Path, ...]]:
    """Files with tests of each case."""
    files: dict[str, list[Path]] = {}
    for path in sorted(FOLDERS["tests"].rglob("test_*.py")):
        for case in dict.fromkeys(MARK.findall(path.read_text(encoding="utf-8"))):
            files.setdefault(case, []).append(path)
    return {case: tuple(paths) for case, paths in files.items()}


def files_under(paths: Iterable[Path]) -> set[Path]:
    """These files and all of the packages that they import, directly or not, also within functions, and configs."""
    reached, left = set[Path](), list(paths)
    while left:
        path = left.pop()
        if path not in reached:
            reached.add(path)
            left += imported(path)
    return reached | (
        set((ROOT / "configs").rglob("*.yaml")) if FOLDERS["vsa"] / "config_files.py" in reached else set()
    )


def digest_under(case: str) -> str:
    """Twelve digits of a digest of what stands under a case."""
    files = sorted(files_under(tests_of().get(case, ())))
    content = b"".join(b"%s\0%s\0" % (str(path.relative_to(ROOT)).encode(), path.read_bytes()) for path in files)
    return hashlib.sha256(content).hexdigest()[:12]


def with_age(markdown: str) -> str:
    """A page with `current` or `older` in place of the digests of its rows."""

    def row(match: re.Match[str]) -> str:
        case = match["case"]
        same = case in tests_of() and digest_under(case) == match["digest"]
        return f"| {case} | {match['numbers']} | {'current' if same else 'older'} |"

    return ROW.sub(row, markdown)


@functools.cache
def imported(path: Path) -> tuple[Path, ...]:
    """Files of the packages that a file imports."""
    return tuple(dict.fromkeys(file for name in _names(path) for file in _files_of(name)))


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # what is imported may be a module or a name in one
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files_of(name: str) -> Iterator[Path]:
    """The files of a module and of the packages that it is in; none for those of other projects."""
    folder, *parts = name.split(".")
    if folder not in FOLDERS:
        return
    place = FOLDERS[folder]
    yield from (path for path in (place / "__init__.py",) if path.is_file())
    for part in parts:
        place = place / part
        yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())
