"""`sweep.json`: settings of a sweep and state of its points, written at every change."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.checkpoints.run_folder import MANIFEST, locked, refuse_inside_run, set_run_aside
from vsa.checkpoints.run_history import has_finished
from vsa.files import read_json, write_whole
from vsa.sweeps.job_queue import Job
from vsa.sweeps.points import Point

RECORD = "sweep.json"


class SweepRecord:
    """The points of a sweep in the order in which they were first run.

    Args:
        folder: folder of the sweep, which need not exist.
        sweep: name of the sweep.
        command: command that runs and resumes the sweep.
        settings: overrides that all points share.
    """

    def __init__(self, folder: Path, *, sweep: str, command: str, settings: Sequence[str]):
        refuse_inside_run(folder, f"the folder of the sweep, {folder},")
        self.folder = folder
        self._head = {"sweep": sweep, "command": command}
        self._settings = list(settings)
        self._points: dict[str, dict[str, Any]] = {point["name"]: point for point in _read(folder)}

    def finished(self, point: Point) -> bool:
        """Whether a point has completed all its steps and its run folder still exists."""
        noted = self._points.get(point.name, {}).get("status")
        run = self.folder / point.name
        return noted == "finished" and (run / MANIFEST).exists() and has_finished(run)

    def changed(self, point: Point) -> bool:
        """Whether the folder of a point contains a run with other overrides."""
        before = self._points.get(point.name)
        if before is None:
            return bool(list_checkpoints(self.folder / point.name / "checkpoints"))
        if before["status"] == "refused":
            return False
        then, now = ([*before["settings"], *before["overrides"]], [*self._settings, *point.overrides])
        # the folder of the sweep may have been moved
        return _values(then) != _values(now)

    def forget(self, point: Point) -> Path | None:
        """Set the run of a point aside, with its log; returns the new path of the run, None if there is none."""
        run, aside = self.folder / point.name, None
        with locked(run):
            if run.exists():
                aside = set_run_aside(run)
                with suppress(FileNotFoundError):
                    os.rename(f"{run}.log", f"{aside}.log")
        self._points.pop(point.name, None)
        return aside

    def note(self, points: Mapping[Point, Job]) -> None:
        """Record the state of points."""
        for point, job in points.items():
            before = self._points.get(point.name, {})
            self._points[point.name] = {
                "name": point.name,
                "overrides": list(point.overrides),
                "settings": self._settings,
                "status": job.status,
                "reason": job.reason,
                "control": point.control,
                "seconds": job.seconds if job.seconds is not None else before.get("seconds"),
                "device": job.device if job.device is not None else before.get("device"),
            }
        record = {**self._head, "points": list(self._points.values())}
        write_whole(self.folder / RECORD, json.dumps(record, indent=1) + "\n")


def _values(overrides: Sequence[str]) -> list[str]:
    return sorted(override for override in overrides if not override.startswith("output_dir="))


def _read(folder: Path) -> list[dict[str, Any]]:
    point = {"name": str, "overrides": [str], "settings": [str], "status": str}
    try:
        return read_json(folder / RECORD, kind={"points": [point]})["points"]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"not a record of a sweep: {error}") from None
