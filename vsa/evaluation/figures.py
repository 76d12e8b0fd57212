"""Curves of a run and of its evaluations, and measurements by layer.

Matplotlib's object interface only: no window system, no global figure state.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from vsa.files import read_csv
from vsa.pages.charts import Panel, Series, draw_panels
from vsa.plotting import COLOURS, TITLE, save_figure, set_title, step_axis

Curve = tuple[np.ndarray, np.ndarray]
"""Steps and values of one metric, without rows that have no value."""


def read_metric(metrics_csv: str | Path, column: str) -> Curve:
    """One column of a run's `metrics.csv`, without a last line that a kill has cut.

    Raises:
        ValueError: the file has no such column, or a value that is no number; names file and column.
    """
    return _curve(metrics_csv, read_csv(metrics_csv, ("step", column), growing=True)[1], column)


def read_metrics(metrics_csv: str | Path, wanted: Callable[[str], object] = bool) -> dict[str, Curve]:
    """Those of the `wanted` columns of a run's `metrics.csv` in which something was logged, as in `read_metric`."""
    columns, rows = read_csv(metrics_csv, growing=True)
    if columns and "step" not in columns:
        raise ValueError(f"{metrics_csv} has no column step")
    read = {name: _curve(metrics_csv, rows, name) for name in columns if name != "step" and wanted(name)}
    return {name: curve for name, curve in read.items() if len(curve[0])}


def _curve(metrics_csv: str | Path, rows: Sequence[Mapping[str, str]], column: str) -> Curve:
    cells = [(row["step"], row[column]) for row in rows if row[column]]
    try:
        return np.array([int(s) for s, _ in cells], dtype=np.int64), np.array([float(v) for _, v in cells])
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{metrics_csv}, column {column}: {error}") from None


def logged_metrics(metrics_csv: str | Path, columns: Sequence[str]) -> dict[str, Curve]:
    """`read_metrics` of `columns`, in their order; none without the file."""
    try:
        read = read_metrics(metrics_csv, columns.__contains__)
    except FileNotFoundError:
        return {}
    return {column: read[column] for column in columns if column in read}


def final_loss(run: Path) -> float | None:
    """The last validation loss of a run, inf for NaN; None without one that can be read."""
    losses = np.array([])
    # a damaged file of one run ends no sweep
    with suppress(ValueError):
        _, losses = _logged(run / "metrics.csv", "val/loss")
    return None if not len(losses) else float(losses[-1]) if math.isfinite(losses[-1]) else math.inf


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and the `window - 1` before it, of fewer at the start."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (total[ends] - total[starts]) / (ends - starts)


def loss_curve(metrics_csv: str | Path, path: str | Path, *, title: str = "") -> Path:
    """Training loss and validation loss over optimizer steps; of many rows the running mean, and every row faintly.

    Args:
        metrics_csv: a run's metrics; `train/loss` (of a mixed objective `train/loss_data`) and `val/loss` are drawn as
            far as they were logged.
        path: PNG to write.
        title: title above the axes.
    """
    # of a mixture the part that validation measures, too
    steps, losses = _logged(metrics_csv, "train/loss_data", "train/loss")
    series = [Series("train", steps, losses)]
    if (window := len(losses) // 30) > 1:
        mean = Series(f"train, mean of {window} rows", steps, running_mean(losses, window))
        series = [Series("", steps, losses, faint=True), mean]
    series.append(Series("validation (fixed noise)", *_logged(metrics_csv, "val/loss"), colour=1))
    log = all((one.y > 0).all() for one in series)
    label = "flow-matching loss (MSE of the velocity)"
    return draw_panels([Panel("optimizer step", label, series, y_log=log, steps=True)], path, title=title)


def health_curves(metrics_csv: str | Path, path: str | Path, *, title: str = "") -> Path:
    """Critic loss, gap between critic and teacher, and spread of the generated latents of a distillation.

    Args:
        metrics_csv: metrics file of a run; missing columns are skipped.
        path: PNG to write.
        title: title above the axes.
    """
    columns = {
        "loss of the critic": {"fake_score/loss": "training"},
        "gap between critic and teacher (rms)": {"dmd/gap": "training", "val/gap": "validation, last step"},
        "generated latents": {"generated/std": "std (data: 1)", "generated/saturation": "share saturated"},
    }
    panels = []
    for label, names in columns.items():
        curves = [(name, _logged(metrics_csv, column)) for column, name in names.items()]
        series = [Series(name, *curve, colour=place) for place, (name, curve) in enumerate(curves)]
        panels.append(Panel("iteration", label, series, steps=True))
    return draw_panels(panels, path, title=title)


def _logged(metrics_csv: str | Path, *columns: str) -> Curve:
    """Steps and values of the first of `columns` that a run logged, empty where it logged none."""
    return next(iter(logged_metrics(metrics_csv, columns).values()), (np.array([]), np.array([])))


def layer_heatmaps(
    tables: Mapping[str, Tensor],
    path: str | Path,
    *,
    layers: Sequence[int],
    timesteps: Sequence[float],
    title: str = "",
) -> Path:
    """One panel per table, layers down and noise levels across; the numbers stand in the cells where they have room.

    Args:
        tables: float `[layers, timesteps]` by name; NaN is left grey. Colours run from 0 to 1, or to the largest value
            where that is above 1.
        path: PNG to write.
        layers: numbers of the layers.
        timesteps: noise levels in [0, 1].
        title: title above the panels.

    Raises:
        ValueError: a table of another shape.
    """
    for name, table in tables.items():
        if table.shape != (len(layers), len(timesteps)):
            raise ValueError(f"{name} must be [{len(layers)}, {len(timesteps)}], got {list(table.shape)}")
    columns = min(3, len(tables))
    rows = math.ceil(len(tables) / columns)
    height = 1.2 + min(6.0, 0.24 * len(layers))
    figure = Figure(
        figsize=(1.4 + 0.55 * len(timesteps) * columns + columns, 0.6 + height * rows), layout="constrained"
    )
    colours = colormaps["viridis"].with_extremes(bad="lightgrey")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(tables) :]:
        axes.axis("off")
    for axes, (name, table) in zip(grid.flat, tables.items(), strict=False):
        values = table.float().numpy()
        top = max(1.0, float(np.nanmax(values, initial=1.0)))
        picture = axes.imshow(values, aspect="auto", cmap=colours, vmin=0.0, vmax=top)
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(timesteps)), [f"{t:g}" for t in timesteps], fontsize=8)
        every = math.ceil(len(layers) / 24)
        axes.set_yticks(range(0, len(layers), every), [str(n) for n in layers[::every]], fontsize=8)
        axes.set_xlabel("noise level", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        figure.colorbar(picture, ax=axes, fraction=0.08).ax.tick_params(labelsize=7)
        if len(layers) <= 24 and len(timesteps) <= 10:
            for (row, column), value in np.ndenumerate(values):
                if np.isfinite(value):
                    ink = "black" if value > 0.6 * top else "white"
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=6)
    set_title(figure.suptitle, title, width=round(TITLE * figure.get_figwidth()))
    return save_figure(figure, path)


SHARE_PANEL = "share of frames that are black (98% of their pixels below 10%) or uniform, of clips that are not finite"
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("validation loss (thin: by noise level)", "loss", ("val/loss",)),
    ("kernel distance to held-out clips", "distance", ("kernel_distance", "kernel_distance_real")),
    ("frames: kernel distance of image features", "distance", ("frame_kernel_distance", "frame_kernel_distance_real")),
    ("motion: kernel distance of changes", "distance", ("change_kernel_distance", "change_kernel_distance_real")),
    ("Fréchet distance of image features", "distance", ("frame_frechet_distance", "change_frechet_distance")),
    ("PSNR against the reference", "dB", ("psnr",)),
    ("SSIM against the reference", "SSIM", ("ssim",)),
    ("LPIPS against the reference", "LPIPS", ("lpips",)),
    (SHARE_PANEL, "share", ("black", "uniform", "non_finite")),
    ("motion and flicker (reference dashed)", "share of the luma range", ("motion", "flicker", "flicker_excess")),
)
"""Title of each panel, label of its y axis, and metrics."""


def draw_evaluation(rows: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "") -> Path:
    """The metrics of evaluated checkpoints over optimizer steps; panels that no row has values for are left out.

    Args:
        rows: rows by step, with values as numbers or as text.
        path: PNG to write.
        title: title above the panels.
    """
    names = {name for row in rows for name in row}
    panels = [(heading, label, [m for m in metrics if m in names]) for heading, label, metrics in PANELS]
    panels = [(heading, label, metrics) for heading, label, metrics in panels if metrics]
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.8 * columns, 3.8 * lines), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    eval_steps = sorted({int(row["step"]) for row in rows})
    for axes in grid[len(panels) :]:
        axes.axis("off")
    for axes, (heading, label, metrics) in zip(grid, panels, strict=False):
        if "val/loss" in metrics:
            _draw_deciles(figure, axes, rows)
        for place, metric in enumerate(metrics):
            steps, values = _finite(rows, metric)
            # smaller and smaller: equal curves show each other
            colour = COLOURS[place]
            look: dict[str, Any] = {"color": colour, "label": metric, "markersize": 7 - 2 * place}
            # a line without points has no place of its own, which the layout would ask an unclipped one for
            axes.plot(steps, values, "o-", clip_on=not steps, **look)
            axes.plot(*_finite(rows, f"reference_{metric}"), "--", color=colour, alpha=0.6)
            lost = sum(metric in row for row in rows) - len(steps)
            if lost:
                axes.plot([], [], " ", label=f"{metric}: {lost} infinite or NaN, not drawn")
        if heading == SHARE_PANEL:
            # shares that are all 0 lie on the axis
            axes.set_ylim(0, max(0.1, axes.get_ylim()[1]))
        axes.set_title(textwrap.fill(heading, 52), fontsize=9)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        step_axis(axes.xaxis, most=6)
        if not any(np.size(line.get_xdata()) for line in axes.lines):
            # no point gives the axes a range
            axes.set_xlim(eval_steps[0] - 1, eval_steps[-1] + 1)
            axes.set_yticks([])
        if len(eval_steps) == 1:
            axes.set_xticks(eval_steps)
        axes.grid(alpha=0.3)
        # below the axes, where no curve is
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    set_title(figure.suptitle, title, width=round(TITLE * figure.get_figwidth()))
    return save_figure(figure, path)


def _draw_deciles(figure: Figure, axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """The validation loss by tenth of the noise levels, with the levels on a colour bar."""
    colours = colormaps["viridis"].resampled(10)
    for decile in range(10):
        steps, values = _finite(rows, f"val/loss_decile_{decile}")
        if steps:
            axes.plot(steps, values, ".-", color=colours(decile), linewidth=0.8, markersize=4)
    if axes.lines:
        bar = figure.colorbar(ScalarMappable(Normalize(0, 1), colours), ax=axes, fraction=0.05)
        bar.set_label("noise level", fontsize=8)
        bar.ax.tick_params(labelsize=7)


def _finite(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name) not in (None, "")]
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]
