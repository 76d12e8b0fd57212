"""The page that reports are written with: its tables can be sorted in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.pages.browser import needs_browser, seen
from vsa.pages import charts
from vsa.pages.charts import Panel, Series, plotly_panel
from vsa.pages.page import Cell, Page, Table

ROWS = [
    ("b", "10.5%", "9"),
    ("a", "9.25%", ""),
    ("d", "inf", "1.5k"),
    ("c", "-", "2M"),
]


def test_points_are_called_by_their_labels():
    series = Series(name="m", x=np.array([0.1, 0.5]), y=np.array([1.0, 2.0]), labels=["m <a>", "m & b"])
    (trace,) = plotly_panel(Panel(x_label="x", y_label="y", series=[series]), 10)["traces"]
    # plotly draws tags and entities
    assert trace["text"] == ["m &lt;a&gt;", "m &amp; b"]
    assert "%{text}" in trace["hovertemplate"]


@needs_browser
def test_a_click_on_a_heading_sorts_the_table(tmp_path: Path):
    page = Page(tmp_path / "page.html", title="t")
    page.table(Table(["name", "value", "size"], [[name, Cell(value, "77"), size] for name, value, size in ROWS]))
    page.write()
    found = seen(
        page.path,
        "const names = () => [...inside.querySelectorAll('tbody tr')].map(row => row.cells[0].textContent).join('');"
        "return [1, 1, 2, 2, 0, 0].map(column => {inside.querySelectorAll('th')[column].click(); return names()})",
    )
    # what is no number comes last both ways; thousands and millions count as such; what stands below counts nothing
    assert found == ["abdc", "dbac", "bdca", "cdba", "abcd", "dcba"]


@pytest.mark.parametrize(
    ("low", "high", "labels"), [(1, 3, None), (1e-3, 0.9, 9), (0.01, 9, 9), (1e-4, 1e3, 8), (1e-9, 1e9, 9)]
)
def test_labels_of_a_logarithmic_axis_are_few(low, high, labels):
    values = np.geomspace(low, high, 5)
    series = Series(name="a", x=values, y=values)
    axis = plotly_panel(Panel(x_label="x", y_label="y", series=[series], x_log=True), 10)["x"]
    decades = np.log10(high / low)
    if labels is None:
        # a short one is like a linear one
        assert "dtick" not in axis
    else:
        # plotly's D2 labels 1, 2 and 5, a number every power of ten to it
        each = decades * 3 if axis["dtick"] == "D2" else decades / axis["dtick"]
        assert each < labels
    assert "dtick" not in plotly_panel(Panel(x_label="x", y_label="y", series=[series]), 10)["x"]


def test_bars_are_drawn_on_paper_and_on_the_page():
    counts = Series(name="clips", x=np.array([8.0, 9.0, 24.0]), y=np.array([3.0, 1.0, 7.0]), bars=True)
    panel = Panel(x_label="frames per second", y_label="clips", series=[counts])
    (trace,) = plotly_panel(panel, 2)["traces"]
    # none is left out, however few points a curve may have
    assert (trace["type"], trace["x"], trace["y"]) == ("bar", [8, 9, 24], [3, 1, 7])
    axes = Figure().subplots()
    charts._draw_series(axes, panel)
    # no two overlap
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.9] * 3)
    assert [bar.get_height() for bar in axes.patches] == [3, 1, 7]
