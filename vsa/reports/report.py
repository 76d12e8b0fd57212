"""`vsa report`: a comparison of runs, or the page of one run, as terminal table, page, PNGs and CSVs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Printed

from vsa.errors import refuse_unwritable
from vsa.evaluation.figures import health_curves, loss_curve
from vsa.files import own_folder
from vsa.pages.page import Page
from vsa.reports import tables
from vsa.reports.clips import clip_table
from vsa.reports.figures import charts
from vsa.reports.header import differences, facts, not_shown
from vsa.reports.run_page import MEGABYTE, PAGE, write_run_page
from vsa.reports.runs import Missing, Run, find_runs, is_run, read_run
from vsa.reports.variants import Variant, compared, group, reference
from vsa.streams import visible

DATA = "report"


def report(folders: Sequence[Path], *, out: Path | None = None, clips_mb: float = 20) -> Path:
    """Print a table of runs, draw the `loss.png` of each run, and write a page.

    For one run folder, it is the page of that run; otherwise it compares all runs below, with PNGs and CSVs beside it.

    Args:
        folders: runs, sweeps, or folders that contain them.
        out: folder to write to; None: the folder that contains all runs.
        clips_mb: maximum size of the sampled clips in the page, in megabytes.

    Returns:
        Path of the page.
    """
    single = len(folders) == 1 and is_run(folders[0])
    root, runs, missing = (folders[0].resolve(), [read_run(folders[0])], []) if single else find_runs(folders)
    out = root if out is None else out
    refuse_unwritable(own_folder(out / DATA))
    console = Console()
    _print(console, root, runs, missing)
    for run in runs:
        try:
            _draw_loss(run)
        except (ValueError, OSError) as error:
            console.print(f"no loss.png of {run.name}: {error}", soft_wrap=True, markup=False, highlight=False)
    if single:
        path, beside = write_run_page(runs[0], out=out, clips_mb=clips_mb), ""
    else:
        path = write_report(root, runs, missing, out=out, clips_mb=clips_mb)
        beside = f", data and pictures beside it in {DATA}/"
    size = path.stat().st_size / MEGABYTE
    console.print(escape(visible(f"page: {path} ({size:.1f} MB){beside}")), soft_wrap=True)
    return path


def write_report(root: Path, runs: Sequence[Run], missing: Sequence[Missing], *, out: Path, clips_mb: float) -> Path:
    """Write the page of a comparison with its CSVs and PNGs; see `report`."""
    variants = compared(group(runs))
    page = Page(
        out / PAGE,
        title=f"Runs in {root.name}",
        facts=facts(root, runs, variants, missing),
        warnings=differences(runs, missing),
        folder=DATA,
        subject=root.name,
    )
    page.table(
        tables.variant_table(variants, note=_results_note(variants)),
        data=page.csv("variants", *tables.variant_rows(variants)),
    )
    drawn = charts(variants)
    for chart in drawn:
        page.chart(chart)
    clips = clip_table(variants, most_bytes=clips_mb * MEGABYTE)
    page.clips("Sampled clips", "The newest clips of each variant, of its first run that has clips.", clips)
    if (rates := tables.lr_table(variants)) is not None:
        page.table(rates, data="learning_rate.csv")
    if (sparsity := tables.sparsity_table(variants)) is not None:
        page.table(sparsity, data=page.csv("sparsity_points", *tables.sparsity_rows(variants)))
    if missing:
        page.table(tables.missing_table(missing))
    page.table(tables.run_table(variants), data=page.csv("runs", *tables.run_rows(variants)))
    page.missing(not_shown(variants, [chart.key for chart in drawn]))
    return page.write(f"Every figure as CSV and PNG: {DATA}/")


def _results_note(variants: Sequence[Variant]) -> str:
    partner = reference(variants)
    if partner is None:
        return "No run has metrics yet."
    role = "the dense control" if partner.control else "the best variant"
    return (
        f"Sorted by the last validation loss. Differences are to {partner.name}, {role}: Student's paired t-test over "
        "the shared validation samples, seed by seed. Its interval covers the choice of samples for these runs; the "
        "spread below the loss covers the choice of seeds."
    )


def _draw_loss(run: Run) -> None:
    """Draw the `loss.png` of a run if it is older than the metrics and the folder is writable."""
    picture, metrics = run.folder / "loss.png", run.folder / "metrics.csv"
    if not metrics.is_file():
        return
    old = not picture.is_file() or picture.stat().st_mtime < metrics.stat().st_mtime
    if old and os.access(run.folder, os.W_OK):
        (health_curves if run.distilled else loss_curve)(metrics, picture, title=str(run.folder))


def _print(console: Console, root: Path, runs: Sequence[Run], missing: Sequence[Missing]) -> None:
    table = Printed(title=escape(visible(f"runs in {root}")), box=SIMPLE, pad_edge=False)
    # names are never cut, because runs may differ in the beginning or in the end of the name
    table.add_column("run", overflow="fold")
    for heading in ("steps", "train loss", "val loss", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        # for a distillation, these are the loss of the critic and the gap between critic and teacher
        train = float(run.train[1][-1]) if len(run.train[1]) else None
        values = (train, run.val_loss, run.last("throughput/tokens_per_second"))
        steps = str(run.train[0][-1]) if len(run.train[0]) else "-"
        table.add_row(escape(visible(run.name)), steps, *("-" if value is None else f"{value:.4g}" for value in values))
    console.print(table)
    for one in missing:
        line = visible(f"{one.status}: {one.name}: {one.reason}")
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print("curves: loss.png in the folder of each run", soft_wrap=True)
