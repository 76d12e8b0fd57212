"""Curves show what the numbers say: where the points are, what the legend names, nothing over anything else."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from vsa.evaluation import figures
from vsa.evaluation.figures import draw_evaluation, health_curves, loss_curve, read_metric
from vsa.pages import charts
from vsa.plotting import COLOURS

pytestmark = pytest.mark.filterwarnings("error")


def rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


BLUE, ORANGE = map(rgb, COLOURS[:2])


def write_metrics(path: Path, rows: list[tuple]) -> Path:
    path.write_text(
        "\n".join([",".join(map(str, row)) for row in [("step", "train/loss", "val/loss", "lr"), *rows]]) + "\n"
    )
    return path


def places(path: Path, colour: tuple[int, int, int]) -> np.ndarray:
    """Rows and columns `[N, 2]` of the pixels of a colour, as shares of the picture."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    hits = np.argwhere((np.abs(pixels - np.array(colour)) < 6).all(-1))
    return hits / np.array(pixels.shape[:2])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that were finished; they are kept here instead of being written."""
    kept_figures: list[Figure] = []
    for module in (figures, charts):
        monkeypatch.setattr(module, "save_figure", lambda figure, path: kept_figures.append(figure))
    return kept_figures


def test_read_metric_leaves_out_empty_cells(tmp_path: Path):
    metrics = write_metrics(tmp_path / "metrics.csv", [(10, 2.0, "", 0.1), (20, "", 1.5, ""), (30, 1.0, "", 0.1)])
    steps, values = read_metric(metrics, "train/loss")
    assert steps.tolist() == [10, 30]
    assert values.tolist() == [2.0, 1.0]
    # a kill has cut the last number
    metrics.write_text(metrics.read_text() + "40,0.")
    assert read_metric(metrics, "train/loss")[1].tolist() == [2.0, 1.0]
    metrics.write_text("step,train/loss\n10,2.0\n20,0.")
    assert read_metric(metrics, "train/loss")[1].tolist() == [2.0]
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
    hits = places(out, BLUE)
    # in the middle, below the legend
    point = hits[(hits[:, 0] > 0.2) & (np.abs(hits[:, 1] - 0.53) < 0.05)]
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
    expected = [np.mean(losses[max(0, i + 1 - window) : i + 1]) for i in range(rows)]
    assert np.allclose(np.asarray(line.get_ydata()), expected)


def drawn_texts(figure: Figure) -> list[Text]:
    """The texts of a figure that are seen, after it was laid out."""
    for _ in range(2):
        figure.draw_without_rendering()
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def assert_apart_and_whole(figure: Figure) -> None:
    """No two texts of a figure lie over each other, and none leaves it."""
    texts = drawn_texts(figure)
    # ticks beyond the limits have texts, which are not drawn
    beyond = {
        id(tick.label1)
        for axes in figure.axes
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        if not low <= tick.get_loc() <= high
    }
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if id(text) not in beyond]
    assert len(boxes) > 5
    for i, (name, box) in enumerate(boxes):
        assert figure.bbox.padded(1).containsx(box.x0), name
        assert figure.bbox.padded(1).containsx(box.x1), name
        assert figure.bbox.padded(1).containsy(box.y0), name
        assert figure.bbox.padded(1).containsy(box.y1), name
        for other, place in boxes[i + 1 :]:
            assert not box.padded(-0.5).overlaps(place.padded(-0.5)), (name, other)


LOSSES = {
    "hardly falls": (0.45, 0.447),
    "halves": (2.0, 1.0),
    "falls to a tenth": (2.0, 0.2),
    "falls by far": (300.0, 0.001),
}


@pytest.mark.parametrize(("first", "last"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("steps", [60, 30_000])
def test_a_loss_has_plain_numbers_at_its_axes_whatever_it_does(
    tmp_path: Path, drawn: list[Figure], first: float, last: float, steps: int
):
    rows = [(steps * i // 20, first * (last / first) ** (i / 20), "", "") for i in range(1, 21)]
    loss_curve(write_metrics(tmp_path / "metrics.csv", rows), tmp_path / "a.png", title="outputs/run")
    assert_apart_and_whole(drawn[0])
    (axes,) = drawn[0].axes
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        labels = [t.label1.get_text() for t in axis.get_major_ticks() if limits[0] <= t.get_loc() <= limits[1]]
        assert 3 <= len(labels) <= 12, labels
        assert all(re.fullmatch(r"\d+(\.\d+)?", text) for text in labels), labels
        # round ones
        assert axis is axes.yaxis or {float(text) % (steps / 6) for text in labels} == {0}


# evaluations


def evaluated(steps: tuple[int, ...], **metrics: Any) -> list[dict[str, Any]]:
    deciles = {f"val/loss_decile_{d}": 0.5 for d in range(10)}
    shares = {"black": 0, "uniform": 0, "non_finite": 0}
    return [
        {"step": step, "val/loss": 1.0, **deciles, **shares, "psnr": 20 + step / 100, "ssim": 0.9, "motion": 0.1}
        | metrics
        for step in steps
    ]


def test_evaluation_draws_only_measured_panels(tmp_path, drawn: list[Figure]):
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
        assert axes.get_xlabel() == "optimizer step"
        assert axes.get_ylabel()
    share = next(axes for axes in panels if "black" in axes.get_title())
    assert share.get_ylim() == (0, 0.1)
    assert "98%" in share.get_title()


EVALUATIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one checkpoint": ((60,), {}),
    "checkpoints at uneven steps": ((500, 1000, 1500, 3000, 12_000, 120_000), {"lpips": 0.2, "flicker": 1e-4}),
    "clips that cannot be measured": ((100, 200), {"psnr": math.inf, "ssim": math.nan, "lpips": math.nan}),
}


@pytest.mark.parametrize(("steps", "metrics"), EVALUATIONS.values(), ids=EVALUATIONS)
def test_no_text_of_an_evaluation_lies_over_another(tmp_path: Path, drawn: list[Figure], steps, metrics):
    draw_evaluation(evaluated(steps, **metrics), tmp_path / "a.png", title="a run with a long name " * 20)
    assert_apart_and_whole(drawn[0])
    for axes in drawn[0].axes:
        if len(steps) == 1 and axes.get_xlabel():
            assert [text.get_text() for text in axes.get_xticklabels()] == ["60"]


def test_curves_have_the_colours_of_the_pages(tmp_path: Path, drawn: list[Figure]):
    rows = ["step,fake_score/loss,generated/std,generated/saturation", *(f"{s},{1 / s},1,0" for s in (1, 2, 3))]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    health_curves(tmp_path / "metrics.csv", tmp_path / "a.png", title="run")
    draw_evaluation(evaluated((100, 200)), tmp_path / "b.png", title="run")
    assert_apart_and_whole(drawn[0])
    lines = [line for figure in drawn for axes in figure.axes for line in axes.lines if line.get_linewidth() > 1]
    assert len(lines) > 5
    assert {line.get_color() for line in lines} <= {*COLOURS}


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
