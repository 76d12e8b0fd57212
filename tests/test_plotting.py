"""The axes and the one palette that pictures and pages share."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vsa.pages.charts import Panel, Series, draw_panel
from vsa.plotting import COLOURS, MISSED, QUERY, SELECTED, SOFT, log_axis, short_number, step_axis

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0025, "0.0025"),
        (0.1 + 0.2, "0.3"),
        (2000, "2000"),
        (50_000, "50k"),
        (2.5e6, "2.5M"),
        (-4e9, "-4G"),
        (5.004e15, "5.004P"),
    ],
)
def test_numbers_of_axes_are_short(value: float, text: str):
    assert short_number(value) == text


@pytest.mark.parametrize(("low", "high"), [(0.447, 0.45), (1.0, 2.1), (0.2, 2.0), (0.005, 3.0), (1e6, 1e12)])
def test_a_logarithmic_axis_has_plain_numbers_in_any_range(low: float, high: float):
    axes = Figure().add_subplot()
    axes.plot([0, 1], [low, high])
    axes.set_yscale("log")
    log_axis(axes.yaxis, low, high)
    limits = axes.get_ylim()
    ticks = [at for at in axes.get_yticks() if limits[0] <= at <= limits[1]]
    assert 3 <= len(ticks) <= 12
    texts = [axes.yaxis.get_major_formatter()(at) for at in ticks]
    assert len({*texts}) == len(texts)
    assert all(re.fullmatch(r"\d+(\.\d+)?[kMGT]?", text) for text in texts), texts


@pytest.mark.parametrize(("last", "ticks"), [(60, 10), (3000, 500), (1, 1)])
def test_steps_are_round(last: int, ticks: int):
    axes = Figure().add_subplot()
    axes.plot([0, last], [0, 1])
    step_axis(axes.xaxis)
    assert {float(at) % ticks for at in axes.get_xticks()} == {0}


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_of_many_floating_point_operations_has_no_factor_apart(tmp_path: Path, monkeypatch, log: bool):
    figures: list[Figure] = []
    monkeypatch.setattr("vsa.pages.charts.save_figure", lambda figure, path: figures.append(figure))
    series = Series(name="a", x=np.array([1e11, 2e11, 6e11]), y=np.array([2.1, 1.5, np.nan]))
    draw_panel(Panel(x_label="FLOPs", y_label="loss", series=[series], x_log=log, y_log=True), tmp_path / "a", title="")
    FigureCanvasAgg(figures[0]).draw()
    (axes,) = figures[0].axes
    assert axes.xaxis.get_offset_text().get_text() == ""
    texts = [text.get_text() for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels(which="both")]
    assert any(text.endswith("G") for text in texts)
    assert not any("$" in text for text in texts)


def test_pages_and_pictures_have_one_palette():
    page = (ROOT / "vsa/pages/page.css").read_text()
    inspector = (ROOT / "vsa/evaluation/inspection/page.css").read_text()
    site = (ROOT / "docs/site.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+);", part)) for part in page.split("@media", 2)[:2])
    # the inspector takes the colours of the page
    assert {name for name in re.findall(r"var\(--(\w+)\)", inspector)} <= light.keys()
    assert light["soft"] == SOFT
    marks = dict(re.findall(r"--(query|selected|missed): (#\w+)", inspector))
    assert marks == {"query": QUERY, "selected": SELECTED, "missed": MISSED}
    assert f"--md-primary-fg-color: {light['accent']}" in site
    assert f"--md-typeset-a-color: {dark['accent']}" in site


@pytest.mark.parametrize("ground", ["#ffffff", "#14181c"])
def test_every_curve_is_seen_on_light_and_on_dark_pages(ground: str):
    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for colour in COLOURS:
        bright, dim = sorted((luminance(colour), luminance(ground)), reverse=True)
        # graphics, WCAG 2.2, 1.4.11
        assert (bright + 0.05) / (dim + 0.05) >= 3, colour
