"""Arguments of `vsa report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vsa.cli.options import option


def report(
    folders: Annotated[list[Path], typer.Argument(help="runs, sweeps, or folders that hold them at any depth")],
    out: Annotated[Path | None, option("folder to write to (the one that holds all runs)")] = None,
    clips_mb: Annotated[float, option("most megabytes of sampled clips in the page", real=(0, 1e4))] = 20,
) -> None:
    """Compare runs: a table here, and a page with figures, tables and clips that one can send to others.

    Writes report.html (one file, nothing is loaded from a network), report/ with every figure as PNG and CSV, and
    loss.png in every run.

    \b
    vsa report outputs/quickstart
    vsa report outputs/quickstart/default outputs/other
    """
    from vsa.sweeps.reports.report import report

    report(folders, out=out, clips_mb=clips_mb)
