"""Which shape a clip shows, by the geometry of what stands out in its pixels.

Nothing is learnt: the outline of every frame is laid over four ideal figures of its own area and centre, and the figure
that covers it best names it. The figures are defined here and not taken from the renderer of `toy_videos`.

T H W frames and pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

# mean overlap (intersection over union) below which an outline is none of the figures
_LEAST_OVERLAP = 0.75
# RGB distance below which nothing stands out from the background
_LEAST_CONTRAST = 25.0
# of the arms of a cross, width by length
_ARM = 0.35

Figure = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Whether points (x to the right, y down) lie in a figure of area 1 with its centre of mass at (0, 0)."""


def _circle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x**2 + y**2 < 1 / math.pi


def _square(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x), np.abs(y)) < 0.5


def _triangle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Equilateral, one tip up: its sides are at a third of its height from the centre."""
    third = 3**0.25 / 3
    return np.maximum(y, math.sqrt(0.75) * np.abs(x) - 0.5 * y) < third


def _cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Two equal bars, upright and level."""
    length = 1 / math.sqrt(4 * _ARM * (2 - _ARM))
    long, short = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
    return (long < length) & (short < _ARM * length)


FIGURES: Mapping[str, Figure] = {"circle": _circle, "square": _square, "triangle": _triangle, "cross": _cross}


def shape_overlaps(video: Tensor) -> dict[str, float]:
    """Mean overlap of what stands out in a clip with each figure, over the frames in which something does.

    What stands out is farther from the median colour, in RGB, than half of the 99th percentile.

    Args:
        video: uint8 `[T, H, W, 3]`.

    Returns:
        intersection over union by figure; 0 everywhere when nothing stands out.
    """
    pixels = video.detach().cpu().numpy().astype(np.float32)
    # medians of a grid of about 64 x 64 points are as good and much faster
    step = max(min(pixels.shape[1:3]) // 64, 1)
    difference = pixels - np.median(pixels[:, ::step, ::step].reshape(-1, 3), axis=0)
    distance = np.sqrt(np.einsum("thwc,thwc->thw", difference, difference))
    peak = float(np.percentile(distance[:, ::step, ::step], 99))
    masks = [mask for mask in distance > 0.5 * peak if mask.any()]
    if peak < _LEAST_CONTRAST or not masks:
        return dict.fromkeys(FIGURES, 0.0)
    rows = [_overlaps(mask) for mask in masks]
    return {name: float(np.mean([row[name] for row in rows])) for name in FIGURES}


def measure_shape(video: Tensor) -> str | None:
    """The shape that a clip shows, or None when it shows none of the four.

    Args:
        video: uint8 `[T, H, W, 3]`.
    """
    overlaps = shape_overlaps(video)
    best = max(overlaps, key=lambda name: overlaps[name])
    return best if overlaps[best] >= _LEAST_OVERLAP else None


def _overlaps(mask: np.ndarray) -> dict[str, float]:
    """Overlap of a mask `[H, W]` with each figure of its area, centred on it."""
    rows, columns = np.nonzero(mask)
    area = len(rows)
    x, y = (columns - columns.mean()) / math.sqrt(area), (rows - rows.mean()) / math.sqrt(area)
    common = {name: int(inside(x, y).sum()) for name, inside in FIGURES.items()}
    return {name: pixels / (2 * area - pixels) for name, pixels in common.items()}
