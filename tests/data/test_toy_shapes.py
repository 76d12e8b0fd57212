"""The scorer of shapes against pictures that are drawn here, and against what it must refuse."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor

from vsa.data.codecs import HaarCodec
from vsa.data.toy_shapes import FIGURES, measure_shape, shape_overlaps
from vsa.data.toy_videos import SHAPES, clip_attributes, render_clip


@cache
def clips() -> list[tuple[Tensor, str | None]]:
    return [(render_clip(5, i)[0], clip_attributes(5, i).shape) for i in range(40)]


def corners(shape: str, radius: float) -> list[tuple[float, float]]:
    """Outlines by their corners, as a drawing book has them."""
    if shape == "square":
        return [(-radius, -radius), (radius, -radius), (radius, radius), (-radius, radius)]
    if shape == "triangle":
        return [(radius * math.cos(a), radius * math.sin(a)) for a in (-math.pi / 2, math.pi / 6, 5 * math.pi / 6)]
    a, b = radius, 0.35 * radius
    return [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b), (b, a), (-b, a), (-b, b), (-a, b), (-a, -b), (-b, -b)]


def drawn(shape: str, *, radius: float = 18, blur: float = 0, steps: int = 4) -> Tensor:
    """A clip of a green shape that moves to the right, by another renderer than the toy clips'."""
    frames = []
    for i in range(steps):
        picture = Image.new("RGB", (96, 80), (20, 24, 28))
        draw, x, y = ImageDraw.Draw(picture), 30 + 8 * i, 41
        if shape == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(50, 200, 60))
        else:
            draw.polygon([(x + dx, y + dy) for dx, dy in corners(shape, radius)], fill=(50, 200, 60))
        frames.append(np.asarray(picture.filter(ImageFilter.GaussianBlur(blur))))
    return torch.from_numpy(np.stack(frames))


def share_right(clips: list[tuple[Tensor, str | None]]) -> float:
    return sum(measure_shape(video) == shape for video, shape in clips) / len(clips)


def test_figures_are_those_of_the_clips_with_area_1_around_their_centre() -> None:
    assert tuple(FIGURES) == SHAPES
    grid = (np.arange(800) + 0.5) / 400 - 1
    x, y = grid[None, :], grid[:, None]
    for name, inside in FIGURES.items():
        mask = inside(x, y)
        assert mask.mean() * 4 == pytest.approx(1, abs=0.01), name
        assert (mask * x).mean() == pytest.approx(0, abs=0.001), name
        assert (mask * y).mean() == pytest.approx(0, abs=0.001), name


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_another_renderer_are_told(shape: str) -> None:
    for radius in (9, 18, 26):
        assert measure_shape(drawn(shape, radius=radius)) == shape
    assert measure_shape(drawn(shape, blur=3)) == shape
    overlaps = shape_overlaps(drawn(shape))
    # what is left are the whole pixels of an outline that is not smoothed
    assert overlaps.pop(shape) > 0.88 > 0.86 > max(overlaps.values())


@pytest.mark.parametrize("shape", ["square", "triangle", "cross"])
def test_a_blob_is_no_shape_with_corners(shape: str) -> None:
    assert measure_shape(drawn(shape, blur=12)) in ("circle", None)


@pytest.mark.slow
def test_rendered_and_rebuilt_clips_are_told_and_shuffled_captions_are_not() -> None:
    assert share_right(clips()) == 1
    codec = HaarCodec()
    rebuilt = [(codec.decode(codec.encode(video)), shape) for video, shape in clips()]
    assert share_right(rebuilt) == 1
    # every clip with the captions of all others: a scorer that sees nothing gets no more
    measured_counts = Counter(measure_shape(video) for video, _ in rebuilt)
    true_counts = Counter(shape for _, shape in rebuilt)
    assert sum(measured_counts[shape] * true_counts[shape] for shape in SHAPES) / len(clips()) ** 2 < 0.35


def test_what_is_none_of_the_shapes_gets_no_name() -> None:
    flat = torch.full((4, 40, 40, 3), 20, dtype=torch.uint8)
    assert measure_shape(flat) is None
    assert shape_overlaps(flat) == dict.fromkeys(SHAPES, 0.0)
    noise = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert measure_shape(noise) is None
    # upside down a triangle fits none of them, two shapes at once neither
    assert measure_shape(drawn("triangle").flip(1)) is None
    bar = flat.clone()
    bar[:, 18:22, 4:36] = 200
    assert measure_shape(bar) is None
