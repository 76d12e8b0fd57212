"""Tables of a report: cells of text for the page, rows of numbers for CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from vsa.pages.page import Cell, Table
from vsa.reports.runs import Missing, Run
from vsa.reports.statistics import FEWEST_SAMPLES
from vsa.reports.variants import LR, Variant, reference, shown


def variant_table(variants: Sequence[Variant], *, note: str = "") -> Table:
    """Variants by final loss, with their difference to the reference, their cost and the settings that differ."""
    partner = reference(variants)
    against = f"mean of the paired differences to {partner.name}, its 95% interval below" if partner else ""
    headings = [
        "variant",
        ("loss", "last validation loss, mean over the seeds; below: standard deviation over the seeds"),
        (f"against {partner.name if partner else ''}", against),
        ("p", "paired t-test over the validation samples, corrected for the number of variants (Holm)"),
        ("seeds", "different seeds with a loss; below: runs that have not finished or repeat a seed"),
        ("steps", "optimizer steps"),
        ("FLOPs", "executed training FLOPs"),
        ("s/step", "median; below: on the Pareto front of loss and step time"),
        ("density", "share of tiles kept at the end"),
        ("parameters", "of the network"),
        *((key.removesuffix("._target_").rpartition(".")[2], key) for key in (variants[0].values if variants else ())),
    ]
    return Table(
        headings,
        [_variant_row(variant, partner) for variant in variants],
        title="Results",
        note=note,
        marked=[partner.colour] if partner else (),
    )


def _variant_row(variant: Variant, partner: Variant | None) -> list[str | Cell]:
    difference, p = variant.difference, Cell("")
    if difference is None:
        against = Cell("reference") if variant is partner else Cell("-", variant.not_paired)
    else:
        interval = f"{difference.low:+.3g} to {difference.high:+.3g}"
        against = Cell(f"{difference.mean:+.3g}", f"{interval}, {difference.samples} samples")
        p = Cell("missing", f"needs {FEWEST_SAMPLES} samples")
        if variant.p_holm is not None:
            p = Cell("< 0.0001" if variant.p_holm < 1e-4 else f"{variant.p_holm:.2g}")
    return [
        Cell(variant.name, colour=variant.colour),
        Cell(number(variant.loss, 5), "" if variant.std is None else f"± {variant.std:.2g}"),
        against,
        p,
        Cell(str(len(variant.losses)), variant.status),
        number(variant.mean("steps")),
        number(variant.mean("throughput/flops_total"), 3),
        Cell(number(variant.mean("step_seconds"), 3), "front" if variant.best_trade else ""),
        number(variant.mean("sparsity/density"), 3),
        count(variant.mean("parameters")),
        *map(shown, variant.values.values()),
    ]


VARIANT_COLUMNS: Mapping[str, Callable[[Variant], Any]] = {
    "variant": lambda v: v.name,
    "loss": lambda v: v.loss,
    "std": lambda v: v.std,
    "lowest": lambda v: min(v.losses, default=None),
    "highest": lambda v: max(v.losses, default=None),
    "seeds": lambda v: len(v.losses),
    "difference": lambda v: v.difference and v.difference.mean,
    "difference_low": lambda v: v.difference and v.difference.low,
    "difference_high": lambda v: v.difference and v.difference.high,
    "p": lambda v: v.difference and v.difference.p,
    "p_holm": lambda v: v.p_holm,
    "samples": lambda v: v.difference and v.difference.samples,
    "steps": lambda v: v.mean("steps"),
    "flops": lambda v: v.mean("throughput/flops_total"),
    "step_seconds": lambda v: v.mean("step_seconds"),
    "pareto": lambda v: v.best_trade,
    "density": lambda v: v.mean("sparsity/density"),
    "parameters": lambda v: v.mean("parameters"),
    "control": lambda v: v.control,
}


def variant_rows(variants: Sequence[Variant]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of `variants.csv`."""
    rows = [[*(value(v) for value in VARIANT_COLUMNS.values()), *v.values.values()] for v in variants]
    return [*VARIANT_COLUMNS, *(variants[0].values if variants else ())], rows


RUN_COLUMNS: Mapping[str, Callable[[Run], Any]] = {
    "seed": lambda run: run.seed,
    "lr": lambda run: run.settings.get(LR),
    "status": lambda run: run.status,
    "steps": lambda run: run.steps,
    "train_loss": lambda run: float(run.train[1][-1]) if len(run.train[1]) else None,
    "val_loss": lambda run: run.val_loss,
    "flops": lambda run: run.last("throughput/flops_total"),
    "step_seconds": lambda run: run.step_seconds,
    "tokens_per_second": lambda run: run.last("throughput/tokens_per_second"),
    "density": lambda run: run.last("sparsity/density"),
    "parameters": lambda run: run.parameters,
    "device": lambda run: run.point and run.point.device,
    "commits": lambda run: " ".join(str(commit) for commit in run.manifest.get("commits", []) if commit),
}


def run_rows(variants: Sequence[Variant]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of `runs.csv`: all runs, including those at learning rates that were not chosen."""
    rows = []
    for variant in variants:
        tried = [run for runs in variant.tried.values() for run in runs]
        for run in {run.folder: run for run in (*variant.runs, *tried)}.values():
            rows.append([run.name, variant.name, *(value(run) for value in RUN_COLUMNS.values())])
    return ["run", "variant", *RUN_COLUMNS], rows


def lr_table(variants: Sequence[Variant]) -> Table | None:
    """Final loss of every variant at every learning rate that was tried, with the chosen one marked."""
    rates = sorted({rate for variant in variants for rate in variant.tried}, key=float)
    rows = []
    for variant in variants:
        cells = [Cell(variant.name, colour=variant.colour)]
        for rate in rates:
            losses = variant.tried_losses.get(rate)
            text = "" if losses is None else number(fmean(losses) if losses else None, 5)
            cells.append(Cell(text, "chosen" if rate == variant.chosen_lr else ""))
        if variant.tried:
            rows.append(cells)
    note = "Mean loss over the seeds at which several rates were tried; the rate with the lowest loss is chosen."
    headings = ["variant", *(f"lr {rate:g}" for rate in rates)]
    return Table(headings, rows, title="Learning rates tried", note=note) if rows else None


def sparsity_rows(variants: Sequence[Variant]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of `sparsity_points.csv`: mean loss of each variant at each point of its last validations."""
    points = list(dict.fromkeys(at for variant in variants for run in variant.ended for at in run.validation))
    rows = []
    for variant in variants:
        losses = [
            [fmean(run.validation[at].values()) for run in variant.ended if at in run.validation] for at in points
        ]
        rows.append([variant.name, *(fmean(each) if each else None for each in losses)])
    return ["variant", *points], rows


def sparsity_table(variants: Sequence[Variant]) -> Table | None:
    """Loss of the trained weights at other numbers of tiles than in training; None for a single number."""
    (variant_heading, *points), rows = sparsity_rows(variants)
    cells = []
    for variant, (_, *losses) in zip(variants, rows, strict=True):
        own = dict(zip(points, losses, strict=True)).get("current")
        line = [Cell(variant.name, colour=variant.colour)]
        for at, loss in zip(points, losses, strict=True):
            change = f"{loss / own - 1:+.2%}" if loss is not None and own and at != "current" else ""
            line.append(Cell(number(loss, 5), change))
        if any(loss is not None for loss in losses):
            cells.append(line)
    note = "The same weights validated with other numbers of tiles; below: change relative to the current number."
    table = Table([variant_heading, *points], cells, title="Tiles at inference", note=note)
    return table if len(points) > 1 else None


def missing_table(missing: Sequence[Missing]) -> Table:
    """Runs that are not compared, with the reason."""
    return Table(
        ["run", "status", "reason"],
        [[one.name, one.status, one.reason] for one in missing],
        title="Failed, refused and waiting",
        note="Runs that are not compared above, or that ended with an error.",
        long=[-1],
    )


def run_table(variants: Sequence[Variant]) -> Table:
    """Table of all runs."""
    rows = []
    for name, variant, seed, lr, status, steps, train, val, flops, seconds, *_ in run_rows(variants)[1]:
        texts = [name, variant, "" if seed is None else str(seed), "" if lr is None else f"{lr}", status, str(steps)]
        rows.append([*texts, number(train, 5), number(val, 5), number(flops, 3), number(seconds, 3)])
    headings = ["run", "variant", "seed", "lr", "status", "steps", "train loss", "val loss", "FLOPs", "s/step"]
    return Table(headings, rows, title="All runs")


def number(value: float | None, digits: int = 6) -> str:
    """A number with `digits` significant digits, "missing" for None."""
    return "missing" if value is None else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """A number of parameters in thousands, millions or billions."""
    if value is None:
        return "-"
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"
