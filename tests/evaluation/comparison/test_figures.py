"""Charts of a comparison: every method is drawn, and can be told from the others."""

from __future__ import annotations

from pathlib import Path

import matplotlib.axes
import pytest

from tests.evaluation.comparison.conftest import row_of
from vsa.evaluation.comparison.figures import error_chart
from vsa.pages.charts import VISIBLE, draw_panel, plotly_panel
from vsa.plotting import COLOURS

METHODS = [f"method {number}" for number in range(VISIBLE + 3)]


def test_every_method_is_drawn_and_told_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chart = error_chart(
        [row_of(f"{name} at {x}", family=name, density=x, error_l1=1 - x) for name in METHODS for x in (0.25, 0.5)]
    )
    panel = chart.panels["density", "fields"]
    traces = plotly_panel(panel, 9)["traces"]
    assert [trace["name"] for trace in traces if trace["visible"]] == METHODS
    looks = {(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in traces}
    assert len(looks) == len(METHODS) > len(COLOURS)

    curves = []
    plot = matplotlib.axes.Axes.plot

    def record_plot(self, *args, **kwargs):
        curves.append((kwargs["label"].strip(), kwargs["color"], kwargs.get("marker")))
        return plot(self, *args, **kwargs)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", record_plot)
    draw_panel(panel, tmp_path / "error.png", title="")
    assert [name for name, *_ in curves] == METHODS
    assert len({(colour, marker) for _, colour, marker in curves}) == len(METHODS)
