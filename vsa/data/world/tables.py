"""Integer tables for the rendering of world clips: backgrounds, shapes, textures and colours.

The photographs are files of scikit-image's wheel, all in the public domain or CC0 as `skimage/data/_fetchers.py` of its
0.26 says: astronaut (NASA), brick and gravel (CC0Textures), camera (L. Varshney), chelsea (S. van der Walt), coffee
(R. Michetti), grass (linolafett). The package is not imported. Shapes are polygons of this file, because other versions
of a font library could give other pixels.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vsa.data.world.scenes import COLOURS, SHAPES, SIZES, TEXTURES, background_size, box_size

PHOTOGRAPHS = {
    "astronaut": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    "brick": "7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf",
    "camera": "b0793d2adda0fa6ae899c03989482bff9a42d3d5690fc7e3648f2795d730c23a",
    "chelsea": "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
    "coffee": "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
    "grass": "b6b6022426b38936c43a4ac09635cd78af074e90f42ffa8227ac8b7452d39f89",
    "gravel": "c48615b451bf1e606fbd72c0aa9f8cc0f068ab7111ef7d93bb9b0f2586440c12",
}
"""SHA-256 of each file, since another photograph would change the world."""

SHEET = 64
"""Side of the square of the outlines, in units."""

OUTLINES: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "square": (((7, 7), (57, 7), (57, 57), (7, 57)),),
    "triangle": (((32, 3), (63, 59), (1, 59)),),
    "star": (((32, 1), (41, 21), (63, 23), (46, 38), (52, 60), (32, 48), (12, 60), (18, 38), (1, 23), (23, 21)),),
    "T": (((3, 3), (61, 3), (61, 21), (41, 21), (41, 61), (23, 61), (23, 21), (3, 21)),),
    "X": (
        (
            (2, 2),
            (22, 2),
            (32, 19),
            (42, 2),
            (62, 2),
            (43, 32),
            (62, 62),
            (42, 62),
            (32, 45),
            (22, 62),
            (2, 62),
            (21, 32),
        ),
    ),
    "4": (
        ((34, 2), (52, 2), (52, 36), (62, 36), (62, 50), (52, 50), (52, 62), (35, 62), (35, 50), (2, 50), (2, 36)),
        ((35, 36), (35, 20), (21, 36)),
    ),
    "7": (((4, 2), (60, 2), (60, 17), (35, 62), (14, 62), (37, 20), (4, 20)),),
}
"""Corners (x, y) of each shape; a second outline is a hole. The circle is defined by its radius."""

_CIRCLE_RADIUS = 29
_DARK, _LIGHT = 14, 112


@dataclass(frozen=True, kw_only=True)
class WorldTables:
    """Tables for pictures of one size; P is the size of a box. A packed pixel is R + 256 G + 65536 B.

    Args:
        backgrounds: int32 `[PHOTOS, Hb, Wb]` packed.
        masks: int32 `[len(SHAPES) + 1, SIZES, P, P]`, 1 inside; the last shape is empty.
        textures: int32 `[TEXTURES, P, P]` brightness in 256ths.
        colours: int32 `[len(COLOURS), 3]`.
    """

    backgrounds: Tensor
    masks: Tensor
    textures: Tensor
    colours: Tensor

    def to(self, device: torch.device | str) -> WorldTables:
        """The same on `device`."""
        return WorldTables(**{name: table.to(device) for name, table in vars(self).items()})


@cache
def world_tables(height: int, width: int, device: str = "cpu") -> WorldTables:
    """The tables for frames of a size, cached per process and device."""
    if device != "cpu":
        return world_tables(height, width).to(device)
    box = box_size(height, width)
    size = background_size(height), background_size(width)
    photographs = [_background(photograph(name), *size) for name in PHOTOGRAPHS]
    backgrounds = np.stack([picture for photo in photographs for picture in (photo, photo[:, ::-1])])
    return WorldTables(
        backgrounds=torch.from_numpy((backgrounds @ np.array([1, 1 << 8, 1 << 16])).astype(np.int32)),
        masks=torch.cat([object_masks(box), torch.zeros(1, SIZES, box, box)]).to(torch.int32),
        textures=torch.from_numpy(np.stack([_texture(i, box) for i in range(TEXTURES)]).astype(np.int32)),
        colours=torch.tensor(list(COLOURS.values()), dtype=torch.int32),
    )


@cache
def object_masks(box: int) -> Tensor:
    """float32 `[len(SHAPES), SIZES, P, P]`, 1 where the centre of a pixel is inside; P is `box`."""
    return torch.from_numpy(np.stack([[_mask(shape, box, i) for i in range(SIZES)] for shape in SHAPES])).float()


def find_photographs() -> Path:
    """The folder of the photographs."""
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("scikit-image holds the photographs: pip install 'vsa-train[world]'", name="skimage")
    return Path(package.origin).parent / "data"


def photograph(name: str) -> np.ndarray:
    """uint8 `[H, W, 3]` picture of scikit-image."""
    path = find_photographs() / f"{name}.png"
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if digest != PHOTOGRAPHS[name]:
        raise ValueError(
            f"{path} is not the photograph of this world: expected SHA-256 {PHOTOGRAPHS[name][:12]}, got {digest[:12]}"
        )
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def _background(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Centre crop of a photograph at a size, dimmed and half grey so that objects stand out: int64 `[H, W, 3]`."""
    picture = pixels.astype(np.int64)
    h, w = picture.shape[:2]
    rows, columns = min(h, w * height // width), min(w, h * width // height)
    picture = picture[(h - rows) // 2 :, (w - columns) // 2 :][:rows, :columns]
    while picture.shape[0] >= 2 * height and picture.shape[1] >= 2 * width:
        h, w = picture.shape[0] // 2 * 2, picture.shape[1] // 2 * 2
        halves = picture[:h, :w].reshape(h // 2, 2, w // 2, 2, 3)
        picture = (halves.sum(axis=(1, 3)) + 2) // 4
    for axis, length in ((0, height), (1, width)):
        picture = _resized(picture, axis, length)
    luma = (picture @ np.array([77, 150, 29])) // 256
    half_grey = (luma[..., None] + picture) // 2
    return _DARK + half_grey * (_LIGHT - _DARK) // 255


def _resized(picture: np.ndarray, axis: int, length: int) -> np.ndarray:
    """Linear interpolation along an axis in 256ths of a pixel."""
    last = picture.shape[axis] - 1
    at = np.arange(length) * last * 256 // max(length - 1, 1)
    low = at // 256
    share = (at % 256).reshape(-1, *[1] * (picture.ndim - 1 - axis))
    first, second = picture.take(low, axis), picture.take(np.minimum(low + 1, last), axis)
    return (first * (256 - share) + second * share + 128) // 256


def _mask(shape: str, box: int, size: int) -> np.ndarray:
    """bool `[P, P]`: pixels whose centre is inside, of a shape that fills 13, 14, 15 or 16 sixteenths of its box."""
    # centres in units of the outlines, times `unit` to stay integers
    unit = 2 * box * (13 + size)
    centre = (2 * np.arange(box) + 1 - box) * SHEET * 16 + SHEET * unit // 2
    x, y = centre[None, :], centre[:, None]
    inside = np.zeros((box, box), dtype=bool)
    if shape == "circle":
        middle = SHEET // 2 * unit
        return (x - middle) ** 2 + (y - middle) ** 2 <= (_CIRCLE_RADIUS * unit) ** 2
    for outline in OUTLINES.get(shape, ()):
        for (x0, y0), (x1, y1) in zip(outline, (*outline[1:], outline[0]), strict=True):
            # rows whose rays to the right can cross this edge
            crosses = (y0 * unit <= y) != (y1 * unit <= y)
            left = (x - x0 * unit) * (y1 - y0) - (y - y0 * unit) * (x1 - x0)
            inside ^= crosses & ((left < 0) if y1 > y0 else (left > 0))
    return inside


def _texture(kind: int, box: int) -> np.ndarray:
    """Brightness of a box: plain, bars across, slanted bars, checks."""
    i, j = np.arange(box)[:, None], np.arange(box)[None, :]
    period = max(box // 3, 2)
    dark = (
        np.zeros((box, box), dtype=bool),
        np.broadcast_to(2 * (i % period) < period, (box, box)),
        2 * ((i + j) % period) < period,
        (2 * (i % period) < period) ^ (2 * (j % period) < period),
    )[kind]
    return np.where(dark, 176, 256)
