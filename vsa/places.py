"""Where a run writes: its own folder, which follows from a few settings and which no other setting may name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vsa.secrets import without_secrets
from vsa.streams import visible

OWN_FOLDER = ("run_dir", "root_dir", "save_dir", "dirpath", "default_root_dir")
"""Arguments of callbacks, loggers, profilers and the trainer that `vsa.config.in_run_folder` sets to the run folder."""

NAME_BYTES = 200
"""Most bytes of the name of a run folder: file systems take 255, and names beside it have parts before and after it."""

PLACE = re.compile(r"(?!sub_)(\w+_)?(dir|dirpath|directory|folder|path|root|file|uri)")
"""Arguments that name a place to write to: none of them may name another one than the run folder, or a web address."""


def run_folder_of(settings: Mapping[str, Any]) -> Path:
    """The folder of a run, the only one that it writes to: OUTPUT_DIR/NAME/RUN, or RUN_DIR if that is set.

    Raises:
        ValueError: a setting that names no folder, with its value.
    """
    for key in ("output_dir", "run_dir"):
        value = str(settings[key])
        if not value.strip() or "\0" in value:
            raise ValueError(f"{key}={value} is not a folder: leave it out, or give one")
    if without_secrets(folder := str(settings["run_dir"]), named=False) != folder:
        raise ValueError("run_dir contains a secret, which the name of a folder would expose: choose another one")
    check_name("name", str(settings["name"]))
    check_name("run", str(settings["run"]))
    check_name("run_dir", Path(folder).resolve().name or "run_dir")
    return Path(folder)


def misplaced(key: str, node: Any, run_dir: str) -> Iterator[tuple[str, str]]:
    """Keys and messages of the settings with which an object would write anywhere but in the run folder.

    Args:
        key: key of the object.
        node: its settings.
        run_dir: the run folder.
    """
    # refused as a whole
    if not isinstance(node, Mapping):
        return
    # names that a class of another project takes may be parts of a path
    foreign = not str(node.get("_target_")).startswith("vsa.")
    for path, value in leaves(node, (key,)):
        inner, text = ".".join(path), value if isinstance(value, str) else ""
        if PLACE.fullmatch(path[-1]) and value not in (None, run_dir) and not text.startswith(("http://", "https://")):
            yield inner, f"{inner}={value}: everything is written to the run folder, {run_dir}: leave it out"
        elif foreign and (text.startswith(("/", "~")) or ".." in text.split("/")):
            yield inner, f"{inner}={value} leads out of the run folder: expected a name without .."


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values below a node of plain containers, with their keys."""
    inner = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if inner is None:
        yield path, node
        return
    for key, value in inner:
        yield from leaves(value, (*path, str(key)))


def check_name(key: str, value: str) -> None:
    """Raise ValueError with key and value if a setting is not the name of a folder."""
    # a leading dot also covers "." and "..", and the hidden names used in this module
    if not value.strip() or value == "None" or value.startswith(".") or "/" in value or visible(value) != value:
        raise ValueError(f"{key}={value} is not a name: expected one folder name without / and without a leading dot")
    if len(value.encode()) > NAME_BYTES:
        raise ValueError(f"{key}={value} is too long for a folder and what lies beside it: at most {NAME_BYTES} bytes")
