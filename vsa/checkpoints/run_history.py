"""History of a run in its manifest: time, first step, environment and end of every start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vsa.checkpoints.manifest import MANIFEST, checked_out_commit, local_time, read_manifest
from vsa.files import write_whole

STARTS = "starts"
_TOLD = ("commit", "cpu", "gpu", "threads", "processes")


def note_start(folder: Path, *, step: int, environment: Mapping[str, Any]) -> list[str]:
    """Add an entry for a start; returns what differs from the environment and the code of the start before.

    Args:
        folder: the run folder, with its manifest.
        step: optimizer step at which it starts.
        environment: device, versions and number of processes.
    """
    start = {"began": local_time(), "step": step, "commit": checked_out_commit(), "environment": {**environment}}
    manifest = read_manifest(folder)
    _write(folder, {**manifest, STARTS: [*manifest.get(STARTS, []), start]})
    facts = []
    for one in (*manifest.get(STARTS, [])[-1:], start):
        # the hardware, the threads and the versions; a level of recomputation changes no number
        kept = {"commit": one.get("commit"), **one.get("environment", {})}
        facts.append({**{name: kept.get(name) for name in _TOLD}, **kept.get("versions", {})})
    before, now = facts[0], facts[-1]
    return [f"{name} {before.get(name)} -> {value}" for name, value in now.items() if value != before.get(name)]


def note_end(folder: Path, *, how: str, reason: str, step: int) -> None:
    """Record the end of the last start; a killed process leaves no record.

    Args:
        folder: the run folder.
        how: finished, stopped or failed.
        reason: signal or error, "" for none.
        step: optimizer step reached.
    """
    manifest = read_manifest(folder)
    *before, last = manifest[STARTS]
    end = {"ended": local_time(), "how": how, "last_step": step, **({"reason": reason} if reason else {})}
    _write(folder, {**manifest, STARTS: [*before, {**last, **end}]})


def has_finished(folder: Path) -> bool:
    """Whether the last start of a run went through its last step, validation and clips; True without a record."""
    try:
        starts = read_manifest(folder).get(STARTS)
    except (FileNotFoundError, ValueError) as error:
        return isinstance(error, FileNotFoundError)
    return not starts or starts[-1].get("how") == "finished"


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
