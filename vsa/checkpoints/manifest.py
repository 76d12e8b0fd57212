"""The file that marks a folder as a run of this project, with the commits of the code."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vsa.checkpoints.places import MANIFEST, STARTED_IN
from vsa.files import read_json, write_whole

PROJECT = "vsa-train"


def has_manifest(folder: Path) -> bool:
    """Whether a folder is marked as a run of this project."""
    try:
        return read_manifest(folder).get("written_by") == PROJECT
    except (OSError, ValueError):
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run; ValueError if it is damaged, FileNotFoundError without one."""
    start = {
        **dict.fromkeys(("began?", "ended?", "how?", "reason?"), str),
        "environment?": {"versions?": dict[str, Any]},
    }
    kind = {"written_by?": str, "commits?": list[str | None], "starts?": [{**start, "step?": int, "last_step?": int}]}
    return read_json(folder / MANIFEST, kind=kind)


def write_manifest(folder: Path) -> None:
    """Mark a folder as a run of this project, with the version of the code."""
    try:
        installed = version(PROJECT)
    except PackageNotFoundError:
        installed = "source tree"
    manifest = {
        "written_by": PROJECT,
        "version": installed,
        "commits": [checked_out_commit()],
        "run_id": secrets.token_hex(8),
        "created": local_time(),
        STARTED_IN: os.path.relpath(Path.cwd(), folder.resolve()),
    }
    _write_json(folder / MANIFEST, manifest)


def note_commit(folder: Path) -> None:
    """Record commit and working directory of this process in a resumed run if they differ from the last ones."""
    manifest = read_manifest(folder)
    commits = manifest.get("commits", [])
    news: dict[str, Any] = {STARTED_IN: os.path.relpath(Path.cwd(), folder.resolve())}
    if commits[-1:] != [checked_out_commit()]:
        news["commits"] = [*commits, checked_out_commit()]
    if not news.items() <= manifest.items():
        _write_json(folder / MANIFEST, {**manifest, **news})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=1) + "\n")


@cache
def checked_out_commit() -> str | None:
    """Short hash of the git commit of this code, with + if files were changed since; None: it is not a checkout.

    The value is cached, since the imported code does not change either.
    """
    root = Path(__file__).parents[2]
    # not the checkout of another project that contains the environment
    if not (root / ".git").exists():
        return None
    # without variables of a git hook that runs this process, and without locks that another git could meet
    mine = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=10, env={**mine, "GIT_OPTIONAL_LOCKS": "0"}, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def local_time() -> str:
    """Date and time with the offset of the time zone."""
    return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
