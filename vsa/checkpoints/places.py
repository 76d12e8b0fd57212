"""Relative paths in the settings of a run, which are used from other working directories too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vsa.files import read_json

MANIFEST = "run.json"
STARTED_IN = "started_in"
"""Key of the manifest: working directory of the last start, relative to the run folder, so that both may be moved."""

PATHS = ("root", "videos", "drop", "urls", "val_urls", "source", "tuned", "init_from", "teacher")


def placed(config: Mapping[str, Any], run: Path) -> Mapping[str, Any]:
    """A run's config whose relative paths lead to what they led to where the run was started."""
    try:
        base = (run / read_json(run / MANIFEST)[STARTED_IN]).resolve()
    except (OSError, ValueError, KeyError, TypeError):
        # of an earlier version, or a checkpoint alone
        return config
    return config if base == Path.cwd() else _below(config, base)


def _below(node: Any, base: Path, key: str = "") -> Any:
    if isinstance(node, Mapping):
        return {name: _below(value, base, str(name)) for name, value in node.items()}
    is_path = key in PATHS and isinstance(node, str) and (base / node).exists()
    return str(base / node) if is_path else node
