"""Places: a typed path becomes one value before any check, and a run writes to its own folder alone, which follows from
a few settings and which no other setting may name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
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


def place_of(value: object, what: str) -> Path:
    """The place that a typed path names, the one value that checks, locks, readers and writers take.

    Its folder is the real one: links in it are followed, `..` is gone. The last part may be a link, since its name says
    what a file is. It is relative only if it was typed so and lies in the working directory.

    Args:
        value: the typed path; it need not exist.
        what: the typed words, for messages.

    Raises:
        ValueError: no local path, one with `..` behind a missing folder, which would be another place once that folder
            is made, one through a link that leads nowhere, or a link that leads back to itself.
    """
    text = str(value)
    if not text.strip() or "\0" in text:
        raise ValueError(f"{what} is not a folder: leave it out, or give one")
    if text.split("/")[0] == "~" or re.match(r"[A-Za-z][\w+.-]*:/", text):
        raise ValueError(f"{what} is not a path of this machine: expected one without ~ and without a scheme")
    path = Path(text)
    if lost := [p for p in path.parents if not p.is_dir() and (p.is_symlink() or p / ".." in (path, *path.parents))]:
        raise ValueError(f"{what}: {lost[-1]} is no folder, expected a path without it")
    # only a link that leads back to itself is left in a real path
    if any(map(os.path.islink, (end := Path(os.path.realpath(path)), *end.parents))):
        raise ValueError(f"{what} is a link that leads back to itself: expected another path")
    real = path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name
    inside = not path.is_absolute() and real.is_relative_to(Path.cwd())
    return real.relative_to(Path.cwd()) if inside else real


def refuse_inputs(run_dir: Path, places: Iterable[Path]) -> None:
    """Raise ValueError if a place that a run reads lies in its folder, which is to be set aside; links are followed,
    those in a folder that is read too; one that leads back to itself leads to no file."""
    for place in places:
        for path in (place, *(place.iterdir() if place.is_dir() else ())):
            if (path == place or path.is_symlink()) and Path(os.path.realpath(path)).is_relative_to(run_dir.resolve()):
                raise ValueError(f"overwrite=true cannot set {run_dir} aside: the run is to read {path}")


def run_folder_of(settings: Mapping[str, Any]) -> Path:
    """The folder of a run, the only one that it writes to: OUTPUT_DIR/NAME/RUN, or RUN_DIR if that is set.

    Raises:
        ValueError: a setting that names no folder, with its value.
    """
    if without_secrets(text := str(settings["run_dir"]), named=False) != text:
        raise ValueError("run_dir contains a secret, which the name of a folder would expose: choose another one")
    check_name("name", str(settings["name"]))
    check_name("run", str(settings["run"]))
    _, folder = (place_of(settings[key], f"{key}={settings[key]}") for key in ("output_dir", "run_dir"))
    check_name("run_dir", folder.resolve().name or "run_dir")
    return folder


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
    inner = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else None
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
