"""Decoded frames and pictures as a person sees them: upright, square pixels, SDR in BT.709 primaries, on black.

H W rows and columns.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import av
import numpy as np
from PIL import Image, ImageCms

PQ, HLG = 16, 18
"""Transfer characteristics of HDR video (ITU-T H.273, table 3)."""

WHITE, PEAK = 203.0, 1000.0
"""Luminance in cd/m2 of HDR reference white (Report ITU-R BT.2408), which becomes SDR white, and of the display."""

_UNSPECIFIED = 2
_CODES = 65535
# linear RGB of BT.2020 (9; Report ITU-R BT.2407, section 2), of DCI-P3 (11) and of Display P3 (12) to BT.709
_P3 = ((1.2249, -0.2247, 0.0), (-0.0420, 1.0419, 0.0), (-0.0197, -0.0786, 1.0979))
_TO_BT709 = {9: ((1.6605, -0.5876, -0.0728), (-0.1246, 1.1329, -0.0083), (-0.0182, -0.1006, 1.1187)), 11: _P3, 12: _P3}
# of BT.2020, for the luminance of HLG (Recommendation ITU-R BT.2100, table 5)
_LUMA = np.array((0.2627, 0.6780, 0.0593), dtype=np.float32)
# rows that are converted at once, so that they stay in the cache
_ROWS = 32


class NotShown(Exception):
    """Pixels that have no meaning on a screen; the message says why."""


class View(NamedTuple):
    """From stored pixels to those shown: first the width is scaled, then the picture transposed, then it is flipped.

    Args:
        aspect: width of a stored pixel, divided by its height.
        transpose: whether rows and columns are swapped.
        rows: whether the order of the rows is reversed.
        columns: whether the order of the columns is reversed.
    """

    aspect: float = 1.0
    transpose: bool = False
    rows: bool = False
    columns: bool = False

    @staticmethod
    def of_picture(image: Image.Image) -> View:
        """The orientation of an image file (EXIF, 1 to 8)."""
        code = 1
        # Pillow turns a TIFF itself; damaged EXIF is ignored, as viewers do
        with contextlib.suppress(SyntaxError, ValueError, OSError):
            code = 1 if image.format == "TIFF" else image.getexif().get(0x0112, 1)
        return View(1.0, code in (5, 6, 7, 8), code in (3, 4, 7, 8), code in (2, 3, 6, 7))

    @staticmethod
    def of_frame(frame: av.VideoFrame, aspect: float) -> View:
        """The display matrix of a frame, to the next quarter turn."""
        matrix = frame.side_data.get("DISPLAYMATRIX")
        if matrix is None:
            return View(aspect)
        a, b, _, c, d = np.frombuffer(bytes(matrix), dtype=np.int32)[:5].tolist()
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return View(aspect, False, d < 0, a < 0)
        return View(aspect, True, b < 0, c < 0)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width as shown."""
        width = max(1, round(width * self.aspect))
        return (width, height) if self.transpose else (height, width)

    def show(self, pixels: np.ndarray) -> np.ndarray:
        """`[H, W, 3]` as shown, of uint8 `[H, W, 3]` as stored."""
        height, width = self.size(*pixels.shape[:2])
        wide, high = (height, width) if self.transpose else (width, height)
        if wide != pixels.shape[1]:
            pixels = np.asarray(Image.fromarray(pixels).resize((wide, high), Image.Resampling.BICUBIC))
        if self.transpose:
            pixels = pixels.swapaxes(0, 1)
        return pixels[:: -1 if self.rows else 1, :: -1 if self.columns else 1]


def stored_pixels(picture: av.VideoFrame | Image.Image) -> np.ndarray:
    """uint8 `[H, W, 3]` of a frame or a picture in the order of storage: SDR, BT.709 primaries, transparency on black.

    Matrix and range of a frame are those of its tags, without tags BT.601 and limited.

    Raises:
        NotShown: Dolby Vision without a base layer, or values outside the range of a picture.
    """
    if isinstance(picture, Image.Image):
        return _picture(picture)
    if picture.color_trc == _UNSPECIFIED and picture.side_data.get("DOVI_RPU_BUFFER") is not None:
        refuse_dolby_vision()
    if picture.color_trc in (PQ, HLG) or picture.color_primaries in _TO_BT709:
        return _standard(converted(picture, "rgb48le"), picture.color_trc, picture.color_primaries)
    if picture.format.has_palette or any(component.is_alpha for component in picture.format.components):
        return _on_black(Image.fromarray(converted(picture, "rgba")))
    return converted(picture, "rgb24")


def converted(picture: av.VideoFrame, pixel_format: str, **size: Any) -> np.ndarray:
    """The pixels of a frame in another format and, with `width` and `height`, another size.

    By default a frame starts as many threads as there are cores for this (PyAV#2281), and keeps them until the garbage
    collector finds it: on a machine with 16 cores a film of 700 frames is over the memory limit of a decoder.
    """
    return picture.to_ndarray(format=pixel_format, threads=1, **size)


def refuse_dolby_vision() -> None:
    """Raise `NotShown`."""
    raise NotShown("Dolby Vision without a base layer (profile 5) cannot be shown: export it as HDR10, HLG or SDR")


def _picture(image: Image.Image) -> np.ndarray:
    if image.mode == "F" or image.mode.startswith("I"):
        values, white = np.asarray(image).astype(np.float64), 1.0 if image.mode == "F" else float(_CODES)
        if not ((values >= 0) & (values <= white)).all():
            raise NotShown(f"{image.mode} values outside 0 to {white:g}")
        return np.repeat(np.rint(values * (255 / white)).astype(np.uint8)[..., None], 3, axis=2)
    return _on_black(_in_srgb(image))


def _in_srgb(image: Image.Image) -> Image.Image:
    """Colours of another profile in sRGB; a profile that cannot be applied is ignored, as browsers do."""
    content = image.info.get("icc_profile")
    if content:
        try:
            profile = ImageCms.ImageCmsProfile(io.BytesIO(content))
            if "sRGB" not in ImageCms.getProfileDescription(profile):
                mode = image.mode if image.mode in ("L", "CMYK") else "RGBA"
                output = "RGBA" if mode == "RGBA" else "RGB"
                srgb = ImageCms.createProfile("sRGB")
                converted = ImageCms.profileToProfile(image.convert(mode), profile, srgb, outputMode=output)
                return converted or image
        except (ImageCms.PyCMSError, OSError, ValueError):
            pass
    return image


def _on_black(image: Image.Image) -> np.ndarray:
    rgba = image.convert("RGB").convert("RGBA") if image.mode in ("CMYK", "YCbCr", "LAB", "HSV") else image
    rgba = rgba.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, (0, 0, 0, 255))
    return np.array(Image.alpha_composite(canvas, rgba).convert("RGB"))


def _standard(codes: np.ndarray, transfer: int, primaries: int) -> np.ndarray:
    """HDR or wide-gamut R'G'B' uint16 `[H, W, 3]` of full range, as SDR uint8 in BT.709 primaries."""
    hdr = transfer in (PQ, HLG)
    matrix = np.array(_TO_BT709.get(primaries, _TO_BT709[9] if hdr and primaries != 1 else np.eye(3)), np.float32)
    light, sdr, encoded = _table(_LIGHT.get(transfer, _bt1886)), _table(_tone_of_root), _table(_encoded_root)
    result = np.empty(codes.shape, dtype=np.uint8)
    for top in range(0, len(codes), _ROWS):
        linear = light[codes[top : top + _ROWS]]
        if transfer == HLG:
            # the display's share of the peak: BT.2100, table 5, OOTF with gamma 1.2
            linear *= (linear @ _LUMA)[..., None] ** np.float32(0.2)
            linear = sdr[_root(linear)]
        result[top : top + _ROWS] = encoded[_root(linear @ matrix.T)]
    return result


def sdr_light(nits: np.ndarray) -> np.ndarray:
    """Share of SDR white that shows HDR light in cd/m2, each of R, G and B by itself.

    The EETF of Report ITU-R BT.2390, section 5.4.1 (Report BT.2408, annex 5), from a display of 1,000 to one of 203
    cd/m2: identity below the knee, above it a Hermite spline in PQ codes that ends at white.
    """
    whole, white = pq_code(PEAK), pq_code(WHITE) / pq_code(PEAK)
    code, knee = pq_code(np.minimum(nits, PEAK)) / whole, 1.5 * white - 0.5
    t = np.maximum(code - knee, 0) / (1 - knee)
    spline = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (3 * t**2 - 2 * t**3) * white
    return pq_light(np.where(code < knee, code, spline) * whole) / WHITE


def pq_light(code: np.ndarray) -> np.ndarray:
    """cd/m2 of a PQ code in 0..1: the EOTF of Recommendation ITU-R BT.2100, table 4."""
    root = np.power(code, 32 / 2523)
    return 10_000 * np.power(np.maximum(root - 3424 / 4096, 0) / (2413 / 128 - 2392 / 128 * root), 16384 / 2610)


def pq_code(nits: np.ndarray | float) -> np.ndarray:
    """Inverse of `pq_light`."""
    root = np.power(np.asarray(nits) / 10_000, 2610 / 16384)
    return np.power((3424 / 4096 + 2413 / 128 * root) / (1 + 2392 / 128 * root), 2523 / 32)


def hlg_light(code: np.ndarray) -> np.ndarray:
    """Scene light in 0..1 of an HLG code in 0..1: the inverse OETF of Recommendation ITU-R BT.2100, table 5."""
    a = 0.17883277
    b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
    return np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12)


def _bt1886(code: np.ndarray) -> np.ndarray:
    """Light of an SDR code: Recommendation ITU-R BT.1886 with black at 0."""
    return code**2.4


def _tone_of_root(root: np.ndarray) -> np.ndarray:
    return sdr_light(PEAK * root**2)


def _encoded_root(root: np.ndarray) -> np.ndarray:
    """8-bit code of BT.1886, of the square root of light."""
    return np.rint(255 * root ** (2 / 2.4)).astype(np.uint8)


_LIGHT = {PQ: lambda code: sdr_light(pq_light(code)), HLG: hlg_light}


def _root(linear: np.ndarray) -> np.ndarray:
    """Indices of a table by the square root of light in 0..1, which has small steps in the dark."""
    return (np.sqrt(np.clip(linear, 0, 1)) * np.float32(_CODES) + np.float32(0.5)).astype(np.uint16)


@functools.cache
def _table(curve: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    values = curve(np.arange(_CODES + 1) / _CODES)
    return values if values.dtype == np.uint8 else values.astype(np.float32)
