"""The caches of `torch.compile` on disk, which know the operators of a graph by name alone.

A graph that was compiled with an earlier version of this package would call the backward that its operators had then.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch.compiler.config as config


def tag_caches(package: Path) -> None:
    """Make entries of the caches depend on the source files of `package`; for this process and this thread."""
    tag = f"{package.name}-{source_hash(package)}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag = " ".join(filter(None, (config.cache_key_tag, tag)))


def source_hash(package: Path) -> str:
    """Hash of the Python files of a package, of their names and contents."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(f"{path.relative_to(package).as_posix()}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]
