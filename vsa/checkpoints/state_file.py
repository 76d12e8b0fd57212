"""`state.json` of a checkpoint: its values, followed by the SHA-256 of all bytes before that last entry."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vsa.data.index_values import channel_statistics
from vsa.files import check_kind, parse_json, read_bytes
from vsa.settings import Count, NonNegative

SCHEMA, SHARDED_SCHEMA = 4, 5
"""Written schema, with one or several files per group of tensors. Schemas 2 and 3 can be read as well, where the name
of a score is another one, see `_RENAMED`."""

_READABLE = (2, 3, 4, 5)
_RENAMED = {("score", "subblock_lse"): "subblock_softmax"}
"""Values of settings by key and value up to schema 3; today `subblock_lse` is another score."""
_FILE = "state.json"
_SEALED = re.compile(rb'(.*),\n "digest": "([0-9a-f]{64})"\n}', re.DOTALL)
_FOLDER = re.compile(r"step-(\d{8,})")
_TENSORS = re.compile(r"(\w+)(?:-\d{5}-of-(\d{5}))?\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KIND = {
    "step": Count,
    "files": {str: str},
    "config?": {
        **dict.fromkeys(("task?", "model?", "attention?", "sparsity?", "data?", "optim?", "trainer?"), dict),
        "callbacks?": {str: dict | None},
    },
    **dict.fromkeys(("seed?", "skipped_steps?", "skipped_in_row?", "flops_measured?"), Count),
    "flops_total?": NonNegative,
    "without_gradient?": {str: list},
    "allowed_changes?": list,
}


def file_names(group: str, count: int) -> list[str]:
    """Names of the files that `count` ranks write for a group of tensors, by rank."""
    if count == 1:
        return [f"{group}.safetensors"]
    return [f"{group}-{rank + 1:05d}-of-{count:05d}.safetensors" for rank in range(count)]


def files_by_group(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups of tensors with the names of their files, in the order of the ranks."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(_TENSORS.fullmatch(name)[1], []).append(name)  # type: ignore[index]
    return groups


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `folder/state.json`, which must not be modified afterwards."""
    matches = [_TENSORS.fullmatch(name) for name in state.get("files", ())]
    schema = SHARDED_SCHEMA if any(match and match[2] for match in matches) else SCHEMA
    body = json.dumps({**state, "schema": schema}, indent=1).removesuffix("\n}")
    digest = hashlib.sha256(body.encode()).hexdigest()
    (folder / _FILE).write_text(f'{body},\n "digest": "{digest}"\n}}')


def read_state(folder: Path) -> dict[str, Any]:
    """The values of `folder/state.json`, checked against its digest and the name of the folder.

    Raises:
        ValueError: the file is missing, damaged, or has another schema.
    """
    try:
        content = read_bytes(folder / _FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is not a checkpoint: it has no {_FILE}") from None
    except ValueError as error:
        raise ValueError(f"checkpoint {folder} is damaged: {error}") from None
    sealed = _SEALED.fullmatch(content)
    if sealed and hashlib.sha256(sealed[1]).hexdigest() != sealed[2].decode():
        raise ValueError(f"checkpoint {folder} is damaged: {_FILE} does not match its digest")
    state = parse_json(content, f"checkpoint {folder} is damaged: {_FILE}", object)
    schema = state.get("schema") if isinstance(state, dict) else type(state).__name__
    if schema not in _READABLE or isinstance(schema, bool):
        readable = ", ".join(map(str, _READABLE))
        raise ValueError(f"checkpoint {folder} has schema {one_line(schema)}, this version reads {readable}")
    if not sealed:
        raise ValueError(f"checkpoint {folder} is damaged: {_FILE} has lost its digest")
    _check_values(folder, state)
    if "latent_mean" in state or "latent_std" in state:
        channel_statistics(state, f"checkpoint {folder} is damaged: {_FILE} has ")
    state.pop("digest", None)
    return state if schema > 3 or "config" not in state else {**state, "config": _renamed(state["config"])}


def _renamed(node: Any) -> Any:
    """A config of schema 3 or before with today's names."""
    if isinstance(node, list):
        return [_renamed(value) for value in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _RENAMED.get((key, value), value) if isinstance(value, str) else _renamed(value)
        for key, value in node.items()
    }


def one_line(value: Any) -> str:
    """The beginning of a value or an error, as one line."""
    text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def _check_values(folder: Path, state: Mapping[str, Any]) -> None:
    damaged = f"checkpoint {folder} is damaged: {_FILE}"
    check_kind(state, _KIND, damaged)
    # a copied checkpoint may have another folder name
    match = _FOLDER.fullmatch(folder.name)
    named = int(match[1]) if match else state["step"]
    skipped = state.get("skipped_steps", state["step"])
    for name, fits, expected in (
        ("step", state["step"] == named, f"{named} as in the folder's name"),
        ("skipped_steps", skipped <= state["step"], f"at most the {state['step']} steps"),
        ("skipped_in_row", state.get("skipped_in_row", 0) <= skipped, f"at most the {skipped} skipped steps"),
        ("files", _are_files(state["files"]), "SHA-256 by file name"),
    ):
        if not fits:
            raise ValueError(f"{damaged} has {name}={one_line(state[name])}, expected {expected}")


def _are_files(files: Mapping[str, str]) -> bool:
    matched = all(_TENSORS.fullmatch(name) and _DIGEST.fullmatch(digest) for name, digest in files.items())
    # for a group in several files, all files are listed
    return matched and all(names == file_names(group, len(names)) for group, names in files_by_group(files).items())
