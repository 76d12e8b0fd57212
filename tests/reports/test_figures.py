"""Figures of a report: what they draw of runs, and the forms they are written in."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.reports.fake_runs import write_run
from vsa.pages.charts import Chart, Heat, Panel, Series, draw_panel, plotly_panel, write_csv
from vsa.reports.figures import charts, sequence_length
from vsa.reports.header import not_shown
from vsa.reports.runs import find_runs
from vsa.reports.variants import compared, group


def drawn(folder: Path) -> dict[str, Chart]:
    return {chart.key: chart for chart in charts(compared(group(find_runs([folder])[1])))}


def test_seeds_are_a_band_over_every_cost(tmp_path: Path):
    for seed, loss in enumerate((0.4, 0.6)):
        write_run(tmp_path / f"a-seed{seed}", seed=seed, loss=loss, seconds=0.1 + seed / 10, flops=2.0, tokens=50.0)
    panels = drawn(tmp_path)["loss"].panels
    expected = {"flops": [40, 80], "tokens": [1000, 2000], "seconds": [0.15 * 20, 0.15 * 40], "steps": [20, 40]}
    for over, x in expected.items():
        panel = panels["validation", over]
        assert isinstance(panel, Panel)
        (series,) = panel.series
        assert series.x.tolist() == pytest.approx(x)
        # halfway the loss is twice that of the end
        for values, loss in ((series.low, 0.4), (series.y, 0.5), (series.high, 0.6)):
            assert values is not None
            assert values.tolist() == pytest.approx([2 * loss, loss])


def test_top_k_by_length(tmp_path: Path):
    for k in (2, 4):
        for length, loss in ((100, 0.5), (400, 0.4)):
            for seed in (0, 1):
                where = tmp_path / f"k{k}-n{length}-seed{seed}"
                own = {"topk": float(k), "tokens": 4.0 * length, "data__size": length, "sparsity__topk": k}
                write_run(where, seed=seed, loss=loss + k / 100 + seed / 10, **own)
    chart = drawn(tmp_path)["topk_by_length"]
    heat = chart.panels[()]
    assert isinstance(heat, Heat)
    assert (heat.rows, heat.columns) == (["2", "4"], ["100", "400"])
    assert np.allclose(heat.values, [[0.57, 0.47], [0.59, 0.49]])
    assert [row[:2] for row in chart.rows] == [(100, 2), (100, 4), (400, 2), (400, 4)]
    traces = plotly_panel(heat, 100)["traces"]
    assert traces[0]["z"] == [[0.57, 0.47], [0.59, 0.49]]
    draw_panel(heat, tmp_path / "heat.png", title="heat")
    assert Image.open(tmp_path / "heat.png").size[0] > 400
    # a run of one length shows no such thing, and is told why
    runs = find_runs([tmp_path / "k2-n100-seed0", tmp_path / "k4-n100-seed0"])[1]
    variants = compared(group(runs))
    assert "topk_by_length" not in {chart.key for chart in charts(variants)}
    assert any("lengths found: 1, values of top-k: 2" in line for line in not_shown(variants, []))
    assert sequence_length(runs[0]) == 100


def test_scaling_is_fitted_by_family(tmp_path: Path):
    for family, scale in (("a", 3.0), ("b", 4.0)):
        for layers, flops in ((2, 1e6), (4, 1e7), (8, 1e8)):
            loss = scale * (flops * 40) ** -0.1
            sparsity = 0.5 if family == "a" else 0.75
            where = tmp_path / f"{family}{layers}"
            write_run(where, loss=loss, flops=flops, model__num_layers=layers, sparsity__sparsity=sparsity)
    rows = {row[1]: row for row in drawn(tmp_path)["scaling"].rows}
    assert set(rows) == {"sparsity=0.5", "sparsity=0.75"}
    for name, scale in (("sparsity=0.5", 3.0), ("sparsity=0.75", 4.0)):
        over, _, size, loss, fit, exponent, low, high = rows[name]
        assert (over, size) == ("flops", 4e9)
        assert (exponent, loss) == (pytest.approx(-0.1), pytest.approx(scale * size**-0.1))
        assert fit == pytest.approx(loss)
        assert low <= exponent <= high
    # two sizes are too few
    few = [tmp_path / name for name in ("a2", "a4")]
    variants = compared(group(find_runs(few)[1]))
    assert "scaling" not in {chart.key for chart in charts(variants)}
    assert any(line.startswith("Scaling: needs at least three sizes") for line in not_shown(variants, []))


def test_learning_rates_and_timesteps(tmp_path: Path):
    for name, sparsity in (("a", 0.5), ("b", 0.75)):
        for lr in (0.1, 0.01, 0.001):
            loss = 0.5 + abs(math.log10(lr) + 2) / 10 + sparsity / 100
            write_run(tmp_path / f"{name}-lr{lr}", loss=loss, optim__lr=lr, sparsity__sparsity=sparsity)
    drawings = drawn(tmp_path)
    panel = drawings["learning_rate"].panels[()]
    assert isinstance(panel, Panel)
    assert {series.name: series.x.tolist() for series in panel.series} == {key: [0.001, 0.01, 0.1] for key in "ab"}
    assert panel.series[0].y.tolist() == pytest.approx([0.605, 0.505, 0.605])
    assert [row[1] for row in drawings["learning_rate"].rows if row[4]] == [0.01, 0.01]
    deciles = drawings["loss_by_timestep"].panels[()]
    assert isinstance(deciles, Panel)
    # the deciles that were logged, at the best rate
    assert deciles.series[0].x.tolist() == [0.25, 0.75]
    assert deciles.series[0].y.tolist() == pytest.approx([0.505 / 2, 0.505 * 1.5])


def test_forms_of_a_panel(tmp_path: Path):
    x = np.arange(1.0, 5001)
    # signs that plotly and matplotlib would read as their own
    name = "_<b>$x_"
    y = np.where(x == 3, math.inf, 1 / x)
    line = Series(name=name, x=x, y=y, low=y / 2, high=y * 2)
    points = Series(name="points", x=x[:2], y=y[:2], low=y[:2] / 2, high=y[:2] * 2, points=True, colour=1)
    panel = Panel(x_label="a <i>", y_label="b", series=[line, points], x_log=True, y_log=True)
    form = plotly_panel(panel, 100)
    json.dumps(form, allow_nan=False)
    assert form["x"] == {"title": {"text": "a &lt;i&gt;"}, "type": "log", "dtick": 1}
    low, high, main, dots = form["traces"]
    # the legend of the page takes text, plotly takes tags
    assert (main["label"], main["name"]) == (name, "_&lt;b&gt;$x_")
    assert len(main["x"]) == len(low["y"]) == len(high["y"]) == 100
    assert (main["x"][0], main["x"][-1], main["y"][-1]) == (1.0, 5000.0, 0.0002)
    assert (low["band"], high["fill"]) == (True, "tonexty")
    assert dots["error_y"]["array"] == pytest.approx([1.0, 0.5])
    draw_panel(panel, tmp_path / "panel.png", title=name)
    assert np.asarray(Image.open(tmp_path / "panel.png")).std() > 5
    # of many curves the first are drawn, the rest can be turned on
    many = [Series(name=str(i), x=x[:2], y=y[:2]) for i in range(15)]
    visibility = [trace["visible"] for trace in plotly_panel(Panel(x_label="", y_label="", series=many), 9)["traces"]]
    assert visibility == [True] * 12 + [False] * 3
    path = write_csv(tmp_path / "t.csv", ("a", "b"), [(1, None), ("x,y", 0.1)])
    with open(path, newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", ""], ["x,y", "0.1"]]
