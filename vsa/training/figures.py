"""Pictures of a run: loss curve, contact sheet of clips, tiles that queries attend to, measurements by layer.

Matplotlib's object interface only: no window system, no global figure state.
"""

from __future__ import annotations

import csv
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vsa.attention.layout import TileLayout

QUERY_COLOUR = (0.1, 1.0, 0.3)
KEY_COLOUR = (1.0, 0.55, 0.0)


def _save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG so that no half of it ever stands under its name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".writing-{path.name}")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, path)
    return path


def read_metric(metrics_csv: str | Path, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one column of a run's `metrics.csv`, rows without a value left out.

    Raises:
        ValueError: the file has no such column, or a value that is no number; names file and column.
    """
    with open(metrics_csv, newline="") as file:
        reader = csv.DictReader(file)
        if column not in (reader.fieldnames or []):
            raise ValueError(f"{metrics_csv} has no column {column}, it has {', '.join(reader.fieldnames or [])}")
        rows = [(row["step"], row[column]) for row in reader if row[column]]
    try:
        return np.array([int(s) for s, _ in rows]), np.array([float(v) for _, v in rows])
    except ValueError as error:
        raise ValueError(f"{metrics_csv}, column {column}: {error}") from None


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    total = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (total[ends] - total[starts]) / (ends - starts)


def loss_curve(metrics_csv: str | Path, path: str | Path, *, title: str = "") -> Path:
    """Training loss (every row and a running mean) and validation loss over optimizer steps.

    Args:
        metrics_csv: a run's metrics; `train/loss` is needed (of a mixed objective `train/loss_data` is drawn), and
            `val/loss` drawn when there.
        path: PNG to write.
        title: above the axes.
    """
    try:
        # of a mixture the part that validation measures, too
        steps, losses = read_metric(metrics_csv, "train/loss_data")
    except ValueError:
        steps, losses = read_metric(metrics_csv, "train/loss")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="train")
    window = max(1, len(losses) // 30)
    axes.plot(
        steps,
        _running_mean(losses, window),
        color="tab:blue",
        label=f"train, mean of {window} rows" if window > 1 else None,
    )
    try:
        val_steps, val_losses = read_metric(metrics_csv, "val/loss")
    except ValueError:
        val_steps, val_losses = np.array([]), np.array([])
    if len(val_losses):
        axes.plot(val_steps, val_losses, "o-", color="tab:orange", label="validation (fixed noise)")
    if len(losses) and np.concatenate([losses, val_losses]).min() > 0:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("flow-matching loss (MSE of the velocity)")
    axes.set_title(title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return _save(figure, path)


def health_curves(metrics_csv: str | Path, path: str | Path, *, title: str = "") -> Path:
    """Critic loss, gap between critic and teacher, and spread of the generated latents of a distillation.

    Args:
        metrics_csv: a run's metrics; what it has not is left out.
        path: PNG to write.
        title: above the axes.
    """
    figure = Figure(figsize=(7, 8), layout="constrained")
    panels = (
        ("loss of the critic", {"fake_score/loss": "training"}),
        ("gap between critic and teacher (rms)", {"dmd/gap": "training", "val/gap": "validation, last step"}),
        ("generated latents", {"generated/std": "std (data: 1)", "generated/saturation": "share saturated"}),
    )
    for axes, (label, columns) in zip(figure.subplots(len(panels), 1, sharex=True), panels, strict=True):
        for column, name in columns.items():
            try:
                steps, values = read_metric(metrics_csv, column)
            except ValueError:
                continue
            axes.plot(steps, values, ".-", linewidth=0.8, label=name)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title)
    return _save(figure, path)


def contact_sheet(
    videos: Tensor, prompts: Sequence[str], path: str | Path, *, frames: int = 4, columns: int = 2
) -> Path:
    """A page of clips: a few frames of each side by side, its prompt above.

    Args:
        videos: uint8 `[N, T, H, W, 3]`.
        prompts: N captions.
        path: PNG to write.
        frames: frames shown per clip, evenly spaced from the first to the last.
        columns: clips per row.

    Raises:
        ValueError: not one prompt per clip.
    """
    if len(videos) != len(prompts) or len(videos) == 0:
        raise ValueError(f"expected one prompt per clip, got {len(prompts)} prompts and {len(videos)} clips")
    shown = min(frames, videos.shape[1])
    rows = math.ceil(len(videos) / columns)
    figure = Figure(figsize=(columns * 1.3 * shown, rows * 1.75), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, video, prompt in zip(grid.flat, videos, prompts, strict=False):
        axes.imshow(_strip(video, shown))
        axes.set_title("\n".join(textwrap.wrap(prompt, 14 * shown)), fontsize=8)
    return _save(figure, path)


def side_by_side(
    columns: Mapping[str, Tensor], prompts: Sequence[str], path: str | Path, *, frames: int = 3, title: str = ""
) -> Path:
    """The same prompts sampled in several ways: a row per prompt, a column per way, a few frames in every cell.

    Args:
        columns: uint8 `[N, T, H, W, 3]` by the title of the column; all of one shape.
        prompts: N captions.
        path: PNG to write.
        frames: frames shown per clip, evenly spaced from the first to the last.
        title: above the picture.

    Raises:
        ValueError: no column or no prompt, not one clip per prompt, or columns of different shapes.
    """
    shapes = {name: tuple(videos.shape) for name, videos in columns.items()}
    if not prompts or {shape[0] for shape in shapes.values()} != {len(prompts)}:
        raise ValueError(f"expected one clip per prompt in every column, got {len(prompts)} prompts and {shapes}")
    if len(set(shapes.values())) > 1:
        raise ValueError(f"columns must have one shape, got {shapes}")
    _, length, height, width, _ = next(iter(shapes.values()))
    shown = min(frames, length)
    # of a cell, in inches; prompts stand at the left of their row, titles above their column
    across, down = 1.1 * shown, max(0.6, 1.1 * height / width)
    figure = Figure(figsize=(1.5 + across * len(columns), 0.7 + 1.1 * down * len(prompts)), layout="constrained")
    grid = figure.subplots(len(prompts), len(columns), squeeze=False)
    for axes in grid.flat:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    for cells, (name, videos) in zip(grid.T, columns.items(), strict=True):
        cells[0].set_title("\n".join(textwrap.wrap(name, 13 * shown)), fontsize=8)
        for axes, video in zip(cells, videos, strict=True):
            axes.imshow(_strip(video, shown))
    for axes, prompt in zip(grid[:, 0], prompts, strict=True):
        # what fits the height of a row
        label = "\n".join(textwrap.wrap(prompt, 22, max_lines=5, placeholder=" ..."))
        axes.set_ylabel(label, fontsize=8, rotation=0, horizontalalignment="right", verticalalignment="center")
    figure.suptitle(title, fontsize=9)
    return _save(figure, path)


def _strip(video: Tensor, frames: int) -> np.ndarray:
    """`frames` frames of `[T, H, W, 3]` beside each other, evenly spaced from the first to the last."""
    picked = torch.linspace(0, len(video) - 1, frames).round().long()
    return np.concatenate([np.pad(f, ((0, 0), (0, 2), (0, 0)), constant_values=255) for f in video[picked].numpy()], 1)


def tile_map(layout: TileLayout) -> Tensor:
    """int64 `[T, H, W]`: the tile each token of a one-segment video row belongs to.

    Raises:
        ValueError: the row has more than one segment.
    """
    if len(layout.segments) != 1 or layout.segments[0].kind not in ("video", "image"):
        raise ValueError(f"a tile map needs a row of one video, got {[s.kind for s in layout.segments]}")
    blocks = torch.arange(layout.num_blocks).repeat_interleave(layout.blocks.sizes.cpu().long())
    tiles = torch.empty(layout.num_tokens, dtype=torch.int64)
    tiles[layout.order.cpu()] = blocks
    return tiles.view(layout.segments[0].grid_thw)


def selection_share(kv_indices: Tensor, kv_num_blocks: Tensor, num_blocks: int) -> Tensor:
    """Share of heads in which each query tile selects each kv tile, float32 `[Nq, num_blocks]`.

    Args:
        kv_indices: int `[H, Nq, K]`; only the first `kv_num_blocks` entries of a row count.
        kv_num_blocks: int `[H, Nq]`.
        num_blocks: number of kv tiles.
    """
    heads, queries, capacity = kv_indices.shape
    valid = torch.arange(capacity) < kv_num_blocks.cpu()[..., None]
    # entries past the count may hold anything: send them to a spare column
    columns = torch.where(valid, kv_indices.cpu().long(), num_blocks)
    chosen = torch.zeros(heads, queries, num_blocks + 1).scatter_(2, columns, 1.0)
    return chosen[..., :num_blocks].mean(0)


def _upsample(values: Tensor, num_frames: int, height: int, width: int) -> np.ndarray:
    """Nearest neighbour `[T, H, W]` tokens to `[num_frames, height, width]` pixels."""
    index = [torch.arange(n) * size // n for n, size in zip((num_frames, height, width), values.shape, strict=True)]
    return values[index[0]][:, index[1]][:, :, index[2]].numpy()


def _outline(mask: np.ndarray, thickness: int) -> np.ndarray:
    """The inner border of a boolean picture."""
    inner = mask.copy()
    for _ in range(thickness):
        padded = np.pad(inner, 1, constant_values=False)
        inner &= padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner


def attention_overlay(video: Tensor, tiles: Tensor, share: Tensor, query: int) -> Tensor:
    """A clip with the tiles one query tile selects tinted and the query tile outlined.

    Args:
        video: uint8 `[T, H, W, 3]`.
        tiles: int64 token grid of tile numbers from `tile_map`.
        share: float `[Nkv]`, share of heads that select each tile; the tint's strength.
        query: query tile.

    Returns:
        float32 `[T, H, W, 3]` in [0, 1].
    """
    frames, height, width, _ = video.shape
    # dimmed, so that the tint stands out on bright and dark clips
    base = video.float().numpy() / 255 * 0.6
    strength = _upsample(share[tiles], frames, height, width)[..., None] * 0.75
    picture = base * (1 - strength) + np.array(KEY_COLOUR, dtype=np.float32) * strength
    inside = _upsample(tiles == query, frames, height, width)
    thickness = max(1, min(height, width) // 48)
    for frame, mask in zip(picture, inside, strict=True):
        frame[_outline(mask, thickness)] = QUERY_COLOUR
    return torch.from_numpy(picture.astype(np.float32))


def attention_picture(
    video: Tensor,
    layout: TileLayout,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    path: str | Path,
    *,
    queries: Sequence[int] | None = None,
    frames: int = 4,
    title: str = "",
) -> Path:
    """Which tiles a few query tiles attend to, drawn over the frames of the clip: one row per query.

    Args:
        video: uint8 `[T, H, W, 3]`.
        layout: of the clip's one video segment.
        kv_indices: `[H, Nq, K]` as recorded.
        kv_num_blocks: `[H, Nq]`.
        path: PNG to write.
        queries: query tiles; None picks the tiles of the frame's moving content: those that vary most.
        frames: frames shown, evenly spaced.
        title: above the picture.

    Raises:
        ValueError: the row is not one video, or a query is out of range.
    """
    tiles = tile_map(layout)
    share = selection_share(kv_indices, kv_num_blocks, layout.num_blocks)
    if queries is None:
        queries = varied_tiles(video, tiles, count=3)
    bad = [q for q in queries if not 0 <= q < layout.num_blocks]
    if bad or not queries:
        raise ValueError(f"query tiles must lie in 0..{layout.num_blocks - 1}, got {list(queries)}")
    picked = torch.linspace(0, len(video) - 1, min(frames, len(video))).round().long()
    figure = Figure(figsize=(1.9 * len(picked) + 0.4, 1.95 * len(queries) + 1.0), layout="constrained")
    grid = figure.subplots(len(queries), len(picked), squeeze=False)
    for row, query in zip(grid, queries, strict=True):
        overlay = attention_overlay(video, tiles, share[query], query)
        for axes, frame in zip(row, picked.tolist(), strict=True):
            axes.imshow(overlay[frame].clamp(0, 1).numpy())
            axes.set_xticks([])
            axes.set_yticks([])
            if query == queries[0]:
                axes.set_title(f"frame {frame}", fontsize=8)
        row[0].set_ylabel(f"query tile {query}", fontsize=8)
    legend = [
        Patch(color=QUERY_COLOUR, label="query tile"),
        Patch(color=KEY_COLOUR, label="selected tiles (brighter: by more heads)"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return _save(figure, path)


def layer_heatmaps(
    tables: Mapping[str, Tensor],
    path: str | Path,
    *,
    layers: Sequence[int],
    timesteps: Sequence[float],
    title: str = "",
) -> Path:
    """One panel per table, layers down and noise levels across; the numbers stand in the cells where they have room.

    Args:
        tables: float `[layers, timesteps]` by name; NaN is left grey. Colours run from 0 to 1, or to the largest value
            where that is above 1.
        path: PNG to write.
        layers: numbers of the layers.
        timesteps: noise levels in [0, 1].
        title: above the panels.

    Raises:
        ValueError: a table of another shape.
    """
    for name, table in tables.items():
        if table.shape != (len(layers), len(timesteps)):
            raise ValueError(f"{name} must be [{len(layers)}, {len(timesteps)}], got {list(table.shape)}")
    columns = min(3, len(tables))
    rows = math.ceil(len(tables) / columns)
    height = 1.2 + min(6.0, 0.24 * len(layers))
    figure = Figure(
        figsize=(1.4 + 0.55 * len(timesteps) * columns + columns, 0.6 + height * rows), layout="constrained"
    )
    colours = colormaps["viridis"].with_extremes(bad="lightgrey")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(tables) :]:
        axes.axis("off")
    for axes, (name, table) in zip(grid.flat, tables.items(), strict=False):
        values = table.float().numpy()
        top = max(1.0, float(np.nanmax(values, initial=1.0)))
        picture = axes.imshow(values, aspect="auto", cmap=colours, vmin=0.0, vmax=top)
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(timesteps)), [f"{t:g}" for t in timesteps], fontsize=8)
        every = math.ceil(len(layers) / 24)
        axes.set_yticks(range(0, len(layers), every), [str(n) for n in layers[::every]], fontsize=8)
        axes.set_xlabel("noise level", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        figure.colorbar(picture, ax=axes, fraction=0.08).ax.tick_params(labelsize=7)
        if len(layers) <= 24 and len(timesteps) <= 10:
            for (row, column), value in np.ndenumerate(values):
                if np.isfinite(value):
                    ink = "black" if value > 0.6 * top else "white"
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=6)
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def varied_tiles(video: Tensor, tiles: Tensor, count: int) -> list[int]:
    """The `count` tiles whose pixels vary most, at most one per tile-time where there are enough of those.

    Args:
        video: uint8 `[T, H, W, 3]`.
        tiles: int64 token grid of tile numbers.
        count: how many.
    """
    frames, height, width, _ = video.shape
    of_pixel = torch.from_numpy(_upsample(tiles, frames, height, width)).flatten()
    grey = video.float().mean(-1).flatten()
    num = int(tiles.max()) + 1
    size = torch.bincount(of_pixel, minlength=num).clamp_min(1)
    mean = torch.zeros(num).index_add_(0, of_pixel, grey) / size
    variance = torch.zeros(num).index_add_(0, of_pixel, (grey - mean[of_pixel]) ** 2) / size
    start = torch.full((num,), tiles.shape[0]).scatter_reduce_(
        0, tiles.flatten(), torch.arange(tiles.shape[0]).repeat_interleave(tiles[0].numel()), "amin"
    )
    ranked = torch.argsort(variance, descending=True, stable=True).tolist()
    fresh, later, seen = [], [], set()
    for tile in ranked:
        (later if int(start[tile]) in seen else fresh).append(tile)
        seen.add(int(start[tile]))
    return sorted([*fresh, *later][:count], key=lambda tile: (int(start[tile]), tile))
