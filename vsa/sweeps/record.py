"""`sweep.json`: what a sweep is and how far each of its points is, written at every change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.checkpoints.run_folder import MANIFEST, check_folder
from vsa.files import remove_folder, write_whole
from vsa.sweeps.job_queue import Job
from vsa.sweeps.points import Point

RECORD = "sweep.json"


class SweepRecord:
    """The points of a sweep in the order in which they were first run.

    Args:
        folder: of the sweep; need not exist.
        sweep: its name.
        command: that runs it, and goes on with it.
        settings: overrides that all points share.
    """

    def __init__(self, folder: Path, *, sweep: str, command: str, settings: Sequence[str]):
        self.folder = folder
        self._head = {"sweep": sweep, "command": command}
        self._settings = list(settings)
        self._points: dict[str, dict[str, Any]] = {point["name"]: point for point in _read(folder)}

    def finished(self, point: Point) -> bool:
        """Whether a point has all its steps, and its run is still there."""
        noted = self._points.get(point.name, {}).get("status")
        return noted == "finished" and (self.folder / point.name / MANIFEST).exists()

    def changed(self, point: Point) -> bool:
        """Whether a run lies in the point's folder that was started with other overrides."""
        before = self._points.get(point.name)
        if before is None:
            return bool(list_checkpoints(self.folder / point.name / "checkpoints"))
        if before["status"] == "refused":
            return False
        then, now = ([*before["settings"], *before["overrides"]], [*self._settings, *point.overrides])
        # the folder may have been moved
        return _values(then) != _values(now)

    def forget(self, point: Point) -> None:
        """Remove the run of a point, if it is one of ours.

        Raises:
            ValueError: something else lies there.
        """
        run = self.folder / point.name
        check_folder(run, overwrite=True)
        if run.exists():
            remove_folder(run)
        self.folder.joinpath(f"{point.name}.log").unlink(missing_ok=True)
        self._points.pop(point.name, None)

    def note(self, points: Mapping[Point, Job]) -> None:
        """Write down how far points are."""
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
    path = folder / RECORD
    if not path.exists():
        return []
    try:
        points = json.loads(path.read_text())["points"]
        wanted = {"name", "overrides", "settings", "status"}
        if not all(wanted <= set(point) for point in points):
            raise ValueError("a point lacks values")
        return points
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of a sweep: {error}") from None
