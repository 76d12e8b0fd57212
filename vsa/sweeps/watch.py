"""Display of the runs of a sweep, while they train and at the end."""

from __future__ import annotations

import csv
import io
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vsa.files import open_regular, read_text
from vsa.streams import visible
from vsa.sweeps.job_queue import Job

_TAIL = 1 << 15
_REDRAW = 1.0
_REASON = 80
_STYLES = {"running": "bold", "finished": "green", "failed": "red", "refused": "yellow", "stopped": "yellow"}
SHOWN = ("step", "train/loss", "val/loss", "throughput/step_seconds")


class RunView:
    """The latest metrics of a run, read from the end of its file.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path):
        self._run = run
        self._read_at = -1
        self._max_steps: int | None = None
        self.values: dict[str, float] = {}

    def read(self) -> None:
        """Read what was written since the last call."""
        path = self._run / "metrics.csv"
        try:
            changed = path.stat().st_mtime_ns
            if changed == self._read_at:
                return
            with open_regular(path) as file:
                head = file.readline(_TAIL)
                if file.seek(max(len(head), file.seek(0, io.SEEK_END) - _TAIL)) > len(head):
                    # the first line is incomplete
                    file.readline(_TAIL)
                rows = [line.decode(errors="replace") for line in file if line.endswith(b"\n")]
        except (OSError, ValueError):
            return
        self._read_at = changed
        for row in csv.DictReader([head.decode(errors="replace"), *rows]):
            # a damaged row is left out here, a report says it
            with suppress(ValueError):
                self.values |= {name: float(row[name]) for name in SHOWN if row.get(name)}

    @property
    def max_steps(self) -> int | None:
        """Number of steps of the run, once it has written its config."""
        if self._max_steps is None:
            with suppress(OSError, ValueError):
                match = re.search(r"^  max_steps: (\d+)$", read_text(self._run / "config.yaml"), re.MULTILINE)
                self._max_steps = int(match[1]) if match else None
        return self._max_steps

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds, estimated from the time of the last steps."""
        each = self.values.get("throughput/step_seconds")
        if each is None or self.max_steps is None:
            return None
        left = max(self.max_steps - self.values.get("step", math.nan), 0) * each
        return left if math.isfinite(left) else None


class SweepDisplay:
    """A table of all runs that is redrawn on a terminal; for other outputs, a line at every change.

    Args:
        folder: folder of the sweep.
        console: output; None: standard output.
    """

    def __init__(self, folder: Path, console: Console | None = None):
        self._folder = folder
        self._console = console or Console(highlight=False)
        self._jobs: list[Job] = []
        self._views: dict[str, RunView] = {}
        self._drawn = -math.inf
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis")
        self._failed = False

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Display something; an error ends no sweep, it is said once."""
        try:
            yield
        except Exception as error:
            if not self._failed:
                warnings.warn(f"the display of the sweep is incomplete: {error!r}", stacklevel=3)
            self._failed = True

    def __enter__(self) -> SweepDisplay:
        with self._shown():
            if self._console.is_terminal:
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._shown():
            if self._console.is_terminal:
                self._draw()
        with self._shown():
            self._live.stop()

    def add(self, jobs: Sequence[Job]) -> None:
        """Add jobs to the table."""
        self._jobs += jobs
        self._views |= {job.name: RunView(self._folder / job.name) for job in jobs}

    def changed(self, job: Job) -> None:
        """Report a changed status of a run."""
        if self._console.is_terminal:
            self._drawn = -math.inf
            return
        with self._shown():
            self._say_changed(job)

    def _say_changed(self, job: Job) -> None:
        view = self._views[job.name]
        view.read()
        parts = [f"{job.status} {job.name}"]
        if job.status == "running":
            parts.append(f"on {job.device}")
        if job.status in ("finished", "stopped") and "step" in view.values:
            loss = _number(view.values, "val/loss") or "missing"
            parts.append(f"at step {view.values['step']:.0f}, validation loss {loss}")
        if job.reason:
            parts.append(f"({job.reason})")
        ended_count = sum(one.status in ("finished", "failed", "refused") for one in self._jobs)
        self.say(f"[{ended_count}/{len(self._jobs)}] {' '.join(parts)}")

    def say(self, line: str) -> None:
        """Print a separate line."""
        with self._shown():
            self._console.print(visible(line), markup=False, soft_wrap=True)

    def tick(self) -> None:
        """Redraw if it is due."""
        now = time.monotonic()
        if self._console.is_terminal and now - self._drawn >= _REDRAW:
            self._drawn = now
            with self._shown():
                self._draw()

    def _draw(self) -> None:
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("run", "status", "step", "loss", "val loss", "s/step", "left"):
            table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=True)
        # this column shrinks on a narrow terminal
        table.add_column("")
        # with many runs, those that are training stay visible
        order = {"running": 0, "waiting": 2}
        for job in sorted(self._jobs, key=lambda job: order.get(job.status, 1)):
            view = self._views[job.name]
            if job.status != "waiting":
                view.read()
            of = f"/{view.max_steps}" if view.max_steps is not None else ""
            step = f"{view.values['step']:.0f}{of}" if "step" in view.values else ""
            remaining_seconds = view.seconds_left if job.status == "running" else None
            table.add_row(
                job.name,
                job.status,
                step,
                _number(view.values, "train/loss"),
                _number(view.values, "val/loss"),
                _number(view.values, "throughput/step_seconds"),
                "" if remaining_seconds is None else _clock(remaining_seconds),
                Text(visible(job.reason or "")[:_REASON] if job.status != "running" else str(job.device)),
                style=_STYLES.get(job.status),
            )
        return table


def _number(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:.4g}" if name in values else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
