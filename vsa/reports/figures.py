"""Figures of a report that compares variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from statistics import fmean
from typing import Any

import numpy as np

from vsa.evaluation.figures import running_mean
from vsa.pages.charts import Chart, Heat, Panel, Series
from vsa.reports.runs import Curve, Run
from vsa.reports.statistics import PowerLaw, band, fit_power_law, pareto_front
from vsa.reports.variants import Variant

SPENT = {
    "flops": "executed training FLOPs",
    "tokens": "trained tokens",
    "seconds": "seconds of training",
    "steps": "optimizer steps",
}
"""Labels of the horizontal axes that a loss can be drawn over."""

DIAGNOSTICS = {
    "diag/recall": "recall of the true attention mass",
    "diag/recall_random": "recall of random tiles",
    "diag/gate_rms": "coarse gate (rms)",
    "diag/coarse_share": "coarse share of the output",
    "diag/overlap_steps": "overlap with the noise level before",
    "diag/overlap_heads": "overlap between heads",
    "diag/entropy": "entropy of the coarse scores",
}
"""Labels of the diagnostics that a report shows by another name."""

NOISE_LEVEL = "noise level (1: pure noise), tenths"
SEEDS = "Lines are means over the seeds, bands range from the lowest to the highest."


def charts(variants: Sequence[Variant]) -> list[Chart]:
    """All figures with data, in the order of the page."""
    makers: tuple[Callable[[Sequence[Variant]], Chart], ...] = (
        loss_chart,
        pareto_chart,
        timestep_chart,
        topk_chart,
        scaling_chart,
        diagnostics_chart,
        lr_chart,
    )
    return [chart for make in makers if (chart := make(variants)).panels]


def loss_chart(variants: Sequence[Variant]) -> Chart:
    """Validation and training loss over what they cost."""
    panels: dict[tuple[str, ...], Panel] = {}
    for what, curve in (("validation", lambda run: run.val), ("training", smoothed_train)):
        for over, label in SPENT.items():
            series = _drawn(_banded(variant, [(run, curve(run)) for run in variant.runs], over) for variant in variants)
            if series:
                ends = [one.x[-1] for one in series]
                # on a linear axis, a long run would hide much shorter ones
                log = max(ends) > 20 * min(ends)
                panels[what, over] = Panel(label, f"{what} loss", series, x_log=log, y_log=True)
    return Chart(
        key="loss",
        title="Loss over what it costs",
        note=f"{SEEDS} The training loss is a running mean of a thirtieth of the run.",
        switches=("loss", "over"),
        panels=panels,
        columns=("variant", "run", "seed", "step", "flops", "tokens", "seconds", "train_loss", "val_loss"),
        rows=(row for variant in variants for run in variant.runs for row in _loss_rows(variant, run)),
    )


def smoothed_train(run: Run) -> Curve:
    """The training loss as a running mean over a thirtieth of its rows."""
    steps, losses = run.train
    return steps, running_mean(losses, max(1, len(losses) // 30))


def _drawn(series: Iterable[Series]) -> list[Series]:
    return [one for one in series if len(one.x)]


def _banded(variant: Variant, curves: Sequence[tuple[Run, Curve]], over: str = "steps") -> Series:
    """Mean and range of the curves of a variant's runs, over steps or over what was spent up to them."""
    spent = [(curve, x) for run, curve in curves if (x := run.spent(over, curve[0])) is not None]
    values = band([curve for curve, _ in spent])
    low, high = (values.low, values.high) if len(spent) > 1 else (None, None)
    x = values.steps.astype(float) if over == "steps" else band([(steps, x) for (steps, _), x in spent]).mean
    return Series(variant.name, x, values.mean, low, high, colour=variant.colour)


def _loss_rows(variant: Variant, run: Run) -> Iterator[tuple[Any, ...]]:
    steps = np.union1d(run.train[0], run.val[0]).astype(int)
    columns = [run.spent(over, steps) for over in ("flops", "tokens", "seconds")]
    for own, values in (run.train, run.val):
        column = np.full(len(steps), np.nan)
        column[np.searchsorted(steps, own)] = values
        columns.append(column)
    # the precision of metrics.csv
    texts = [
        [""] * len(steps) if column is None else [f"{x:.9g}" if x == x else "" for x in column.tolist()]
        for column in columns
    ]
    yield from zip(repeat(variant.name), repeat(run.name), repeat(run.seed), steps.tolist(), *texts)


def pareto_chart(variants: Sequence[Variant]) -> Chart:
    """Final loss against the time of a step, with the Pareto front."""
    points = [(v, seconds, loss) for v in variants if (loss := v.finite_loss) and (seconds := v.mean("step_seconds"))]
    front = [points[i] for i in pareto_front([(seconds, loss) for _, seconds, loss in points])]
    x, y = (np.array([point[axis] for point in front]) for axis in (1, 2))
    series = [Series("Pareto front", x, y, colour=9, dashed=True)]
    for v, seconds, loss in points:
        edges = [np.array([edge(v.losses)]) if len(v.losses) > 1 else None for edge in (min, max)]
        series.append(Series(v.name, np.array([seconds]), np.array([loss]), *edges, colour=v.colour, points=True))
    on_front = {v.name for v, _, _ in front}
    return Chart(
        key="pareto",
        title="Loss and step time",
        note="Lower and further left is better. The dashed line is the Pareto front; bars range over the seeds.",
        panels={(): Panel("seconds a step (median)", "final loss", series)} if len(points) > 1 else {},
        columns=("variant", "step_seconds", "loss", "lowest", "highest", "on_front"),
        rows=[(v.name, seconds, loss, min(v.losses), max(v.losses), v.name in on_front) for v, seconds, loss in points],
    )


def timestep_chart(variants: Sequence[Variant]) -> Chart:
    """The last validation loss by tenth of the noise levels."""
    series = []
    for variant in variants:
        curves = []
        for run in variant.ended:
            name = "val/gap_decile_" if run.distilled else "val/loss_decile_"
            last = {(d + 0.5) / 10: loss for d in range(10) if (loss := run.last(f"{name}{d}")) is not None}
            curves.append((run, (np.array([*last]), np.array([*last.values()]))))
        series.append(_banded(variant, curves))
    panel = Panel(NOISE_LEVEL, "validation loss", _drawn(series))
    return Chart(
        key="loss_by_timestep",
        title="Loss by timestep",
        note=f"The last validation, by tenth of the noise levels. {SEEDS}",
        panels={(): panel} if panel.series else {},
        columns=("variant", "noise_level", "mean", "lowest", "highest"),
        rows=_long((), panel),
    )


def _long(key: tuple[str, ...], panel: Panel) -> Iterator[tuple[Any, ...]]:
    for one in panel.series:
        low, high = (one.y if edge is None else edge for edge in (one.low, one.high))
        for row in zip(one.x.tolist(), one.y.tolist(), low.tolist(), high.tolist(), strict=True):
            yield *key, one.name, *row


def topk_chart(variants: Sequence[Variant]) -> Chart:
    """Final loss by sequence length and top-k, if the runs vary both."""
    cells: dict[tuple[int, int], list[float]] = {}
    for run in (run for variant in variants if not variant.control for run in variant.ended):
        length, topk, loss = sequence_length(run), run.last("sparsity/topk"), run.val_loss
        if length is not None and topk is not None and loss is not None:
            cells.setdefault((length, round(topk)), []).append(loss)
    lengths, topks = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    values = np.array([[fmean(cells.get((n, k), [np.nan])) for n in lengths] for k in topks])
    heat = Heat("tokens of a sample", "top-k (tiles kept)", [*map(str, lengths)], [*map(str, topks)], values)
    return Chart(
        key="topk_by_length",
        title="Top-k by sequence length",
        note="Final loss, mean over the seeds and other settings. Compare values within a column, not between lengths.",
        panels={(): heat} if len(lengths) > 1 and len(topks) > 1 else {},
        columns=("tokens", "topk", "loss", "runs"),
        rows=[(n, k, fmean(losses), len(losses)) for (n, k), losses in sorted(cells.items())],
    )


def sequence_length(run: Run) -> int | None:
    """Tokens per sample, averaged over the steps."""
    batch = run.settings.get("data.batch_size")
    return round(run.tokens_per_step / batch) if run.tokens_per_step and isinstance(batch, int) and batch else None


def families(variants: Sequence[Variant]) -> dict[str, list[Variant]]:
    """Variants that differ only in model size and run length, by the settings that they share."""
    variants_by_name: dict[str, list[Variant]] = {}
    for variant in variants:
        length = ("trainer.max_steps", "optim.schedule.total_steps", "flop_budget", "second_budget")
        shared = {k: v for k, v in variant.values.items() if not k.startswith("model.") and k not in length}
        name = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in shared.items()) or "all variants"
        variants_by_name.setdefault(name, []).append(variant)
    return variants_by_name


def scaling_fits(variants: Sequence[Variant]) -> dict[tuple[str, str], tuple[list[tuple[float, float]], PowerLaw]]:
    """Power laws of the final loss by (kind of size, family), each with its points (size, loss), one per run.

    The size of a run is its number of parameters or of FLOPs.
    """
    fits = {}
    for over in ("parameters", "flops"):
        for name, members in families(variants).items():
            points = []
            for run in (run for variant in members for run in variant.ended):
                size = run.parameters if over == "parameters" else run.last("throughput/flops_total")
                if size and run.val_loss is not None:
                    points.append((float(size), run.val_loss))
            fit = fit_power_law(*zip(*points, strict=True)) if len(members) >= 3 and points else None
            if fit is not None:
                fits[over, name] = points, fit
    return fits


def scaling_chart(variants: Sequence[Variant]) -> Chart:
    """Power laws of the loss over the size of the model and over FLOPs."""
    fits = scaling_fits(variants)
    panels: dict[tuple[str, ...], Panel] = {}
    for over, label in (("parameters", "parameters"), ("flops", SPENT["flops"])):
        series = []
        for place, (name, (points, fit)) in enumerate((n, f) for (o, n), f in fits.items() if o == over):
            x, y = (np.array(values) for values in zip(*sorted(points), strict=True))
            line = np.geomspace(x[0], x[-1], 50)
            law = f"{name}: exponent {fit.exponent:.3g} ({fit.interval[0]:.3g} to {fit.interval[1]:.3g})"
            series += [Series(law, line, *fit.at(line), colour=place), Series(name, x, y, colour=place, points=True)]
        if series:
            panels[(over,)] = Panel(label, "final loss", series, x_log=True, y_log=True)
    return Chart(
        key="scaling",
        title="Scaling",
        note="Least squares between the logarithms, without an irreducible loss; brackets and bands are 95% intervals.",
        switches=("over",),
        panels=panels,
        columns=("over", "family", "size", "loss", "fitted", "exponent", "exponent_low", "exponent_high"),
        rows=[
            (over, name, size, loss, float(fit.at(np.array([size]))[0][0]), fit.exponent, *fit.interval)
            for (over, name), (points, fit) in fits.items()
            for size, loss in sorted(points)
        ],
    )


def diagnostics(names: Iterable[str]) -> dict[str, str]:
    """Labels of the diagnostics among the metrics, those of `DIAGNOSTICS` first."""
    logged = {name for name in names if name.startswith("diag/")}
    ordered = (*(name for name in DIAGNOSTICS if name in logged), *sorted(logged - {*DIAGNOSTICS}))
    return {name: DIAGNOSTICS.get(name, name.removeprefix("diag/")) for name in ordered}


def diagnostics_chart(variants: Sequence[Variant]) -> Chart:
    """Metrics of `callbacks=diagnostics` over the steps."""
    panels: dict[tuple[str, ...], Panel] = {}
    for name, label in diagnostics(n for variant in variants for run in variant.runs for n in run.metrics).items():
        series = _drawn(_banded(v, [(run, run.curve(name)) for run in v.runs if name in run.metrics]) for v in variants)
        panels[(name.removeprefix("diag/"),)] = Panel(SPENT["steps"], label, series)
    return Chart(
        key="diagnostics",
        title="Recall and gates",
        note=f"Measured on fixed samples and noise while training. {SEEDS}",
        switches=("what",),
        panels=panels,
        columns=("metric", "variant", "step", "mean", "lowest", "highest"),
        rows=(row for key, panel in panels.items() for row in _long(key, panel)),
    )


def lr_chart(variants: Sequence[Variant]) -> Chart:
    """Loss by learning rate, on the seeds that the learning rate was chosen on."""
    series, rows = [], []
    for variant in variants:
        means = {lr: fmean(losses) for lr, losses in variant.tried_losses.items() if losses}
        x, y = np.array([float(lr) for lr in means]), np.array([*means.values()])
        series.append(Series(variant.name, x, y, colour=variant.colour))
        for lr, loss in means.items():
            rows.append((variant.name, lr, loss, len(variant.tried_losses[lr]), lr == variant.chosen_lr))
    panel = Panel("learning rate", "final loss", _drawn(series), x_log=True)
    return Chart(
        key="learning_rate",
        title="Learning rates",
        note="Final loss on the seeds at which several rates were tried; each variant is judged at its best.",
        panels={(): panel} if panel.series else {},
        columns=("variant", "lr", "loss", "runs", "chosen"),
        rows=rows,
    )
