"""Runs beside each other: a table of where each ended, the loss curve of each, and all curves in one plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from vsa.evaluation.figures import health_curves, loss_curve, loss_curves, read_metric


def _last_value(metrics: Path, column: str) -> float | None:
    """Last value of a column of `metrics.csv`, None where the run never logged it."""
    try:
        values = read_metric(metrics, column)[1]
    except ValueError:
        return None
    return float(values[-1]) if len(values) else None


def _folder_and_names(runs: Sequence[Path]) -> tuple[Path, list[str]]:
    """The folder that holds all runs, and what is left of their paths in it."""
    paths = [run.resolve() for run in runs]
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    return folder, [str(path.relative_to(folder)) for path in paths]


def _is_distillation(metrics: Path) -> bool:
    """Whether a run logged a critic's loss and no loss of its own."""
    return _last_value(metrics, "train/loss") is None and _last_value(metrics, "fake_score/loss") is not None


def report_runs(runs: Sequence[Path]) -> None:
    """Draw `loss.png` in every run folder, several runs in `report.png` above them too, and print a table.

    Raises:
        ValueError: a folder without metrics.
    """
    for run in runs:
        if not (run / "metrics.csv").is_file():
            raise ValueError(f"{run} is not a run folder: metrics.csv is missing")
    folder, names = _folder_and_names(runs)
    table = Table(title=f"runs in {folder}", box=SIMPLE, pad_edge=False)
    # a name is never cut: runs are told apart by its end as well as by its beginning
    table.add_column("run", overflow="fold")
    for heading in ("steps", "train loss", "val loss", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    together: dict[str, Path] = {}
    for run, name in zip(runs, names, strict=True):
        metrics = run / "metrics.csv"
        # of a distillation: the critic's loss, and the gap between critic and teacher
        distilled = _is_distillation(metrics)
        loss, val = ("fake_score/loss", "val/gap") if distilled else ("train/loss", "val/loss")
        # nothing yet of a run that was stopped before its first logged row
        steps = read_metric(metrics, loss)[0] if _last_value(metrics, loss) is not None else []
        (health_curves if distilled else loss_curve)(metrics, run / "loss.png", title=str(run))
        shown = [_last_value(metrics, column) for column in (loss, val, "throughput/tokens_per_second")]
        cells = ["-" if value is None else f"{value:.4g}" for value in shown]
        table.add_row(name, str(steps[-1]) if len(steps) else "-", *cells)
        if not distilled:
            together[name] = metrics
    console = Console()
    console.print(table)
    console.print("curves: loss.png in the folder of each run", soft_wrap=True)
    if len(together) > 1:
        path = loss_curves(together, folder / "report.png", title=str(folder))
        console.print(f"all in one plot: {path}", soft_wrap=True)
