"""Charts and tables of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import permutations
from statistics import fmean
from typing import Any

import numpy as np

from vsa.attention.denoising import DenoisingPlan
from vsa.evaluation.comparison.agreement import Denoised, is_closer
from vsa.evaluation.comparison.measure import Row
from vsa.evaluation.comparison.methods import AS_TRAINED
from vsa.pages.charts import Chart, Panel, Series
from vsa.pages.page import Cell, Table

DENSITY = "density: computed token pairs"
MEANT = ("density", "visited", "recall", "error_l1", "error_l2", "ms", "attention_ms", "prediction_ms", "speedup")
"""Numbers of a row that have a mean over captures."""

HEADINGS = [
    ("method", "name of its config, budget and settings"),
    ("kept", "kv tiles of a query tile, of how many"),
    ("density", "computed token pairs over all pairs; below: pairs in visited tiles, where fine masks make them more"),
    ("recall", "share of the exact attention mass on the computed pairs, mean over heads"),
    ("recall p5", "its 5th percentile over the heads of all clips, layers and timesteps"),
    ("L1 error", "sum |out - exact| / sum |exact|"),
    ("L2 error", "the same with squares, under a root"),
    ("speed-up", "over dense attention, timed in turns with it"),
    ("ms", "median time of a layer: prediction and attention, no projections, no permutation"),
    ("attention", "ms of attention to the listed tiles alone"),
    ("prediction", "ms of the rest: pooling, scores, selection, lists; coarse outputs, pooled tails, gates"),
]


def plan_text(plan: DenoisingPlan) -> str:
    """A plan as a suffix of a heading."""
    changes = ", ".join(f"{name}={value}" for name, value in plan.changes().items())
    return f"; all but dense attention with {changes}" if changes else ""


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by group: all, each layer and each timestep of a model; one group per kind of synthetic tensors."""
    if any(row.timestep is None for row in rows):
        return {name: [row for row in rows if row.capture == name] for name in dict.fromkeys(r.capture for r in rows)}
    rows_by_group = {"all": [*rows]} if rows else {}
    for text, key in (("layer {}", "layer"), ("timestep {:g}", "timestep")):
        values = list(dict.fromkeys(getattr(row, key) for row in rows))
        if len(values) > 1:
            rows_by_group |= {text.format(value): [r for r in rows if getattr(r, key) == value] for value in values}
    return rows_by_group


def is_part(group: str) -> bool:
    """Whether a group is one layer or one timestep of a model."""
    return group.startswith(("layer ", "timestep "))


def means(rows: Sequence[Row]) -> list[Row]:
    """One row a method with the means over the captures and the heads of all, in the order of the methods."""
    mean_rows = []
    for name in dict.fromkeys(row.method for row in rows):
        some = [row for row in rows if row.method == name]
        values = {key: [v for row in some if (v := getattr(row, key)) is not None] for key in MEANT}
        numbers = {key: fmean(v) if v else None for key, v in values.items()}
        heads = [value for row in some for value in row.head_recall or ()]
        mean_rows.append(replace(some[0], **numbers, head_recall=heads or None))
    return mean_rows


def values_of(rows: Sequence[Any], columns: Sequence[str]) -> list[list[Any]]:
    """Values of rows for a CSV with these columns."""
    return [[getattr(row, column) for column in columns] for row in rows]


def values_by_group(rows: Sequence[Row], columns: Sequence[str]) -> list[list[Any]]:
    """Means of each group and method for a CSV: the group, then these columns."""
    return [[group, *line] for group, some in groups(rows).items() for line in values_of(means(some), columns)]


def error_chart(rows: Sequence[Row]) -> Chart:
    """Error over what it costs."""
    costs = {
        "density": ("density", DENSITY),
        "time": ("ms", "milliseconds of a layer"),
        "speed-up": ("speedup", "speed-up over dense attention"),
    }
    panels = {
        (over, group): _panel(rows, means(some), x, "error_l1", x_label=label, y_label="relative L1 error")
        for group, some in groups(rows).items()
        for over, (x, label) in costs.items()
    }
    columns = ("method", "density", "ms", "speedup", "error_l1")
    return Chart(
        key="error",
        title="Error against density and speed",
        note="A line joins the budgets of a method; lower is better. Oracle tiles hold the most attention weights of "
        "as many whole tiles, which is not always the least error; random tiles show what any selection reaches.",
        panels=panels,
        drawn=[key for key in panels if not is_part(key[-1])],
        switches=("over", "captures"),
        columns=("captures", *columns),
        rows=values_by_group(rows, columns),
    )


def recall_chart(rows: Sequence[Row]) -> Chart:
    """Recall over density."""
    over = {"mean": ("recall", "recall of the attention mass"), "p5": ("recall_p5", "5th percentile by head")}
    panels = {
        (heads, group): _panel(rows, means(some), "density", y, x_label=DENSITY, y_label=label)
        for group, some in groups(rows).items()
        for heads, (y, label) in over.items()
    }
    columns = ("method", "density", "recall", "recall_p5")
    return Chart(
        key="recall",
        title="Recall of the attention mass",
        note="Share of dense attention's exact softmax weights that lies on the computed pairs; higher is better. "
        "p5: the 5th percentile over the heads of all clips, layers and timesteps.",
        panels=panels,
        drawn=[key for key in panels if not is_part(key[-1])],
        switches=("heads", "captures"),
        columns=("captures", *columns),
        rows=values_by_group(rows, columns),
    )


def denoising_chart(rows: Sequence[Denoised]) -> Chart:
    """PSNR, SSIM and cosine similarity of latents over what a run costs."""
    qualities = {"PSNR": "PSNR against dense, dB", "SSIM": "SSIM against dense", "cosine": "cosine of latents to dense"}
    costs = {"density": ("density", DENSITY), "time": ("seconds", "seconds of sampling")}
    columns = [field.name for field in fields(Denoised) if field.name not in ("family", "frames")]
    return Chart(
        key="denoising",
        title="Whole denoising runs",
        note="Clips of the same weights, prompts and noise against those of dense attention; higher is better.",
        panels={
            (name, over): _panel(rows, rows, x, name.lower(), x_label=label, y_label=y_label)
            for name, y_label in qualities.items()
            for over, (x, label) in costs.items()
        },
        switches=("measure", "over"),
        columns=columns,
        rows=values_of(rows, columns),
    )


def families(rows: Sequence[Row] | Sequence[Denoised]) -> dict[str, int]:
    """A colour for every method, the same in all figures."""
    return {family: place for place, family in enumerate(dict.fromkeys(row.family for row in rows))}


def _panel(every: Sequence[Any], rows: Sequence[Any], x: str, y: str, *, x_label: str, y_label: str) -> Panel:
    """Curves of the families of `every`: values `x` and `y` of their rows that have both."""
    series = []
    for family, colour in families(every).items():
        some = [row for row in rows if row.family == family and getattr(row, y) is not None]
        some.sort(key=lambda row: getattr(row, x))
        if some:
            x_values, y_values = np.array(values_of(some, (x, y)), dtype=float).T
            labels = [row.method for row in some]
            series.append(Series(name=family, x=x_values, y=y_values, colour=colour, labels=labels))
    # in the order of the methods, none of which is more important
    return Panel(x_label=x_label, y_label=y_label, series=series, x_log=x == "ms", visible=len(series))


def result_table(rows: Sequence[Row], title: str = "", note: str = "") -> Table:
    """The means of each method."""
    colours = families(rows)
    cells = []
    for row in means(rows):
        visited = "" if f"{row.visited:.3f}" == f"{row.density:.3f}" else f"visited {row.visited:.1%}"
        texts = [share(row.recall), share(row.recall_p5), number(row.error_l1), number(row.error_l2)]
        texts += [f"{row.speedup:.2f}", number(row.ms), number(row.attention_ms), number(row.prediction_ms)]
        topk = "" if row.topk is None else f"{row.topk} of {row.tiles}"
        cells.append([_named(row, colours), topk, Cell(share(row.density), visited), *texts])
    return Table(HEADINGS, cells, title=title, note=note, marked=[0])


def place_table(rows: Sequence[Row]) -> Table | None:
    """Error of each method by layer and timestep, recall below it; None where there is one place."""
    places = list(dict.fromkeys((row.layer, row.timestep) for row in rows if row.timestep is not None))
    if len(places) < 2:
        return None
    colours, cells = families(rows), []
    for name in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == name]
        line = [Cell(text=name, colour=colours[own[0].family])]
        for place in places:
            (mean,) = means([row for row in own if (row.layer, row.timestep) == place])
            line.append(Cell(text=number(mean.error_l1), sub="" if mean.recall is None else share(mean.recall)))
        cells.append(line)
    place_headings = [(f"layer {layer}, {timestep:g}", "L1 error; below: recall") for layer, timestep in places]
    return Table(
        ["method", *place_headings],
        cells,
        title="By layer and timestep",
        note="L1 error by layer and timestep, recall below it.",
        marked=[0],
        long=[0],
    )


def denoising_table(rows: Sequence[Denoised], note: str = "") -> Table:
    """Each method in whole denoising runs."""
    colours = families(rows)
    headings = [
        ("method", ""),
        ("density", "computed token pairs over all pairs, mean over steps and layers, measured at half noise"),
        ("PSNR", "of all pixels against dense attention, dB; below: 95% interval over the prompts"),
        ("cosine", "similarity of latents to those of dense attention, mean over the clips; below: its interval"),
        ("SSIM", "against dense attention, mean over the clips"),
        ("seconds", "of sampling, without text encoder and codec"),
        ("speed-up", "over dense attention, each measured once"),
    ]
    cells = []
    for row in rows:
        psnr = _with_interval(row.psnr, row.psnr_low, row.psnr_high)
        cosine = _with_interval(row.cosine, row.cosine_low, row.cosine_high, digits=5)
        texts = [number(row.ssim), number(row.seconds), f"{rows[0].seconds / row.seconds:.2f}"]
        cells.append([Cell(row.method, colour=colours[row.family]), share(row.density), psnr, cosine, *texts])
    return Table(headings, cells, title="Denoising runs", note=note, marked=[0], long=[0])


def order_note(rows: Sequence[Row], runs: Sequence[Denoised]) -> list[str]:
    """How often recall and error put methods in another order than their clips do; nothing where that is not known."""
    mean_rows = {row.method: row for row in means(rows) if row.recall is not None}
    known = [run for run in runs[1:] if run.method in mean_rows and len(run.clip_psnr) > 1]
    pairs = [(mean_rows[a.method], mean_rows[b.method]) for a, b in permutations(known, 2) if is_closer(a, b)]
    if not pairs:
        return []
    crossed = [
        sum(sign * getattr(better, name) < sign * getattr(worse, name) for better, worse in pairs)
        for name, sign in (("recall", 1), ("recall_p5", 1), ("error_l1", -1))
    ]
    return [
        f"Pairs of methods whose clips differ in error beyond the choice of prompts: {len(pairs)}; in the other order "
        f"by mean recall: {crossed[0]}, by recall p5: {crossed[1]}, by L1 error: {crossed[2]}."
    ]


def _named(row: Row, colours: Mapping[str, int]) -> Cell:
    """A method's name with its settings below."""
    name, _, settings = (row.family, "", "") if row.family == AS_TRAINED else row.family.partition(" ")
    return Cell(text=name, sub=settings, colour=colours[row.family])


def number(value: float | None, digits: int = 3) -> str:
    """Three digits or others, "-" for none."""
    return "-" if value is None else f"{value:.{digits}g}"


def _with_interval(value: float | None, low: float | None, high: float | None, digits: int = 3) -> Cell:
    return Cell(number(value, digits), "" if low is None else f"{number(low, digits)} to {number(high, digits)}")


def share(value: float | None) -> str:
    """A share in percent, "-" for none."""
    return "-" if value is None else f"{value:.1%}"
