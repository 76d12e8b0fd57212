"""`metrics.csv`: one row per logged step, append-only; a resumed run removes rows after the step of its checkpoint."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from vsa.files import CSV_LIMIT, atomic_file, flush_to_disk, read_bytes, read_csv, set_damaged_aside, writing
from vsa.training.validation_csv import COLUMNS


class MetricsCSV(Logger):
    """Logger that writes `root_dir/metrics.csv`.

    Metrics of one step share a row. A new metric adds a column, for which the file is rewritten once. A full disk stops
    nothing: one warning is printed, and at the end the number of missing rows.

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
        # number of rows in the file, whether it lacks columns or late values, whether a full disk was reported
        self._written, self._stale, self._told = 0, False, False

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        """Empty, since the rows are in the file."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state["step"]`."""
        self._start = state["step"]

    def open(self) -> None:
        """Start the file: keep the rows up to the step that the run continues from."""
        self._rows, self._columns, self._open = [], ["step"], None
        if self._start > 0:
            with damage_set_aside(self.path), suppress(FileNotFoundError):
                columns, rows = read_csv(self.path, self._columns, growing=True)
                for row in rows:
                    _refuse_text(self.path, row)
                if not read_bytes(self.path, limit=CSV_LIMIT).endswith(b"\n"):
                    rank_zero_info(f"warning: {self.path}: a kill or power cut has damaged its end, which was cut off")
                self._rows, self._columns = [row for row in rows if int(row["step"]) <= self._start], columns
            validation = self.path.with_name("validation.csv")
            with damage_set_aside(validation), suppress(FileNotFoundError):
                for row in read_csv(validation, COLUMNS)[1]:
                    _refuse_text(validation, {name: row[name] for name in ("step", "noise_level", "loss")})
        self._rewrite()

    def has_validation(self, step: int) -> bool:
        """Whether the row of a step has metrics of a validation."""
        rows = (row for row in self._rows if row["step"] == str(step))
        return any(value for row in rows for name, value in row.items() if name.startswith("val/"))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else step
        if self._open is not None and self._open["step"] != str(step):
            self._write()
        row = self._open or {"step": str(step)}
        row.update({k: f"{float(v):.9g}" for k, v in metrics.items() if k != "epoch"})
        self._open = row

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the resolved config is next to this file already."""

    @rank_zero_only
    def save(self) -> None:
        """Write all rows to the disk, so that a power cut leaves those of the checkpoint that follows."""
        self._write(flush=True)

    def _write(self, *, flush: bool = False) -> None:
        """Write the rows that are not in the file yet; rows without disk space are retried with the next one."""
        if self._open is not None:
            self._add(self._open)
            self._open = None
        try:
            if self._stale:
                self._rewrite()
            elif self._written < len(self._rows):
                self._append(self._rows[self._written :])
            if flush and self._rows:
                flush_to_disk(self.path)
        except OSError as error:
            if not self._told:
                rank_zero_info(f"warning: {error}: training continues, metrics are written once there is space")
            self._told = True

    def _add(self, row: dict[str, str]) -> None:
        new = [name for name in row if name not in self._columns]
        self._columns += new
        # a further metric for the row of the last step
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
            # remove the partial row
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


def _refuse_text(path: Path, row: Mapping[str, str]) -> None:
    """Raise ValueError for a cell that is neither empty nor a number, and for a step that is no integer."""
    for name, cell in row.items():
        try:
            int(cell) if name == "step" else float(cell or 0)
        except ValueError as error:
            raise ValueError(f"{path}, column {name}: {error}") from None


@contextmanager
def damage_set_aside(path: Path) -> Iterator[None]:
    """Rename a file that the block finds damaged, with one line about it, and go on."""
    try:
        yield
    except ValueError as error:
        rank_zero_info(f"warning: {error}: it was moved to {set_damaged_aside(path).name}, and a new one is written")
