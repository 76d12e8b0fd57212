"""Tables of a report: cells of text for the page, rows of numbers for CSV."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from vsa.pages.page import Cell, Table
from vsa.reports.runs import Missing, Run
from vsa.reports.statistics import FEWEST_SAMPLES
from vsa.reports.variants import Variant, reference, shown


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
        [_variant_row(place, variant, partner) for place, variant in enumerate(variants)],
        title="Results",
        note=note,
        marked=[place for place, variant in enumerate(variants) if variant is partner],
    )


def _variant_row(place: int, variant: Variant, partner: Variant | None) -> list[str | Cell]:
    difference, p = variant.difference, Cell("")
    if difference is None:
        against = Cell("reference") if variant is partner else Cell("-", variant.not_paired)
    else:
        interval = f"{difference.low:+.3g} to {difference.high:+.3g}"
        against = Cell(f"{difference.mean:+.3g}", f"{interval}, {difference.samples} samples")
        p = Cell(_p(variant.p_holm), f"needs {FEWEST_SAMPLES} samples" if variant.p_holm is None else "")
    return [
        Cell(variant.name, colour=place),
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


def _p(p: float | None) -> str:
    return "missing" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.2g}"


VARIANT_COLUMNS = (
    "variant",
    "loss",
    "std",
    "lowest",
    "highest",
    "seeds",
    "difference",
    "difference_low",
    "difference_high",
    "p",
    "p_holm",
    "samples",
    "steps",
    "flops",
    "step_seconds",
    "pareto",
    "density",
    "parameters",
    "control",
)


def variant_rows(variants: Sequence[Variant]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of `variants.csv`."""
    settings = [*variants[0].values] if variants else []
    rows = []
    for v in variants:
        d = v.difference
        paired = [d.mean, d.low, d.high, d.p, v.p_holm, d.samples] if d is not None else [None] * 6
        losses = [v.loss, v.std, min(v.losses, default=None), max(v.losses, default=None), len(v.losses)]
        spent = [v.mean("steps"), v.mean("throughput/flops_total"), v.mean("step_seconds"), v.best_trade]
        network = [v.mean("sparsity/density"), v.mean("parameters"), v.control]
        rows.append([v.name, *losses, *paired, *spent, *network, *v.values.values()])
    return [*VARIANT_COLUMNS, *settings], rows


RUN_COLUMNS = (
    "run",
    "variant",
    "seed",
    "lr",
    "status",
    "steps",
    "train_loss",
    "val_loss",
    "flops",
    "step_seconds",
    "tokens_per_second",
    "density",
    "parameters",
    "device",
    "commits",
)


def run_rows(variants: Sequence[Variant]) -> list[list[Any]]:
    """Rows of `runs.csv`: all runs, including those at learning rates that were not chosen."""
    rows = []
    for variant in variants:
        tried = [run for runs in variant.tried.values() for run in runs]
        for run in {run.folder: run for run in (*variant.runs, *tried)}.values():
            train = float(run.train[1][-1]) if len(run.train[1]) else None
            commits = " ".join(str(commit) for commit in run.manifest.get("commits", []) if commit)
            which = [run.name, variant.name, run.seed, run.settings.get("optim.lr"), run.status, run.steps]
            spent = [run.last("throughput/flops_total"), run.step_seconds, run.last("throughput/tokens_per_second")]
            network = [run.last("sparsity/density"), run.parameters, run.point.device if run.point else None]
            rows.append([*which, train, run.val_loss, *spent, *network, commits])
    return rows


def lr_table(variants: Sequence[Variant]) -> Table | None:
    """Final loss of every variant at every learning rate that was tried, with the chosen one marked."""
    tried = [(place, variant) for place, variant in enumerate(variants) if variant.tried]
    if not tried:
        return None
    rates = sorted({rate for _, variant in tried for rate in variant.tried}, key=float)
    rows = []
    for place, variant in tried:
        chosen_lr = variant.runs[0].settings.get("optim.lr")
        cells = []
        for rate in rates:
            losses = [run.val_loss for run in variant.tried.get(rate, ()) if run.val_loss is not None]
            text = number(fmean(losses) if losses else None, 5) if rate in variant.tried else ""
            cells.append(Cell(text, "chosen" if rate == chosen_lr else ""))
        rows.append([Cell(variant.name, colour=place), *cells])
    return Table(
        ["variant", *(f"lr {rate:g}" for rate in rates)],
        rows,
        title="Learning rates tried",
        note="Mean loss over the seeds at which several rates were tried; the rate with the lowest loss is chosen.",
    )


def sparsity_rows(variants: Sequence[Variant]) -> tuple[list[str], list[list[float | None]]]:
    """Sparsity points of the last validations, and the mean loss of each variant at each; empty for one point."""
    points = list(dict.fromkeys(at for variant in variants for run in variant.ended for at in run.validation))
    if len(points) < 2:
        return [], []
    rows: list[list[float | None]] = []
    for variant in variants:
        by_point = [[_mean(run, at) for run in variant.ended if at in run.validation] for at in points]
        rows.append([fmean(losses) if losses else None for losses in by_point])
    return points, rows


def _mean(run: Run, at: str) -> float:
    return fmean(run.validation[at].values())


def sparsity_table(variants: Sequence[Variant]) -> Table | None:
    """Loss of the trained weights at other numbers of tiles than in training."""
    points, rows = sparsity_rows(variants)
    if not points:
        return None
    cells = []
    for place, (variant, losses) in enumerate(zip(variants, rows, strict=True)):
        own = losses[points.index("current")] if "current" in points else None
        line = [Cell(variant.name, colour=place)]
        for at, loss in zip(points, losses, strict=True):
            change = f"{loss / own - 1:+.2%}" if loss is not None and own and at != "current" else ""
            line.append(Cell(number(loss, 5), change))
        if any(loss is not None for loss in losses):
            cells.append(line)
    return Table(
        ["variant", *points],
        cells,
        title="Tiles at inference",
        note="The same weights validated with other numbers of tiles; below: change relative to the current number.",
    )


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
    for name, variant, seed, lr, status, steps, train, val, flops, seconds, *_ in run_rows(variants):
        numbers = [number(value, digits) for value, digits in ((train, 5), (val, 5), (flops, 3), (seconds, 3))]
        texts = [name, variant, "" if seed is None else str(seed), "" if lr is None else f"{lr}", status, str(steps)]
        rows.append([*texts, *numbers])
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
