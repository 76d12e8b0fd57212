"""Description of a figure, which is written as CSV rows, as PNG and as plotly traces."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from vsa.files import atomic_file
from vsa.plotting import COLOURS, fit_text, log_axis, save_figure, set_title, short_number, step_axis

VISIBLE = 12
"""Number of curves that are drawn at first; the legend lists the others too."""

_MARKERS = {"o": "circle", "^": "triangle-up", "s": "square"}
"""Markers of points, from Matplotlib to plotly; each repetition of the colours uses the next marker."""


@dataclass(frozen=True)
class Series:
    """One curve or cloud of points.

    Args:
        name: name in the legend.
        x, y: coordinates, of the same length.
        low, high: a band around y, or error bars of points; None for neither.
        colour: index of the colour.
        points: whether points are drawn instead of a line.
        bars: whether bars are drawn instead of a line.
        dashed: whether the line is dashed.
        faint: whether the line is thin and transparent.
        labels: hover text of each point; empty for the name.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    colour: int = 0
    points: bool = False
    bars: bool = False
    dashed: bool = False
    faint: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Panel:
    """Curves in one pair of axes.

    Args:
        x_label, y_label: labels of the axes.
        series: curves, the best first.
        x_log, y_log: whether an axis is logarithmic.
        y_zero: whether the linear y axis begins at 0.
        steps: whether the x axis has whole numbers.
        visible: number of curves that are drawn at first.
    """

    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    y_zero: bool = False
    steps: bool = False
    visible: int = VISIBLE


@dataclass(frozen=True)
class Heat:
    """A heat map.

    Args:
        x_label, y_label: labels of the axes.
        columns, rows: labels of the columns and rows, ascending.
        values: `[rows, columns]`, NaN for missing values.
    """

    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure that shows one of its panels at a time.

    Args:
        key: file name without ending.
        title: title above the figure.
        note: a sentence or two on how to read it.
        switches: names of the parts of a panel's key.
        panels: panels by key; the first one is shown first.
        columns: columns of the CSV.
        rows: rows of the CSV.
        drawn: keys of the panels that are also written as PNG; None for all.
    """

    key: str
    title: str
    note: str
    panels: Mapping[tuple[str, ...], Panel | Heat]
    columns: Sequence[str] = ()
    rows: Iterable[Sequence[Any]] = ()
    switches: Sequence[str] = ()
    drawn: Iterable[tuple[str, ...]] | None = None


def thinned(count: int, most: int) -> np.ndarray:
    """Indices of at most `most` of `count` points, evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) if count else np.array([], int)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a table; None becomes an empty cell."""
    with atomic_file(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def draw_panel(panel: Panel | Heat, path: str | Path, *, title: str) -> Path:
    """Draw one panel as a PNG."""
    return draw_panels([panel], path, title=title)


def draw_panels(panels: Sequence[Panel | Heat], path: str | Path, *, title: str) -> Path:
    """Draw panels as a PNG, one below the other; those of several share their horizontal axis."""
    figure = Figure(figsize=(8, max(4.8, 2.7 * len(panels))), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(grid, panels, strict=True):
        if isinstance(panel, Heat):
            _draw_heat(figure, axes, panel)
        else:
            _draw_series(axes, panel)
            axes.grid(alpha=0.25, which="major")
        axes.set_ylabel(panel.y_label)
    grid[-1].set_xlabel(panels[-1].x_label)
    set_title(grid[0].set_title, title, width=90)
    return save_figure(figure, path)


def _scale(axis: XAxis | YAxis, values: Sequence[np.ndarray], *, log: bool, steps: bool = False) -> None:
    # a logarithmic axis needs a positive value, which empty series lack
    positive = _positive(values)
    if log and len(positive):
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        log_axis(axis, positive.min(), positive.max())
    elif steps:
        step_axis(axis)
    else:
        # no factor apart from the numbers
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def _draw_series(axes: Axes, panel: Panel) -> None:
    drawn = [_finite(series) for series in panel.series[: panel.visible] if len(series.x)]
    for series in drawn:
        colour, marker = COLOURS[series.colour % len(COLOURS)], list(_MARKERS)[_marker(series)]
        # Matplotlib would read $ as a formula, and hide a label that starts with an underscore
        label = fit_text(series.name, 40, 1).text.replace("$", r"\$")
        label = f" {label}" if label.startswith("_") else label or "_"
        if series.points and series.low is not None and series.high is not None:
            error = np.stack([series.y - series.low, series.high - series.y])
            axes.errorbar(series.x, series.y, yerr=error, fmt=marker, color=colour, capsize=3, label=label)
        elif series.points:
            axes.plot(series.x, series.y, marker, color=colour, label=label)
        elif series.bars:
            width = 0.9 * float(np.diff(series.x).min()) if len(series.x) > 1 else 1.0
            axes.bar(series.x, series.y, width, color=colour, label=label)
        else:
            picked = thinned(len(series.x), 2000)
            # markers for short curves
            few = {"marker": marker, "markersize": 4} if len(picked) <= 20 and not series.dashed else {}
            style = "--" if series.dashed else "-"
            shape: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.35} if series.faint else {"linewidth": 1.3, **few}
            axes.plot(series.x[picked], series.y[picked], style, color=colour, label=label, **shape)
            if series.low is not None and series.high is not None:
                band = series.low[picked], series.high[picked]
                axes.fill_between(series.x[picked], *band, color=colour, alpha=0.18, linewidth=0)
    _scale(axes.xaxis, [series.x for series in panel.series], log=panel.x_log, steps=panel.steps)
    _scale(axes.yaxis, [series.y for series in panel.series], log=panel.y_log)
    if panel.y_zero:
        axes.set_ylim(bottom=0)
    if not drawn:
        axes.text(0.5, 0.5, "nothing logged yet", ha="center", transform=axes.transAxes)
    elif len(panel.series) > 8:
        # outside of the axes, because a long legend would hide the curves
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=1 + len(axes.lines) // 24)
    else:
        axes.legend(fontsize=8)


def _marker(series: Series) -> int:
    """Index of the marker of a series."""
    return series.colour // len(COLOURS) % len(_MARKERS)


def _finite(series: Series) -> Series:
    """The series with gaps in place of infinite values."""
    edges = {name: getattr(series, name) for name in ("y", "low", "high")}
    return replace(series, **{name: np.where(np.isfinite(v), v, np.nan) for name, v in edges.items() if v is not None})


def _draw_heat(figure: Figure, axes: Axes, panel: Heat) -> None:
    picture = axes.imshow(panel.values, aspect="auto", cmap=colormaps["viridis_r"], origin="lower")
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    figure.colorbar(picture, ax=axes)
    middle = (np.nanmin(panel.values) + np.nanmax(panel.values)) / 2
    for (row, column), value in np.ndenumerate(panel.values):
        if np.isfinite(value):
            ink = "white" if value > middle else "black"
            axes.text(column, row, f"{value:.4g}", ha="center", va="center", color=ink, fontsize=9)


def plotly_panel(panel: Panel | Heat, points: int) -> dict[str, Any]:
    """Traces and axes of a panel, with at most `points` points per curve."""
    labelled = {"x": panel.x_label, "y": panel.y_label}
    axes: dict[str, dict[str, Any]] = {axis: {"title": {"text": _plain(text)}} for axis, text in labelled.items()}
    if isinstance(panel, Heat):
        for axis, labels in (("x", panel.columns), ("y", panel.rows)):
            axes[axis] |= {"type": "category", "categoryarray": [*labels], "categoryorder": "array"}
        cells = [[f"{value:.4g}" if math.isfinite(value) else "" for value in row] for row in panel.values.tolist()]
        trace = {
            "type": "heatmap",
            "x": [*panel.columns],
            "y": [*panel.rows],
            "z": [_numbers(row) for row in panel.values],
            "text": cells,
            "texttemplate": "%{text}",
            "colorscale": "Viridis",
            "reversescale": True,
            "hovertemplate": f"{_plain(panel.x_label)} %{{x}}<br>{_plain(panel.y_label)} %{{y}}<br>%{{z}}",
        }
        return {"traces": [trace], **axes}
    for axis, log in (("x", panel.x_log), ("y", panel.y_log)):
        axes[axis] |= {"type": "log" if log else "linear"}
        if log and len(positive := _positive([getattr(series, axis) for series in panel.series])):
            decades = math.log10(positive.max() / positive.min())
            # those that plotly chooses would overlap: 1, 2, 5, or whole powers of ten
            axes[axis] |= {} if decades < 0.6 else {"dtick": "D2" if decades < 3 else math.ceil(decades / 8)}
    if panel.y_zero:
        axes["y"] |= {"rangemode": "tozero"}
    traces = [
        trace
        for place, series in enumerate(panel.series)
        for trace in _traces(series, points, visible=place < panel.visible)
    ]
    return {"traces": traces, **axes}


def _positive(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([each[np.isfinite(each) & (each > 0)] for each in values] or [np.array([])])


def _traces(series: Series, points: int, *, visible: bool) -> list[dict[str, Any]]:
    picked = np.arange(len(series.x)) if series.points or series.bars else thinned(len(series.x), points)
    colour, symbol = COLOURS[series.colour % len(COLOURS)], list(_MARKERS.values())[_marker(series)]
    x = _numbers(series.x[picked])
    # the legend of the page shows `label` as plain text
    common = {"type": "scatter", "name": _plain(series.name), "label": series.name, "visible": visible, "x": x}
    line = {"color": colour, "width": 1 if series.faint else 2, "dash": "dash" if series.dashed else "solid"}
    main = common | {"y": _numbers(series.y[picked]), "mode": "lines", "line": line}
    if series.faint:
        main["opacity"] = 0.4
    elif not series.points and len(picked) <= 20:
        main |= {
            "mode": "lines+markers",
            "marker": {"size": 8 if series.labels else 5, "color": colour, "symbol": symbol},
        }
    if series.labels:
        main |= {"text": [_plain(series.labels[i]) for i in picked.tolist()], "hovertemplate": "%{text}<br>%{x}, %{y}"}
    if series.low is None or series.high is None:
        bands = []
    elif series.points:
        above, below = (series.high - series.y)[picked], (series.y - series.low)[picked]
        main["error_y"] = {"type": "data", "array": _numbers(above), "arrayminus": _numbers(below), "color": colour}
        bands = []
    else:
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "band": True}
        low = common | edge | {"y": _numbers(series.low[picked])}
        high = common | edge | {"y": _numbers(series.high[picked]), "fill": "tonexty", "fillcolor": f"{colour}2e"}
        bands = [low, high]
    if series.bars:
        main |= {"type": "bar", "marker": {"color": colour}}
    if series.points:
        main |= {"mode": "markers", "marker": {"size": 9, "color": colour, "symbol": symbol}}
    return [*bands, main]


def _numbers(values: Iterable[float]) -> list[float | None]:
    # JSON has no NaN, and five digits suffice on a screen
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def _plain(text: str) -> str:
    """Text escaped for plotly, which interprets tags and entities in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
