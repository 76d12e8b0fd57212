"""Pictures of an inspection: selected tiles over the clip, recall, gate maps, popularity of kv tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from vsa.evaluation.attention_map import attention_sheet, to_pixels
from vsa.evaluation.figures import layer_heatmaps
from vsa.evaluation.inspection.measure import MAPS, Inspection
from vsa.pages.charts import Panel, Series, draw_panel
from vsa.plotting import COLOURS, TITLE, save_figure, set_title

GREY = 9
"""Index of the grey of `COLOURS`."""

HEATMAPS = {
    "recall": "recall of the true attention mass",
    "recall_random": "recall of random tiles",
    "coarse_share": "coarse share of the output",
    "pair_overlap": "overlap of 2 neighbouring lists",
    "pair_random": "overlap of 2 random lists",
    "four_overlap": "overlap of 4 neighbouring lists",
}


def draw_selected(
    inspection: Inspection, video: Tensor, times: Sequence[int], path: Path, *, queries: Sequence[int], title: str
) -> Path:
    """Draw the selected tiles of a few query tiles at the middle timestep, for all shown heads and up to three layers.

    Args:
        inspection: results of the inspection.
        video: uint8 `[T, H, W, 3]`.
        times: see `vsa.evaluation.attention_map.token_times`.
        path: PNG to write.
        queries: query tiles to draw, among those shown.
        title: first line above the picture.
    """
    subset, at = inspection.shown, len(inspection.timesteps) // 2
    places = sorted({0, len(subset.layers) // 2, len(subset.layers) - 1})
    ranked = not bool(inspection.coarse.isnan().any())
    rows = []
    for query in queries:
        for place in places:
            some = (at, place, slice(None), subset.queries.index(query))
            selection = inspection.selected[some].float()
            # square roots: weak tiles stay visible
            strength = selection.mean(0).sqrt()
            if ranked:
                weight = (inspection.coarse[some] * selection).mean(0)
                strength = strength * (0.4 + 0.6 * (weight / weight.max()).sqrt())
            rows.append((f"tile {query}, layer {subset.layers[place]}", inspection.query_tiles == query, strength))
    heads = f"{'heads' if len(subset.heads) > 1 else 'head'} {', '.join(map(str, subset.heads))}"
    line = f"timestep {inspection.timesteps[at]:g}, {heads}"
    strength = "brighter: by more heads" + (", and likelier in the coarse stage" if ranked else "")
    return attention_sheet(
        video, inspection.tiles, rows, path, times=times, frames=6, title=f"{title}\n{line}", strength=strength
    )


def draw_heatmaps(inspection: Inspection, path: Path, *, title: str) -> Path:
    """Draw recall with its random level, coarse share and overlap of neighbouring lists, layer by noise level."""
    tables = {text: inspection.table(name).mean(-1).T for name, text in HEATMAPS.items()}
    tables = {text: table for text, table in tables.items() if not table.isnan().all()}
    levels = [timestep / 1000 for timestep in inspection.timesteps]
    return layer_heatmaps(tables, path, layers=inspection.layers, timesteps=levels, title=title)


def draw_maps(inspection: Inspection, video: Tensor, times: Sequence[int], path: Path, *, title: str) -> Path:
    """Draw gates and coarse share over the middle frame at the middle timestep; needs at least one map."""
    at, names = len(inspection.timesteps) // 2, list(inspection.maps)
    layers, frame = inspection.shown.layers, len(video) // 2
    height, width = video.shape[1:3]
    figure = Figure(figsize=(2.7 * len(names) + 0.6, 2.3 * height / width * len(layers) + 0.9), layout="compressed")
    grid = figure.subplots(len(layers), len(names), squeeze=False)
    grey = video[frame].float().mean(-1).numpy() / 255
    for column, name in enumerate(names):
        values = inspection.maps[name][at]
        low, high = float(values.min()), float(values.max())
        for place, layer in enumerate(layers):
            axes = grid[place, column]
            axes.imshow(grey, cmap="gray", vmin=0, vmax=1)
            pixels = to_pixels(values[place], [times[frame]], height, width)[0]
            image = axes.imshow(pixels, cmap="viridis", vmin=low, vmax=high, alpha=0.7)
            axes.set_xticks([])
            axes.set_yticks([])
            if place == 0:
                axes.set_title(MAPS[name], fontsize=8)
            if column == 0:
                axes.set_ylabel(f"layer {layer}", fontsize=8)
        # all layers have one scale
        bar = figure.colorbar(image, ax=list(grid[:, column]), location="bottom", shrink=0.8, pad=0.01)
        bar.ax.tick_params(labelsize=6)
    line = f"frame {frame}, timestep {inspection.timesteps[at]:g}, root mean square over heads and channels"
    set_title(figure.suptitle, f"{title}\n{line}", width=round(TITLE * figure.get_figwidth()))
    return save_figure(figure, path)


def draw_popularity(inspection: Inspection, path: Path, *, title: str) -> Path:
    """Draw how many lists hold a kv tile, relative to the mean, the most popular first; one line per layer."""
    ranked = inspection.counts.float().sort(-1, descending=True).values
    relative = (ranked / ranked.mean(-1, keepdim=True).clamp_min(1e-9)).mean((0, 2)).numpy()
    share = (np.arange(relative.shape[-1]) + 0.5) / relative.shape[-1]
    series = [
        Series(name=f"layer {layer}", x=share, y=relative[place], colour=place, dashed=place // len(COLOURS) % 2 == 1)
        for place, layer in enumerate(inspection.layers)
    ]
    # the mean, and where a tile counts as long-listed
    levels = [
        Series(name=name, x=np.array([0.0, 1.0]), y=np.full(2, level), colour=GREY, dashed=True)
        for name, level in (("mean", 1.0), ("1.5 times the mean", 1.5))
    ]
    panel = Panel(
        x_label="share of kv tiles, the most popular first",
        y_label="lists that hold the tile, over the mean",
        series=[*series, *levels],
        y_zero=True,
        visible=len(series) + len(levels),
    )
    return draw_panel(panel, path, title=title)
