"""Curves show what the numbers say: where the points are, what the legend names, nothing over anything else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from vsa.evaluation import figures
from vsa.evaluation.figures import draw_evaluation, loss_curve, read_metric

pytestmark = pytest.mark.filterwarnings("error")

BLUE, ORANGE = (31, 119, 180), (255, 127, 14)


def write_metrics(path: Path, rows: list[tuple]) -> Path:
    path.write_text(
        "\n".join([",".join(map(str, row)) for row in [("step", "train/loss", "val/loss", "lr"), *rows]]) + "\n"
    )
    return path


def places(path: Path, colour: tuple[int, int, int]) -> np.ndarray:
    """Rows and columns `[N, 2]` of the pixels of a colour, as shares of the picture."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    found = np.argwhere((np.abs(pixels - np.array(colour)) < 6).all(-1))
    return found / np.array(pixels.shape[:2])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that were finished; they are kept here instead of being written."""
    kept: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: kept.append(figure))
    return kept


def test_read_metric_leaves_out_empty_cells(tmp_path: Path):
    metrics = write_metrics(tmp_path / "metrics.csv", [(10, 2.0, "", 0.1), (20, "", 1.5, ""), (30, 1.0, "", 0.1)])
    steps, values = read_metric(metrics, "train/loss")
    assert steps.tolist() == [10, 30]
    assert values.tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match=r"metrics\.csv has no column loss, it has step, train/loss"):
        read_metric(metrics, "loss")
    write_metrics(metrics, [(10, "abc", "", "")])
    with pytest.raises(ValueError, match=r"metrics\.csv, column train/loss: .*abc"):
        read_metric(metrics, "train/loss")


def test_loss_curve_is_a_png_of_the_data(tmp_path: Path):
    rows = [(s, 3 / s, 2 / s if s % 4 == 0 else "", 0.1) for s in range(1, 40)]
    out = loss_curve(write_metrics(tmp_path / "metrics.csv", rows), tmp_path / "new" / "loss.png", title="run")
    assert [p.name for p in out.parent.iterdir()] == ["loss.png"]
    train, val = places(out, BLUE), places(out, ORANGE)
    # from the first step to the last, falling; the legend is at the right above the curves
    assert train[:, 1].max() - train[:, 1].min() > 0.7
    left, right = train[train[:, 1] < 0.4], train[(train[:, 1] > 0.6) & (train[:, 0] > 0.4)]
    assert left[:, 0].mean() < 0.5 < right[:, 0].mean()
    # 2 / s lies below 3 / s everywhere, and begins at step 4
    curve = val[val[:, 0] > 0.3]
    assert curve[:, 1].min() > train[:, 1].min() + 0.03
    at = (train[:, 1] > 0.68) & (train[:, 1] < 0.72), (curve[:, 1] > 0.68) & (curve[:, 1] < 0.72)
    assert train[at[0]][:, 0].max() < curve[at[1]][:, 0].mean()


@pytest.mark.parametrize("loss", [0.0, 1.5])
def test_a_loss_curve_of_one_point_shows_the_point(tmp_path: Path, loss: float):
    out = loss_curve(write_metrics(tmp_path / "metrics.csv", [(10, loss, "", 0.1)]), tmp_path / "loss.png")
    found = places(out, BLUE)
    # in the middle, below the legend
    point = found[(found[:, 0] > 0.2) & (np.abs(found[:, 1] - 0.53) < 0.05)]
    assert 9 < len(point) < 100
    # control: nothing was logged
    assert not len(places(loss_curve(write_metrics(tmp_path / "metrics.csv", []), tmp_path / "empty.png"), BLUE))


@pytest.mark.parametrize(("rows", "named"), [(59, "train"), (150, "train, mean of 5 rows")])
def test_the_legend_names_the_line_that_is_looked_at(tmp_path: Path, drawn: list[Figure], rows: int, named: str):
    losses = [2 + math.sin(step) for step in range(rows)]
    loss_curve(
        write_metrics(tmp_path / "metrics.csv", [(s, x, "", "") for s, x in enumerate(losses)]), tmp_path / "a.png"
    )
    (axes,) = drawn[0].axes
    legend: Any = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [named]
    line = next(line for line in axes.lines if line.get_label() == named)
    assert line.get_alpha() is None
    window = 1 if named == "train" else 5
    wanted = [np.mean(losses[max(0, i + 1 - window) : i + 1]) for i in range(rows)]
    assert np.allclose(np.asarray(line.get_ydata()), wanted)


# evaluations


def evaluated(steps: tuple[int, ...], **metrics: Any) -> list[dict[str, Any]]:
    deciles = {f"val/loss_decile_{d}": 0.5 for d in range(10)}
    shares = {"black": 0, "uniform": 0, "non_finite": 0}
    return [
        {"step": step, "val/loss": 1.0, **deciles, **shares, "psnr": 20 + step / 100, "ssim": 0.9, "motion": 0.1}
        | metrics
        for step in steps
    ]


def test_an_evaluation_has_a_panel_for_what_was_measured_and_nothing_over_its_curves(tmp_path, drawn: list[Figure]):
    draw_evaluation(evaluated((100, 200)), tmp_path / "a.png", title="run")
    draw_evaluation(evaluated((100, 200), lpips=0.2), tmp_path / "b.png", title="run")
    titles = [[axes.get_title().replace("\n", " ") for axes in figure.axes if axes.lines] for figure in drawn]
    assert len(titles[0]) == 5
    assert not any("LPIPS" in title for title in titles[0])
    assert sum("LPIPS" in title for title in titles[1]) == 1
    FigureCanvasAgg(drawn[1]).draw()
    panels = [axes for axes in drawn[1].axes if axes.lines]
    boxes = [axes.get_window_extent() for axes in panels]
    for axes in panels:
        legend: Any = axes.get_legend()
        assert not any(box.overlaps(legend.get_window_extent()) for box in boxes)
        # labels within the axes lay over each other
        assert not axes.texts
    share = next(axes for axes in panels if "black" in axes.get_title())
    assert share.get_ylim() == (0, 0.1)
    assert "98%" in share.get_title()


def test_every_noise_level_of_one_checkpoint_is_seen(tmp_path: Path):
    deciles = {f"val/loss_decile_{d}": d / 10 for d in range(10)}
    draw_evaluation([{"step": 100, "val/loss": 0.5, **deciles}], tmp_path / "a.png")
    # first and last colour: of the points, and on the colour bar
    for colour in ((68, 1, 84), (253, 231, 37)):
        columns = places(tmp_path / "a.png", colour)[:, 1]
        assert (columns < 0.75).sum() > 3
        assert (columns > 0.8).sum() > 50


def test_shares_above_the_least_axis_are_drawn_whole(tmp_path: Path, drawn: list[Figure]):
    draw_evaluation(evaluated((100,), black=1.0), tmp_path / "a.png")
    (share,) = (axes for axes in drawn[0].axes if "black" in axes.get_title())
    assert share.get_ylim()[0] == 0
    assert share.get_ylim()[1] >= 1
