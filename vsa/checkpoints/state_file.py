"""`state.json` of a checkpoint: its values, followed by the SHA-256 of all bytes before that last entry."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vsa.data.index_values import channel_statistics
from vsa.files import parse_json, read_bytes

SCHEMA, SHARDED_SCHEMA = 2, 3
"""Written schema, with one or several files per group of tensors. Schema 1 can be read as well; it has no digest of
`state.json` and does not list the parameters that never had a gradient."""

_READABLE = (1, 2, 3)
_FILE = "state.json"
_SEALED = re.compile(rb'(.*),\n "digest": "([0-9a-f]{64})"\n}', re.DOTALL)
_FOLDER = re.compile(r"step-(\d{8,})")
_TENSORS = re.compile(r"(\w+)(?:-\d{5}-of-(\d{5}))?\.safetensors")
_GROUPS = ("task", "model", "attention", "sparsity", "data", "optim", "trainer")
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
    if schema > 1 and not sealed:
        raise ValueError(f"checkpoint {folder} is damaged: {_FILE} has lost its digest")
    for name, (fits, expected) in _expected(folder, state).items():
        if name not in state:
            raise ValueError(f"checkpoint {folder} is damaged: {_FILE} lacks {name}")
        if not fits(state[name]):
            value = one_line(state[name])
            raise ValueError(f"checkpoint {folder} is damaged: {_FILE} has {name}={value}, expected {expected}")
    if "latent_mean" in state or "latent_std" in state:
        channel_statistics(state, f"checkpoint {folder} is damaged: {_FILE} has ")
    state.pop("digest", None)
    return state


def one_line(value: Any) -> str:
    """The beginning of a value or an error, as one line."""
    text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def _expected(folder: Path, state: Mapping[str, Any]) -> dict[str, tuple[Callable[[Any], bool], str]]:
    """Checks of the values, with a description of the expected value, by name."""
    match = _FOLDER.fullmatch(folder.name)
    steps = state.get("step") if _is_count(state.get("step")) else math.inf
    skipped = state.get("skipped_steps") if _is_count(state.get("skipped_steps")) else math.inf
    always: dict[str, tuple[Callable[[Any], bool], str]] = {
        "step": (
            # a copied checkpoint may have another folder name
            lambda step: _is_count(step) and (match is None or int(match[1]) == step),
            f"{int(match[1])} as in the folder's name" if match else "a number of steps",
        ),
        "files": (_are_files, "SHA-256 by file name"),
    }
    others: dict[str, tuple[Callable[[Any], bool], str]] = {
        "config": (_are_settings, "settings"),
        "seed": (_is_count, "an integer"),
        "skipped_steps": (lambda count: _is_count(count) and count <= steps, f"at most the {steps} steps"),
        "skipped_in_row": (lambda count: _is_count(count) and count <= skipped, f"at most the {skipped} skipped steps"),
        "flops_total": (lambda flops: _is_number(flops) and flops >= 0, "a number of at least 0"),
        "without_gradient": (_are_names, "names of parameters by group"),
        "allowed_changes": (lambda changes: isinstance(changes, list), "a list"),
    }
    return always | {name: others[name] for name in others if name in state}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_settings(config: Any) -> bool:
    return isinstance(config, dict) and all(isinstance(config.get(group, {}), dict) for group in _GROUPS)


def _are_names(groups: Any) -> bool:
    return isinstance(groups, dict) and all(isinstance(names, list) for names in groups.values())


def _are_files(files: Any) -> bool:
    return (
        isinstance(files, dict)
        and all(
            _TENSORS.fullmatch(name) and isinstance(digest, str) and _DIGEST.fullmatch(digest)
            for name, digest in files.items()
        )
        # for a group in several files, all files are listed
        and all(names == file_names(group, len(names)) for group, names in files_by_group(files).items())
    )
