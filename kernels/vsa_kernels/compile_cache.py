"""The caches of `torch.compile` on disk, which know the operators of a graph by name alone.

A graph that was compiled with an earlier version of this package would call the backward that its operators had then.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch.compiler.config as config

VARIABLE = "TORCH_COMPILE_CACHE_KEY_TAG"
"""Torch's environment variable for the tag, which the processes that compile kernels for this one read."""


def tag_caches(package: Path) -> None:
    """Make entries of the caches depend on the source files of `package`.

    From torch 2.12 on this is so in the thread that imports the package, and in the processes that it starts.
    """
    tag = f"{package.name}-{source_hash(package)}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag = " ".join(filter(None, (config.cache_key_tag, tag)))
    os.environ[VARIABLE] = config.cache_key_tag


def source_hash(package: Path) -> str:
    """Hash of the Python files of a package, of their names and contents; of compiled ones without sources."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")) or sorted(package.rglob("*.pyc")):
        total.update(f"{path.relative_to(package).as_posix()}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]
