"""`metrics.csv`: one row per logged step, append-only; a resume cuts the rows past its step."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from vsa.files import atomic_file, writing


class MetricsCSV(Logger):
    """Logger that writes `root_dir/metrics.csv`.

    Metrics of one step share a row. A metric seen for the first time adds a column (the file is rewritten once). A full
    disk stops nothing: it is told once, and at the end how many rows are missing.

    Args:
        root_dir: the run folder.
    """

    part = "metrics"

    def __init__(self, root_dir: str):
        super().__init__()
        self.path = Path(root_dir) / "metrics.csv"
        self._rows: list[dict[str, str]] = []
        self._columns = ["step"]
        self._open: dict[str, str] | None = None
        self._start = 0
        # rows that are in the file, whether it lacks columns or late values, whether a full disk was told
        self._written, self._stale, self._told = 0, False, False

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the rows are in the file."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after `state["step"]`."""
        self._start = state["step"]

    def open(self) -> None:
        """Begin the file: the rows up to the step it goes on from stay, others go."""
        self._rows, self._columns, self._open = [], ["step"], None
        if self._start > 0 and self.path.exists():
            with open(self.path, newline="") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or ["step"])
                # a kill in the middle of a line leaves a row that lacks columns
                whole = [row for row in reader if None not in row.values()]
            self._rows = [row for row in whole if int(row["step"]) <= self._start]
        self._rewrite()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else step
        if self._open is not None and self._open["step"] != str(step):
            self.save()
        row = self._open or {"step": str(step)}
        row.update({k: f"{float(v):.9g}" for k, v in metrics.items() if k != "epoch"})
        self._open = row

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved config stands beside this file already."""

    @rank_zero_only
    def save(self) -> None:
        """Write what is not in the file yet; what finds no room is tried again with the next row."""
        if self._open is not None:
            self._add(self._open)
            self._open = None
        if not self._stale and self._written == len(self._rows):
            return
        try:
            if self._stale:
                self._rewrite()
            else:
                self._append(self._rows[self._written :])
        except OSError as error:
            if not self._told:
                rank_zero_info(f"warning: {error}: training goes on, its metrics wait for room")
            self._told = True

    def _add(self, row: dict[str, str]) -> None:
        new = [name for name in row if name not in self._columns]
        self._columns += new
        # a late metric of a row already there
        late = bool(self._rows) and self._rows[-1]["step"] == row["step"]
        if late:
            self._rows[-1].update(row)
        else:
            self._rows.append(row)
        rewrite = late and self._written == len(self._rows)
        self._written -= rewrite
        self._stale = self._stale or bool(new) or rewrite

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
        if lost := len(self._rows) - self._written:
            rank_zero_info(f"warning: {self.path} lacks the last {lost} rows, for which there was no room")

    def _append(self, rows: list[dict[str, str]]) -> None:
        size = self.path.stat().st_size
        try:
            with writing(self.path), open(self.path, "a", newline="") as file:
                csv.DictWriter(file, self._columns, restval="").writerows(rows)
        except OSError:
            # half a row
            os.truncate(self.path, size)
            raise
        self._written = len(self._rows)

    @rank_zero_only
    def _rewrite(self) -> None:
        with atomic_file(self.path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)
        self._written, self._stale = len(self._rows), False
