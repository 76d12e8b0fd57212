"""Contact sheets: a few frames of each clip with its prompt. Long prompts are truncated, pictures keep their size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vsa.plotting import SOFT, Fitted, fit_text, save_figure

# sizes in inches, and letters and lines of 8-point text that fit into them
_GAP = 0.1
_LINE = 0.14
_LETTERS_PER_INCH = 13
_MOST_LINES = 4
# frames of a clip, evenly spaced from the first to the last, and clips of a row
_FRAMES, _COLUMNS = 4, 2


class _Page:
    """A figure whose parts are positioned in inches from the upper left corner."""

    def __init__(self, width: float, height: float):
        self.figure = Figure(figsize=(width, height))
        self._size = width, height

    def picture(self, pixels: np.ndarray, left: float, top: float, width: float, height: float) -> None:
        w, h = self._size
        axes = self.figure.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))
        axes.axis("off")
        axes.imshow(pixels, aspect="auto")

    def text(self, fitted: Fitted, left: float, top: float, *, within: float = 0, **style: Any) -> None:
        """Text from `left` on, or up to `left + within` where it is read from the right."""
        w, h = self._size
        if fitted.leftward and within:
            left, style = left + within, {"horizontalalignment": "right", **style}
        style = {"fontsize": 8, "verticalalignment": "top", **style}
        self.figure.text(left / w, 1 - top / h, fitted.text, **fitted.style, **style)


def contact_sheet(videos: Tensor, prompts: Sequence[str], path: str | Path) -> Path:
    """Contact sheet of clips: a few frames of each side by side, with its prompt above, truncated after four lines.

    Args:
        videos: uint8 `[N, T, H, W, 3]`.
        prompts: N captions.
        path: PNG to write.
    """
    if len(videos) != len(prompts) or len(videos) == 0:
        raise ValueError(f"expected one prompt per clip, got {len(prompts)} prompts and {len(videos)} clips")
    strips = [_strip(video, _FRAMES) for video in videos]
    width, height = _strip_size(videos, _FRAMES, frame_width=1.3)
    titles = [fit_text(prompt, round(width * _LETTERS_PER_INCH), _MOST_LINES) for prompt in prompts]
    columns = min(_COLUMNS, len(videos))
    rows = math.ceil(len(videos) / columns)
    # the prompts of a row are aligned at the bottom, above its pictures
    above = [_LINE * max(title.lines for title in titles[row * columns : (row + 1) * columns]) for row in range(rows)]
    across = _GAP + columns * (width + _GAP)
    note = _note(titles, across)
    page = _Page(across, sum(above) + rows * (height + 2 * _GAP) + _GAP + _LINE * note.lines)
    top = _GAP
    for row, room in enumerate(above):
        for column, clip in enumerate(range(row * columns, min((row + 1) * columns, len(videos)))):
            left = _GAP + column * (width + _GAP)
            page.text(titles[clip], left, top + room, within=width, verticalalignment="bottom")
            page.picture(strips[clip], left, top + room + _GAP / 2, width, height)
        top += room + height + 2 * _GAP
    page.text(note, _GAP, top, color=SOFT)
    return save_figure(page.figure, path)


def side_by_side(
    columns: Mapping[str, Tensor], prompts: Sequence[str], path: str | Path, *, frames: int = 3, title: str = ""
) -> Path:
    """Comparison sheet of the same prompts sampled in several ways: a row per prompt, a column per way.

    Args:
        columns: uint8 `[N, T, H, W, 3]` by the title of the column; all of one shape.
        prompts: N captions.
        path: PNG to write.
        frames: frames shown per clip, evenly spaced from the first to the last.
        title: title above the sheet.
    """
    shapes = {name: tuple(videos.shape) for name, videos in columns.items()}
    if not prompts or {shape[0] for shape in shapes.values()} != {len(prompts)}:
        raise ValueError(f"expected one clip per prompt in every column, got {len(prompts)} prompts and {shapes}")
    if len(set(shapes.values())) > 1:
        raise ValueError(f"columns must have the same shape, got {shapes}")
    width, height = _strip_size(next(iter(columns.values())), frames, frame_width=1.1)
    names = [fit_text(name, round(width * _LETTERS_PER_INCH), _MOST_LINES) for name in columns]
    # prompts are at the left of their row and may use its whole height
    beside, down = 1.9, max(height, 4 * _LINE) + _GAP
    labels = [fit_text(prompt, round(beside * _LETTERS_PER_INCH), int(down / _LINE)) for prompt in prompts]
    across = beside + 2 * _GAP + len(columns) * (width + _GAP)
    heading = fit_text(title, round(across * _LETTERS_PER_INCH), 2)
    head = _GAP + _LINE * heading.lines + _GAP + _LINE * max(name.lines for name in names) + _GAP / 2
    note = _note([*labels, *names, heading], across)
    page = _Page(across, head + down * len(prompts) + _LINE * note.lines)
    page.text(heading, across / 2, _GAP, horizontalalignment="center")
    for column, (name, videos) in enumerate(zip(names, columns.values(), strict=True)):
        left = beside + 2 * _GAP + column * (width + _GAP)
        page.text(name, left, head - _GAP / 2, within=width, verticalalignment="bottom")
        for row, video in enumerate(videos):
            page.picture(_strip(video, frames), left, head + row * down, width, height)
    for row, label in enumerate(labels):
        page.text(label, _GAP, head + row * down, within=beside)
    page.text(note, _GAP, head + down * len(prompts), color=SOFT)
    return save_figure(page.figure, path)


def _note(texts: Sequence[Fitted], across: float) -> Fitted:
    """What stands below a sheet whose texts have letters that no installed font has; empty otherwise."""
    if not any(text.escaped for text in texts):
        return Fitted("", {})
    explanation = r"\u and \U stand for letters that no installed font has: install one for their script, such as Noto."
    return fit_text(explanation, round((across - _GAP) * _LETTERS_PER_INCH), 3)


def pick_frames(video: Tensor, frames: int) -> Tensor:
    """At most `frames` frames of `[T, H, W, 3]`, evenly spaced from the first to the last."""
    return video[torch.linspace(0, len(video) - 1, min(frames, len(video))).round().long()]


def _strip(video: Tensor, frames: int) -> np.ndarray:
    """Some frames of `[T, H, W, 3]` side by side."""
    picked = pick_frames(video, frames).numpy()
    return np.concatenate([np.pad(f, ((0, 0), (0, 2), (0, 0)), constant_values=255) for f in picked], 1)


def _strip_size(videos: Tensor, frames: int, *, frame_width: float) -> tuple[float, float]:
    """Width and height in inches of the strips of `[N, T, H, W, 3]`."""
    _, length, height, width, _ = videos.shape
    across = frame_width * min(frames, length)
    return across, across * height / (min(frames, length) * (width + 2))
