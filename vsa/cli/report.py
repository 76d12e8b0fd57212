"""Arguments of `vsa report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(runs: Annotated[list[Path], typer.Argument(help="run folders")]) -> None:
    """Draw the loss curve of one or more runs beside their metrics, and print where each ended.

    Several runs are drawn in one plot too, report.png in the folder that holds them all.

    \b
    vsa report outputs/quickstart/default
    vsa report outputs/quickstart/*
    """
    from vsa.evaluation.report import report_runs

    report_runs(runs)
