"""Figures of a report that compares variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    "recall": "recall of the true attention mass",
    "recall_random": "recall of random tiles",
    "gate_rms": "coarse gate (rms)",
    "coarse_share": "coarse share of the output",
    "overlap_steps": "overlap with the noise level before",
    "overlap_heads": "overlap between heads",
    "entropy": "entropy of the coarse scores",
}
"""Labels of the metrics under `diag/` that a report shows by another name."""

SEEDS = "Lines are means over the seeds, bands range from the lowest to the highest."


def charts(variants: Sequence[Variant]) -> list[Chart]:
    """All figures with data, in the order of the page."""
    # a variant has the same colour in every figure
    colours = {variant.name: place for place, variant in enumerate(variants)}
    makers: tuple[Callable[[Sequence[Variant], dict[str, int]], Chart | None], ...] = (
        loss_chart,
        pareto_chart,
        timestep_chart,
        topk_chart,
        scaling_chart,
        diagnostics_chart,
        lr_chart,
    )
    return [chart for make in makers if (chart := make(variants, colours)) is not None]


def loss_chart(variants: Sequence[Variant], colours: dict[str, int]) -> Chart | None:
    """Validation and training loss over what they cost."""
    panels: dict[tuple[str, ...], Panel] = {}
    for what, curve in (("validation", lambda run: run.val), ("training", smoothed_train)):
        for over, label in SPENT.items():
            series = [
                _banded(variant, colours, [(run, curve(run)) for run in variant.runs], over) for variant in variants
            ]
            series = [one for one in series if len(one.x)]
            if series:
                ends = [one.x[-1] for one in series]
                # on a linear axis, a long run would hide much shorter ones
                log = max(ends) > 20 * min(ends)
                panels[what, over] = Panel(x_label=label, y_label=f"{what} loss", series=series, x_log=log, y_log=True)
    if not panels:
        return None
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


def _banded(variant: Variant, colours: dict[str, int], curves: Sequence[tuple[Run, Curve]], over: str) -> Series:
    """Mean and range of the curves of a variant's runs, over steps or over what was spent up to them."""
    curves_with_x = []
    for run, (steps, values) in curves:
        x = steps if over == "steps" else run.spent(over, steps)
        if x is not None:
            curves_with_x.append((steps, values, x))
    losses = band([(steps, values) for steps, values, _ in curves_with_x])
    several = len(curves_with_x) > 1
    return Series(
        name=variant.name,
        x=band([(steps, x) for steps, _, x in curves_with_x]).mean,
        y=losses.mean,
        low=losses.low if several else None,
        high=losses.high if several else None,
        colour=colours[variant.name],
    )


def _loss_rows(variant: Variant, run: Run) -> Iterator[tuple[Any, ...]]:
    steps = np.union1d(run.train[0], run.val[0]).astype(int)
    columns = [run.spent(over, steps) for over in ("flops", "tokens", "seconds")]
    for own, values in (run.train, run.val):
        column = np.full(len(steps), np.nan)
        column[np.searchsorted(steps, own)] = values
        columns.append(column)
    texts = [[""] * len(steps) if column is None else _texts(column) for column in columns]
    yield from zip(repeat(variant.name), repeat(run.name), repeat(run.seed), steps.tolist(), *texts)


def _texts(values: np.ndarray) -> list[str]:
    # the precision of metrics.csv
    return [f"{value:.9g}" if value == value else "" for value in values.tolist()]


def pareto_chart(variants: Sequence[Variant], colours: dict[str, int]) -> Chart | None:
    """Final loss against the time of a step, with the Pareto front."""
    points = [(v, seconds, loss) for v in variants if (loss := v.finite_loss) and (seconds := v.mean("step_seconds"))]
    if len(points) < 2:
        return None
    front = pareto_front([(seconds, loss) for _, seconds, loss in points])
    series = [
        Series(
            name=variant.name,
            x=np.array([seconds]),
            y=np.array([loss]),
            low=np.array([min(variant.losses)]) if len(variant.losses) > 1 else None,
            high=np.array([max(variant.losses)]) if len(variant.losses) > 1 else None,
            colour=colours[variant.name],
            points=True,
        )
        for variant, seconds, loss in points
    ]
    line = Series(
        name="Pareto front",
        x=np.array([points[i][1] for i in front]),
        y=np.array([points[i][2] for i in front]),
        colour=9,
        dashed=True,
    )
    names = {points[i][0].name for i in front}
    return Chart(
        key="pareto",
        title="Loss and step time",
        note="Lower and further left is better. The dashed line is the Pareto front; bars range over the seeds.",
        panels={(): Panel(x_label="seconds a step (median)", y_label="final loss", series=[line, *series])},
        columns=("variant", "step_seconds", "loss", "lowest", "highest", "on_front"),
        rows=[(v.name, seconds, loss, min(v.losses), max(v.losses), v.name in names) for v, seconds, loss in points],
    )


def timestep_chart(variants: Sequence[Variant], colours: dict[str, int]) -> Chart | None:
    """The last validation loss by tenth of the noise levels."""
    series = []
    for variant in variants:
        curves = []
        for run in variant.ended:
            name = "val/gap_decile_" if run.distilled else "val/loss_decile_"
            last = {d: loss for d in range(10) if (loss := run.last(f"{name}{d}")) is not None}
            curves.append((np.array([*last]), np.array([*last.values()])))
        losses = band(curves)
        if len(losses.steps):
            several = len(curves) > 1
            series.append(
                Series(
                    name=variant.name,
                    x=(losses.steps + 0.5) / 10,
                    y=losses.mean,
                    low=losses.low if several else None,
                    high=losses.high if several else None,
                    colour=colours[variant.name],
                )
            )
    if not series:
        return None
    panel = Panel(x_label="noise level (1: pure noise), tenths", y_label="validation loss", series=series)
    return Chart(
        key="loss_by_timestep",
        title="Loss by timestep",
        note=f"The last validation, by tenth of the noise levels. {SEEDS}",
        panels={(): panel},
        columns=("variant", "noise_level", "mean", "lowest", "highest"),
        rows=_long((), panel),
    )


def _long(key: tuple[str, ...], panel: Panel) -> Iterator[tuple[Any, ...]]:
    for one in panel.series:
        low, high = (one.y if edge is None else edge for edge in (one.low, one.high))
        for row in zip(one.x.tolist(), one.y.tolist(), low.tolist(), high.tolist(), strict=True):
            yield *key, one.name, *row


def topk_chart(variants: Sequence[Variant], colours: dict[str, int]) -> Chart | None:
    """Final loss by sequence length and top-k, if the runs vary both."""
    cells: dict[tuple[int, int], list[float]] = {}
    for variant in variants:
        for run in variant.ended:
            length, topk, loss = sequence_length(run), run.last("sparsity/topk"), run.val_loss
            if length is not None and topk is not None and loss is not None and not variant.control:
                cells.setdefault((length, round(topk)), []).append(loss)
    lengths, topks = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    if len(lengths) < 2 or len(topks) < 2:
        return None
    values = np.array([[fmean(cells.get((n, k), [np.nan])) for n in lengths] for k in topks])
    return Chart(
        key="topk_by_length",
        title="Top-k by sequence length",
        note="Final loss, mean over the seeds and other settings. Compare values within a column, not between lengths.",
        panels={
            (): Heat(
                x_label="tokens of a sample",
                y_label="top-k (tiles kept)",
                columns=[str(n) for n in lengths],
                rows=[str(k) for k in topks],
                values=values,
            )
        },
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
    for over, size in (("parameters", _parameters), ("flops", _flops)):
        for name, members in families(variants).items():
            points = [
                (float(at), loss)
                for variant in members
                for run in variant.ended
                if (at := size(run)) and (loss := run.val_loss) is not None
            ]
            fit = fit_power_law(*zip(*points, strict=True)) if len(members) >= 3 and points else None
            if fit is not None:
                fits[over, name] = points, fit
    return fits


def _parameters(run: Run) -> float | None:
    return run.parameters


def _flops(run: Run) -> float | None:
    return run.last("throughput/flops_total")


def scaling_chart(variants: Sequence[Variant], colours: dict[str, int]) -> Chart | None:
    """Power laws of the loss over the size of the model and over FLOPs."""
    fits = scaling_fits(variants)
    panels: dict[tuple[str, ...], Panel] = {}
    for over, label in (("parameters", "parameters"), ("flops", SPENT["flops"])):
        series = []
        for place, (name, (points, fit)) in enumerate((n, f) for (o, n), f in fits.items() if o == over):
            x, y = (np.array(values) for values in zip(*sorted(points), strict=True))
            line = np.geomspace(x[0], x[-1], 50)
            middle, low, high = fit.at(line)
            law = f"{name}: exponent {fit.exponent:.3g} ({fit.interval[0]:.3g} to {fit.interval[1]:.3g})"
            series += [
                Series(name=law, x=line, y=middle, low=low, high=high, colour=place),
                Series(name=name, x=x, y=y, colour=place, points=True),
            ]
        if series:
            panels[(over,)] = Panel(x_label=label, y_label="final loss", series=series, x_log=True, y_log=True)
    if not panels:
        return None
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


def diagnostics_chart(variants: Sequence[Variant], colours: dict[str, int]) -> Chart | None:
    """Metrics of `callbacks=diagnostics` over the steps."""
    logged = {name for variant in variants for run in variant.runs for name in run.metrics if name.startswith("diag/")}
    known_names = [f"diag/{name}" for name in DIAGNOSTICS]
    panels: dict[tuple[str, ...], Panel] = {}
    for column in (*(name for name in known_names if name in logged), *sorted(logged - {*known_names})):
        name = column.removeprefix("diag/")
        bands = [
            _banded(v, colours, [(run, run.curve(column)) for run in v.runs if column in run.metrics], "steps")
            for v in variants
        ]
        series = [one for one in bands if len(one.x)]
        panels[(name,)] = Panel(x_label=SPENT["steps"], y_label=DIAGNOSTICS.get(name, name), series=series)
    if not panels:
        return None
    return Chart(
        key="diagnostics",
        title="Recall and gates",
        note=f"Measured on fixed samples and noise while training. {SEEDS}",
        switches=("what",),
        panels=panels,
        columns=("metric", "variant", "step", "mean", "lowest", "highest"),
        rows=(row for key, panel in panels.items() for row in _long(key, panel)),
    )


def lr_chart(variants: Sequence[Variant], colours: dict[str, int]) -> Chart | None:
    """Loss by learning rate, on the seeds that the learning rate was chosen on."""
    series, rows = [], []
    for variant in variants:
        tried = {lr: [run.val_loss for run in runs if run.val_loss is not None] for lr, runs in variant.tried.items()}
        tried = {lr: losses for lr, losses in tried.items() if losses}
        if tried:
            x, y = np.array([float(lr) for lr in tried]), np.array([fmean(losses) for losses in tried.values()])
            series.append(Series(name=variant.name, x=x, y=y, colour=colours[variant.name]))
        chosen_lr = variant.runs[0].settings.get("optim.lr")
        rows += [(variant.name, lr, fmean(losses), len(losses), lr == chosen_lr) for lr, losses in tried.items()]
    if not series:
        return None
    return Chart(
        key="learning_rate",
        title="Learning rates",
        note="Final loss on the seeds at which several rates were tried; each variant is judged at its best.",
        panels={(): Panel(x_label="learning rate", y_label="final loss", series=series, x_log=True)},
        columns=("variant", "lr", "loss", "runs", "chosen"),
        rows=rows,
    )
