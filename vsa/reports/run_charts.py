"""Charts of the page of one run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from vsa.evaluation.figures import running_mean
from vsa.pages.charts import Chart, Panel, Series
from vsa.reports.figures import DIAGNOSTICS, SPENT
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
    """All charts with logged values, in the order of the page."""
    charts = (loss_chart(run), timestep_chart(run), optimizer_chart(run), throughput_chart(run), sparsity_chart(run))
    return [chart for chart in charts if chart is not None]


def loss_chart(run: Run) -> Chart | None:
    """Training loss, its running mean and the validation loss, over steps, time, tokens and FLOPs."""
    # a single non-finite loss would make every later mean non-finite
    there = np.isfinite(run.train[1])
    steps, losses = run.train[0][there], run.train[1][there]
    window = max(1, len(losses) // 30)
    curves: list[tuple[str, Curve, dict[str, object]]] = []
    if len(losses):
        what = "critic" if run.distilled else "training"
        if window > 1:
            curves.append((f"{what}, every logged step", (steps, losses), {"colour": 0, "faint": True}))
            curves.append((f"{what}, mean of {window}", (steps, running_mean(losses, window)), {"colour": 0}))
        else:
            curves.append((what, (steps, losses), {"colour": 0}))
    if len(run.val[1]):
        curves.append(("gap to the teacher" if run.distilled else "validation", run.val, {"colour": 1}))
    others = [(match[1], curve) for name, curve in run.metrics.items() if (match := _VALIDATED_AT.match(name))]
    for place, (at, curve) in enumerate(sorted(others)):
        curves.append((f"validation, {at}", curve, {"colour": 2 + place, "dashed": True}))
    panels = {}
    for over, label in SPENT.items():
        series = []
        for name, (at, values), style in curves:
            x = at if over == "steps" else run.spent(over, at)
            if x is not None:
                series.append(Series(name=name, x=x, y=values, **style))  # type: ignore[arg-type]
        if series:
            panels[(over,)] = Panel(x_label=label, y_label="loss", series=series, y_log=_positive(series))
    if not panels:
        return None
    # for a single run, the panel over steps comes first
    panels = {key: panels[key] for key in sorted(panels, key=lambda key: key != ("steps",))}
    kind = "Losses of the distillation" if run.distilled else "Loss"
    note = f"The running mean is over {window} logged steps. " if window > 1 else ""
    note += "Every validation uses the same samples and noise."
    return _chart("loss", kind, note, panels, switches=("over",))


def timestep_chart(run: Run) -> Chart | None:
    """Loss by tenth of the noise levels: at several validations, and of each tenth over the steps."""
    deciles: dict[str, dict[int, Curve]] = {}
    for name, curve in run.metrics.items():
        if match := _DECILE.match(name):
            deciles.setdefault(match[1], {})[int(match[2])] = curve
    validated = deciles.get("val/gap" if run.distilled else "val/loss", {})
    trained = deciles.get("train/loss", {})
    panels: dict[tuple[str, ...], Panel] = {}
    steps = sorted({int(step) for at, _ in validated.values() for step in at})
    if steps:
        profile_steps = sorted({steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(_PROFILES, len(steps)))})
        series = [
            _profile(validated, step, colour=0 if step == steps[-1] else place + 1, dashed=step != steps[-1])
            for place, step in enumerate(profile_steps)
        ]
        x_label = "noise level (1: pure noise), tenths"
        panels[("validation",)] = Panel(x_label=x_label, y_label="validation loss", series=series[::-1])
    for title, curves, smooth in (("validation by step", validated, False), ("training by step", trained, True)):
        series = [
            Series(
                name=f"noise {decile / 10:g} to {(decile + 1) / 10:g}",
                x=at,
                y=running_mean(values, max(1, len(values) // 30)) if smooth else values,
                colour=decile,
            )
            for decile, (at, values) in sorted(curves.items())
        ]
        if series:
            panels[(title,)] = Panel(
                x_label=SPENT["steps"], y_label=title.split()[0] + " loss", series=series, y_log=_positive(series)
            )
    if not panels:
        return None
    note = "By tenth of the noise levels; the timestep distribution of a run determines how often it trains on each."
    return _chart("loss_by_timestep", "Loss by timestep", note, panels, switches=("what",))


def _profile(deciles: Mapping[int, Curve], step: int, *, colour: int, dashed: bool) -> Series:
    points = {d: float(values[at == step][0]) for d, (at, values) in sorted(deciles.items()) if (at == step).any()}
    x, y = (np.array([*points]) + 0.5) / 10, np.array([*points.values()])
    return Series(name=f"step {step}", x=x, y=y, colour=colour, dashed=dashed)


def optimizer_chart(run: Run) -> Chart | None:
    """Learning rate and gradient norms over the steps."""
    panels: dict[tuple[str, ...], Panel] = {}
    rates = {name: curve for name, curve in run.metrics.items() if name == "lr" or name.endswith("/lr")}
    if rates:
        panels[("learning rate",)] = _over_steps(rates, "learning rate")
    norms = {name: curve for name, curve in run.metrics.items() if "grad_norm/" in name}
    if norms:
        norms_by_kind = {name.replace("grad_norm/", ""): curve for name, curve in norms.items()}
        panels[("gradient norm",)] = _over_steps(norms_by_kind, "gradient norm before clipping", log=True)
    note = "The norm of all gradients and of each kind of parameter, before clipping."
    return _chart("optimizer", "Learning rate and gradients", note, panels, switches=("what",)) if panels else None


def throughput_chart(run: Run) -> Chart | None:
    """Throughput, step time and memory over the steps."""
    panels = {
        (label,): _over_steps({label: run.metrics[name]}, label)
        for name, label in _RATES.items()
        if name in run.metrics
    }
    for what in ("step", "data"):
        ranks = {name: curve for name, curve in run.metrics.items() if name.startswith(f"ranks/{what}_seconds_")}
        times_by_rank = {f"rank {name.rpartition('_')[2]}": curve for name, curve in ranks.items()}
        if times_by_rank:
            panels[(f"{what} time by rank",)] = _over_steps(times_by_rank, f"{what} seconds of each rank")
    note = "Without validation, sampling and saving."
    return _chart("throughput", "Throughput", note, panels, switches=("what",)) if panels else None


def sparsity_chart(run: Run) -> Chart | None:
    """Density, top-k and the metrics of the diagnostics over the steps."""
    panels = {
        (label,): _over_steps({label: run.metrics[name]}, label)
        for name, label in _SPARSITY.items()
        if name in run.metrics
    }
    diagnostic_names = [name for name in run.metrics if name.startswith("diag/")]
    known_names = [f"diag/{name}" for name in DIAGNOSTICS]
    for name in sorted(
        diagnostic_names,
        key=lambda name: (name not in known_names, known_names.index(name) if name in known_names else 0, name),
    ):
        short = name.removeprefix("diag/")
        panels[(short,)] = _over_steps({short: run.metrics[name]}, DIAGNOSTICS.get(short, short))
    if not panels:
        return None
    note = "Recall, gates and entropy are measured on fixed samples and noise while training."
    if not diagnostic_names:
        note = "Recall and gates are logged with callbacks=diagnostics."
    return _chart("sparsity", "Sparsity and recall", note, panels, switches=("what",))


def _over_steps(curves: Mapping[str, Curve], label: str, *, log: bool = False) -> Panel:
    """Curves over the steps; a linear axis of values that are never negative begins at 0."""
    series = [
        Series(name=name, x=steps, y=values, colour=place)
        for place, (name, (steps, values)) in enumerate(curves.items())
    ]
    log = log and _positive(series)
    zero = not log and all((one.y >= 0).all() for one in series)
    return Panel(x_label=SPENT["steps"], y_label=label, series=series, y_log=log, y_zero=zero)


def _positive(series: list[Series]) -> bool:
    values = np.concatenate([one.y for one in series])
    finite = values[np.isfinite(values)]
    # a linear axis is clearer for values within a factor of two
    return bool(len(finite)) and finite.min() > 0 and math.log(finite.max() / finite.min()) > math.log(2)


def _chart(
    key: str, title: str, note: str, panels: Mapping[tuple[str, ...], Panel], *, switches: tuple[str, ...]
) -> Chart:
    # no CSV, because metrics.csv holds the values
    return Chart(key=key, title=title, note=note, panels=panels, switches=switches, columns=(), rows=())
