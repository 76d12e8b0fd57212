"""Reading and writing of video, GIF and image files.

T H W frames and pixels. torch, which takes seconds to import, is not needed by a process that only decodes.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from PIL import Image, UnidentifiedImageError

from vsa.files import atomic_file

if TYPE_CHECKING:
    from torch import Tensor

VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov", ".avi", ".gif")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")

# a decoded clip is held in memory: larger files than any training clip needs are an error
MAX_PIXELS = 8192 * 8192
MAX_BYTES = 8 * 2**30
# share of a frame's duration: rounding must not decide between a frame and its successor
_SLACK = 1e-3


def read_video(path: str | Path, *, frames: int | None = None, fps: float | None = None) -> tuple[Tensor, float]:
    """The first frames of a video file.

    Args:
        path: any container and codec that ffmpeg knows; an image file gives one frame.
        frames: stop after that many (None: to the end).
        fps: resample to this rate: every output time takes the latest frame at or before it (None: as stored).

    Returns:
        uint8 video `[T, H, W, 3]` and its frame rate.
    """
    import torch

    pictures, rate = decode(Path(path), frames=frames, fps=fps)
    return torch.from_numpy(np.stack(pictures)), rate


def decode(path: Path, *, frames: int | None = None, fps: float | None = None) -> tuple[list[np.ndarray], float]:
    """`read_video`, as T pictures `[H, W, 3]` of one size."""
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return [_decode_image(path)], 1.0
    if fps is not None and fps <= 0:
        raise ValueError(f"fps must be above 0, got {fps}")
    with _opened(path) as (container, stream):
        stream.thread_type = "AUTO"
        rate = _rate(stream)
        decoded = container.decode(stream)
        picked = decoded if fps is None else _resample(decoded, rate, fps)
        video = []
        for frame in picked:
            if frames is not None and len(video) == frames:
                break
            if (len(video) + 1) * frame.width * frame.height * 3 > MAX_BYTES:
                raise ValueError(f"cannot decode video {path}: over {MAX_BYTES >> 30} GiB of frames; ask for fewer")
            video.append(frame.to_ndarray(format="rgb24"))
    if not video:
        raise ValueError(f"cannot decode video {path}: it holds no frames")
    if len({picture.shape for picture in video}) > 1:
        raise ValueError(f"cannot decode video {path}: the frame size changes inside the file")
    return video, fps or rate


def probe_video(path: str | Path, *, fps: float | None = None) -> tuple[int | None, int, int]:
    """Size and length of a video or image file according to its header, without decoding it.

    Args:
        path: as for `read_video`.
        fps: count the frames after resampling to that rate.

    Returns:
        (frames, height, width); frames is an estimate from the duration, or None, where the header has no number.
    """
    path = Path(path)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        with _opened_image(path) as image:
            return 1, image.height, image.width
    with _opened(path) as (container, stream):
        num_frames = stream.frames or round((container.duration or 0) / av.time_base * _rate(stream))
        if num_frames < 1 or not stream.height or not stream.width:
            return None, stream.height, stream.width
        if fps is not None:
            num_frames = math.ceil(fps * (num_frames - _SLACK) / _rate(stream))
        return num_frames, stream.height, stream.width


def read_image(path: str | Path) -> Tensor:
    """A PNG, JPEG or WebP file as uint8 `[H, W, 3]`; transparency is put on black."""
    import torch

    return torch.from_numpy(_decode_image(Path(path)))


def _decode_image(path: Path) -> np.ndarray:
    with _opened_image(path) as image:
        rgba = image.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, (0, 0, 0, 255))
    return np.array(Image.alpha_composite(canvas, rgba).convert("RGB"))


def write_video(path: str | Path, video: Tensor, *, fps: float = 8) -> None:
    """Write an H.264 mp4 file atomically.

    Args:
        path: file to write.
        video: uint8 `[T, H, W, 3]`; odd sizes are extended by their last row or column (4:2:0 needs even ones).
        fps: frames per second.
    """
    frames = _frames(video)
    odd = ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0))
    frames = np.pad(frames, odd, mode="edge")
    with atomic_file(path) as temporary, av.open(str(temporary), mode="w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "14", "preset": "veryfast", "threads": "1"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def write_gif(path: str | Path, video: Tensor, *, fps: float = 8) -> None:
    """Write a looping GIF atomically.

    Args:
        path: file to write.
        video: uint8 `[T, H, W, 3]`.
        fps: frames per second (GIF rounds the frame time to 10 ms).
    """
    first, *rest = (Image.fromarray(frame) for frame in _frames(video))
    with atomic_file(path) as temporary:
        first.save(
            temporary, format="GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0, disposal=1
        )


def _frames(video: Tensor) -> np.ndarray:
    import torch

    if video.dtype != torch.uint8 or video.dim() != 4 or video.shape[-1] != 3 or 0 in video.shape:
        raise ValueError(f"video must be uint8 [T, H, W, 3] and not empty, got {video.dtype} {tuple(video.shape)}")
    return video.detach().cpu().numpy()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container of a video file and its first moving picture; errors of the block name the file too."""
    if not path.is_file():
        raise ValueError(f"no such video: {path}")
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            if not container.streams.video:
                raise ValueError(f"cannot decode video {path}: it has no video stream")
            stream = container.streams.video[0 if len(container.streams.video) == 1 else _moving(path)]
            if stream.codec_context is None:
                raise ValueError(f"cannot decode video {path}: no decoder for its video stream")
            if stream.width * stream.height > MAX_PIXELS:
                raise ValueError(
                    f"cannot decode video {path}: {stream.width}x{stream.height} pixels are over the limit"
                )
            yield container, stream
    except (av.FFmpegError, OSError, MemoryError, OverflowError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"cannot decode video {path}: {reason}") from error


def _moving(path: Path) -> int:
    """Place of the first video stream with more than one picture, so no cover; 0 if there is none."""
    pictures: Counter[int] = Counter()
    with av.open(str(path), metadata_errors="replace") as container:
        places = [stream.index for stream in container.streams.video]
        for packet in container.demux(video=[*range(len(places))]):
            pictures[packet.stream_index] += packet.size > 0
            if pictures[places[0]] > 1:
                break
    return next((place for place, index in enumerate(places) if pictures[index] > 1), 0)


@contextlib.contextmanager
def _opened_image(path: Path) -> Iterator[Image.Image]:
    """An image file whose pixels are not read yet; errors of the block name the file too."""
    if not path.is_file():
        raise ValueError(f"no such image: {path}")
    try:
        # only these formats, because others call external programs
        with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"cannot decode image {path}: {image.width}x{image.height} pixels are over the limit")
            yield image
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot decode image {path}: {error}") from error


def _rate(stream: VideoStream) -> float:
    return float(stream.average_rate or stream.guessed_rate or 1)


def _resample(decoded: Iterator[av.VideoFrame], rate: float, fps: float) -> Iterator[av.VideoFrame]:
    """Frames at instants 0, 1/fps, 2/fps, ...: each the newest stored frame at or before it (constant rate assumed)."""
    produced = 0
    for i, frame in enumerate(decoded):
        while produced / fps < (i + 1) / rate - _SLACK / rate:
            yield frame
            produced += 1
