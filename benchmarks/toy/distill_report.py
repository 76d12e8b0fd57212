"""Figure and table of the results of `distill.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from benchmarks.toy.score import CHANCE
from vsa.plotting import COLOURS, save_figure

MEASURES = ("colour", "direction", "distance")
RECONSTRUCTIONS = "codec reconstructions"


def label(name: str, row: Mapping[str, Any]) -> str:
    """Name of a row with its cost."""
    return f"{name}\n{row['forwards']} forwards" if "forwards" in row else name


def draw(found: Mapping[str, Any], prompts: Sequence[str], pictures: Mapping[str, Tensor], path: Path) -> None:
    """Draw the metrics of all rows as bars with a point per seed, above middle frames of clips of the first seed.

    Args:
        found: results of `summary`.
        prompts: P captions of the pictures.
        pictures: uint8 `[P, H, W, 3]` by row.
        path: path of the PNG.
    """
    rows = found["rows"]
    figure = Figure(figsize=(11, 4.2 + 1.7 * len(prompts)), layout="constrained")
    panels: Any = figure.subfigures(2, 1, height_ratios=(3.6, 0.6 + 1.7 * len(prompts)))
    titles = ("colour as the prompt says", "direction as the prompt says", "latent Fréchet distance (less is better)")
    floor = rows[RECONSTRUCTIONS]["distance"]["mean"]
    lines = {name: (f"dotted: chance, {value:.0%}", value) for name, value in CHANCE.items()}
    lines["distance"] = (f"dotted: two sets of rendered clips, {floor:.3g}", floor)
    for axes, measure, title in zip(panels[0].subplots(1, 3, sharey=True), MEASURES, titles, strict=True):
        draw_bars(axes, {label(name, row): row[measure] for name, row in rows.items()}, share=measure != "distance")
        meaning, value = lines[measure]
        axes.axvline(value, color="black", linestyle=":", zorder=0)
        axes.set_xlabel(meaning, fontsize=8)
        axes.set_title(title, fontsize=10)
    grid = panels[1].subplots(len(prompts), len(rows), squeeze=False)
    for line, (prompt, axes_of_prompt) in enumerate(zip(prompts, grid, strict=True)):
        for axes, (name, row) in zip(axes_of_prompt, rows.items(), strict=True):
            axes.imshow(pictures[name][line].numpy())
            axes.set_xticks([])
            axes.set_yticks([])
            if line == 0:
                axes.set_title(label(name, row), fontsize=8)
        axes_of_prompt[0].set_ylabel("\n".join(textwrap.wrap(prompt, 18)), fontsize=8)
    panels[1].suptitle(
        f"middle frames, seed {found['seeds'][0]}, the same noise in all columns but the first", fontsize=9
    )
    save_figure(figure, path)


def draw_bars(axes: Axes, values: Mapping[str, Mapping[str, Any]], *, share: bool) -> None:
    """Draw the mean of each row as a bar with its number, and the seeds as points."""
    places = range(len(values))
    axes.barh(places, [row["mean"] for row in values.values()], color=COLOURS[0], alpha=0.5)
    for place, row in zip(places, values.values(), strict=True):
        axes.plot(row["seeds"], [place] * len(row["seeds"]), "o", color=COLOURS[0], markersize=4)
        number = f"{row['mean']:.0%}" if share else f"{row['mean']:.3g}"
        axes.annotate(
            number, (max(row["seeds"]), place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(places, list(values), fontsize=8)
    # the first row on top
    axes.invert_yaxis()
    # space for the numbers
    axes.margins(x=0.25)
    axes.set_xlim(left=0)


def show(found: Mapping[str, Any]) -> None:
    """Print mean and standard deviation over the seeds of all rows as a table of at most 80 columns."""
    caption = "distance: Fréchet, on latents; the first row: between two rendered sets"
    title = f"toy distillation, {found['clips']} clips, seeds {found['seeds']}"
    numbers = (Column(name, justify="right") for name in ("forwards", "colour %", "direction %", "distance"))
    table = Table("", *numbers, title=title, caption=caption, box=SIMPLE, pad_edge=False)
    for name, row in found["rows"].items():
        cells = [f"{row['forwards']}" if "forwards" in row else ""]
        for measure in MEASURES:
            mean, spread = row[measure]["mean"], row[measure]["spread"]
            unit, digits, rough = (1, ".3g", ".2g") if measure == "distance" else (100, ".1f", ".1f")
            cells.append(f"{unit * mean:{digits}}" + ("" if spread is None else f" ± {unit * spread:{rough}}"))
        table.add_row(name, *cells)
    table.add_row("chance", "", *(f"{100 * CHANCE[name]:.1f}" for name in MEASURES if name in CHANCE), "")
    Console().print(table)
