"""Arguments of `vsa report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vsa.cli.options import option


def report(
    folders: Annotated[list[Path], typer.Argument(help="runs, sweeps, or folders that contain them at any depth")],
    out: Annotated[Path | None, option("output folder (the one that contains all runs)")] = None,
    clips_mb: Annotated[float, option("maximum size of the sampled clips in the page, MB", real=(0, 1e4))] = 20,
) -> None:
    """Compare runs: print a table, and write a self-contained page with figures, tables and clips.

    Writes report.html (one file, works offline), report/ with every figure as PNG and CSV, and
    loss.png in every run.

    \b
    vsa report outputs/quickstart
    vsa report outputs/quickstart/default outputs/other
    """
    from vsa.reports.report import report

    report(folders, out=out, clips_mb=clips_mb)
