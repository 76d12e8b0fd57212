"""Charts of the page of one run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vsa.evaluation.figures import running_mean
from vsa.pages.charts import Chart, Panel, Series
from vsa.reports.figures import NOISE_LEVEL, SPENT, diagnostics
from vsa.reports.runs import Curve, Run

_RATES = {
    "throughput/tokens_per_second": "tokens a second",
    "throughput/step_seconds": "seconds a step",
    "throughput/tflops_executed": "executed TFLOP/s",
    "throughput/tflops_dense_equivalent": "TFLOP/s of dense attention at this speed",
    "throughput/mfu": "model FLOPs utilisation",
    "throughput/memory_gib": "peak GPU memory, GiB",
}
_SPARSITY = {"sparsity/density": "density (share of tiles kept)", "sparsity/topk": "top-k (tiles kept)"}
_DECILE = re.compile(r"(.*)_decile_(\d)$")
_VALIDATED_AT = re.compile(r"val/(?:loss|gap)_(?!decile_)(\w+)$")
# most validations that are drawn by noise level: the first, the last and evenly spaced ones between
_PROFILES = 5


def run_charts(run: Run) -> list[Chart]:
    """All charts with logged values, in the order of the page; metrics.csv holds their numbers."""
    charts = (loss_chart(run), timestep_chart(run), optimizer_chart(run), throughput_chart(run), sparsity_chart(run))
    return [chart for chart in charts if chart.panels]


def loss_chart(run: Run) -> Chart:
    """Training loss, its running mean and the validation loss, over steps, time, tokens and FLOPs."""
    # a single non-finite loss would make every later mean non-finite
    there = np.isfinite(run.train[1])
    steps, losses = run.train[0][there], run.train[1][there]
    window = max(1, len(losses) // 30)
    what = "critic" if run.distilled else "training"
    curves: list[tuple[str, Curve, dict[str, Any]]] = [(what, (steps, losses), {})]
    if window > 1:
        mean = f"{what}, mean of {window}", (steps, running_mean(losses, window)), {}
        curves = [(f"{what}, every logged step", (steps, losses), {"faint": True}), mean]
    curves.append(("gap to the teacher" if run.distilled else "validation", run.val, {"colour": 1}))
    others = {match[1]: curve for name, curve in run.metrics.items() if (match := _VALIDATED_AT.match(name))}
    for place, (at, curve) in enumerate(sorted(others.items(), key=lambda item: item[0])):
        curves.append((f"validation, {at}", curve, {"colour": 2 + place, "dashed": True}))
    panels = {}
    # for a single run, the panel over steps comes first
    for over in ("steps", "flops", "tokens", "seconds"):
        series = [
            Series(name, x, values, **style)
            for name, (at, values), style in curves
            if len(at) and (x := run.spent(over, at)) is not None
        ]
        if series:
            panels[(over,)] = Panel(SPENT[over], "loss", series, y_log=_log(series))
    note = f"The running mean is over {window} logged steps. " if window > 1 else ""
    return Chart(
        key="loss",
        title="Losses of the distillation" if run.distilled else "Loss",
        note=f"{note}Every validation uses the same samples and noise.",
        panels=panels,
        switches=("over",),
    )


def timestep_chart(run: Run) -> Chart:
    """Loss by tenth of the noise levels: at several validations, and of each tenth over the steps."""
    deciles: dict[str, dict[int, Curve]] = {}
    for name, curve in sorted(run.metrics.items()):
        if match := _DECILE.match(name):
            deciles.setdefault(match[1], {})[int(match[2])] = curve
    validated = deciles.get("val/gap" if run.distilled else "val/loss", {})
    trained = {
        decile: (at, running_mean(values, max(1, len(values) // 30)))
        for decile, (at, values) in deciles.get("train/loss", {}).items()
    }
    panels: dict[tuple[str, ...], Panel] = {}
    steps = sorted({int(step) for at, _ in validated.values() for step in at})
    if steps:
        profile_steps = sorted({steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(_PROFILES, len(steps)))})
        last = len(profile_steps) - 1
        series = [
            _profile(validated, step, colour=0 if place == last else place + 1, dashed=place != last)
            for place, step in enumerate(profile_steps)
        ]
        panels[("validation",)] = Panel(NOISE_LEVEL, "validation loss", series[::-1])
    for kind, curves in (("validation", validated), ("training", trained)):
        series = [
            Series(f"noise {decile / 10:g} to {(decile + 1) / 10:g}", *curve, colour=decile)
            for decile, curve in curves.items()
        ]
        if series:
            panels[(f"{kind} by step",)] = Panel(SPENT["steps"], f"{kind} loss", series, y_log=_log(series))
    note = "By tenth of the noise levels; the timestep distribution of a run determines how often it trains on each."
    return _chart("loss_by_timestep", "Loss by timestep", note, panels)


def _profile(deciles: Mapping[int, Curve], step: int, *, colour: int, dashed: bool) -> Series:
    points = {d: float(values[at == step][0]) for d, (at, values) in deciles.items() if (at == step).any()}
    x, y = (np.array([*points]) + 0.5) / 10, np.array([*points.values()])
    return Series(f"step {step}", x, y, colour=colour, dashed=dashed)


def optimizer_chart(run: Run) -> Chart:
    """Learning rate and gradient norms over the steps."""
    rates = {name: curve for name, curve in run.metrics.items() if name == "lr" or name.endswith("/lr")}
    norms = {name.replace("grad_norm/", ""): curve for name, curve in run.metrics.items() if "grad_norm/" in name}
    panels = {
        ("learning rate",): _over_steps(rates, "learning rate"),
        ("gradient norm",): _over_steps(norms, "gradient norm before clipping", log=True),
    }
    note = "The norm of all gradients and of each kind of parameter, before clipping."
    return _chart("optimizer", "Learning rate and gradients", note, panels)


def throughput_chart(run: Run) -> Chart:
    """Throughput, step time and memory over the steps."""
    panels = {(label,): _one(run, name, label) for name, label in _RATES.items()}
    for what in ("step", "data"):
        ranks = {name: curve for name, curve in run.metrics.items() if name.startswith(f"ranks/{what}_seconds_")}
        times_by_rank = {f"rank {name.rpartition('_')[2]}": curve for name, curve in ranks.items()}
        panels[(f"{what} time by rank",)] = _over_steps(times_by_rank, f"{what} seconds of each rank")
    return _chart("throughput", "Throughput", "Without validation, sampling and saving.", panels)


def sparsity_chart(run: Run) -> Chart:
    """Density, top-k and the metrics of the diagnostics over the steps."""
    panels = {(label,): _one(run, name, label) for name, label in _SPARSITY.items()}
    measured = diagnostics(run.metrics)
    for name, label in measured.items():
        short = name.removeprefix("diag/")
        panels[(short,)] = _over_steps({short: run.metrics[name]}, label)
    note = "Recall, gates and entropy are measured on fixed samples and noise while training."
    if not measured:
        note = "Recall and gates are logged with callbacks=diagnostics."
    return _chart("sparsity", "Sparsity and recall", note, panels)


def _one(run: Run, name: str, label: str) -> Panel:
    return _over_steps({label: run.metrics[name]} if name in run.metrics else {}, label)


def _over_steps(curves: Mapping[str, Curve], label: str, *, log: bool = False) -> Panel:
    """Curves over the steps; a linear axis of values that are never negative begins at 0."""
    series = [Series(name, *curve, colour=place) for place, (name, curve) in enumerate(curves.items())]
    log = log and _log(series)
    zero = not log and all((one.y >= 0).all() for one in series)
    return Panel(SPENT["steps"], label, series, y_log=log, y_zero=zero)


def _log(series: Iterable[Series]) -> bool:
    values = np.concatenate([one.y for one in series] or [np.array([])])
    finite = values[np.isfinite(values)]
    # a linear axis is clearer for values within a factor of two
    return bool(len(finite)) and finite.min() > 0 and math.log(finite.max() / finite.min()) > math.log(2)


def _chart(key: str, title: str, note: str, panels: Mapping[tuple[str, ...], Panel]) -> Chart:
    """A chart of the panels that have curves."""
    panels = {key: panel for key, panel in panels.items() if panel.series}
    return Chart(key=key, title=title, note=note, panels=panels, switches=("what",))
