"""Small media files as phones, editors and browsers write them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

HEIGHT, WIDTH = 32, 48


def corners(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """uint8 `[H, W, 3]` with another colour in each quarter, so that no turn and no flip leaves it as it is."""
    picture = np.zeros((height, width, 3), dtype=np.uint8)
    h, w = height // 2, width // 2
    for rows, columns, colour in (
        (slice(0, h), slice(0, w), (200, 40, 40)),
        (slice(0, h), slice(w, None), (40, 200, 40)),
        (slice(h, None), slice(0, w), (40, 40, 200)),
        (slice(h, None), slice(w, None), (190, 190, 190)),
    ):
        picture[rows, columns] = colour
    return picture


def write(
    path: Path,
    frames: Sequence[np.ndarray],
    *,
    codec: str = "libx264",
    pixels: str = "yuv444p",
    source: str = "rgb24",
    rate: int = 8,
    times: Sequence[int] | None = None,
    matrix: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    **context: Any,
) -> Path:
    """Write a video file.

    Args:
        path: its suffix chooses the container.
        frames: `[H, W, channels]` of format `source`.
        codec: name of an encoder.
        pixels: format that is stored.
        source: format of the frames.
        rate: frames per second.
        times: time stamp of each frame, in ms; None: a constant rate.
        matrix: display matrix, nine numbers.
        options: of the encoder.
        context: attributes of the encoder, set for the frames too where these have them.
    """
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        stream.options = options or {}
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in context.items():
            setattr(stream.codec_context, name, value)
        if matrix is not None:
            stream.set_display_matrix(matrix)
        for i, pixels_of_frame in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels_of_frame), format=source)
            for name in ("color_primaries", "color_trc", "colorspace", "color_range"):
                if name in context:
                    setattr(frame, name, context[name])
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
