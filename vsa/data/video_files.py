"""Reading and writing of video, GIF and image files.

T H W frames and pixels. torch, which takes seconds to import, is not needed by a process that only decodes.
"""

from __future__ import annotations

import contextlib
import math
import time
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

from vsa.data.pixels import NotShown, View, converted, refuse_dolby_vision, stored_pixels
from vsa.data.resampling import FASTEST, instants, irregular, resampled, steady_rate
from vsa.data.timed_frames import FrameTable, Shown, aspect_of, frames_before, opened, rate_of, read_table, timed_frames
from vsa.files import atomic_file

if TYPE_CHECKING:
    from torch import Tensor

_VIDEOS = "mp4 m4v mov qt mkv webm avi gif ts mts m2ts mpg mpeg vob 3gp 3g2 ogv wmv asf flv f4v mxf y4m dv"
VIDEO_SUFFIXES = tuple(f".{name}" for name in _VIDEOS.split())
IMAGE_SUFFIXES = (".png", ".apng", ".jpg", ".jpeg", ".jfif", ".webp", ".avif", ".bmp", ".tif", ".tiff")
_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF")
# those of several frames that are no pages or previews
_ANIMATED = ("PNG", "WEBP", "AVIF")
# sample entries of Dolby Vision
_DOLBY_VISION = ("dvh1", "dvhe", "dav1")

# a decoded clip is held in memory: larger files than any training clip needs are an error
MAX_PIXELS = 8192 * 8192
MAX_BYTES = 8 * 2**30
# frames, of some seconds, that are decoded sooner than the time stamps of a file are read
_NEAR = 100


def read_video(
    path: str | Path, *, frames: int | None = None, fps: float | None = None, start: int | None = None
) -> tuple[Tensor, float]:
    """Frames of a video file, by default from its beginning.

    Args:
        path: any container and codec that ffmpeg knows; an image file gives one frame.
        frames: maximum number of frames (None: all).
        fps: frame rate to resample to: every output time takes the newest frame at or before it, see
            `vsa.data.resampling.instants` (None: as stored).
        start: number of the first frame, after resampling.

    Returns:
        uint8 video `[T, H, W, 3]` and its frame rate.
    """
    import torch

    with contextlib.closing(VideoReader(Path(path), fps=fps)) as reader:
        reader.skip(start or 0)
        pictures, rate = reader.take(frames)
    return torch.from_numpy(np.stack(pictures)), rate


class VideoReader:
    """The pictures of a video file in their order; each call goes on where the last one ended.

    A decoder is freed by the garbage collector, and its threads would not be there in a process that was forked before,
    so only a process of its own decodes with more `threads` (0: as many as there are cores).

    Args:
        path, fps: see `read_video`.
        threads: threads of the decoder.

    Attributes:
        position: number of the next picture, after resampling.
        rate: frame rate of the file, see `vsa.data.resampling.steady_rate`; None for an image file.
        times: what is irregular about the pictures taken last, see `vsa.data.resampling.irregular`.
    """

    def __init__(self, path: Path, *, fps: float | None = None, threads: int = 1) -> None:
        if fps is not None and fps <= 0:
            raise ValueError(f"fps must be above 0, got {fps}")
        self.position, self._path, self._fps, self._end = 0, path, fps, 0.0
        self._threads, self._stack = threads, contextlib.ExitStack()
        self.times, self._ends = "", [0.0]
        shown, self.rate, self._length = self._stack.enter_context(_shown(path, threads))
        self._pictures = self._resampled(shown, 0)
        self._table: FrameTable | None = None
        self._has_looked = False

    def _resampled(self, shown: Iterator[Shown], start: int) -> Iterator[Shown]:
        noted = (self._ends.append(item[2]) or item for item in shown)
        return noted if self._fps is None else resampled(noted, self.rate or FASTEST, self._fps, start)

    def _refuse_missing(self) -> None:
        """Raise ValueError if the file states more than was there, after its last picture."""
        # lengths are rounded
        if 1.5 < (self._length - self._ends[-1]) * (self.rate or 0) < math.inf:
            told = f"it ends after {self._ends[-1]:.3g} of the {self._length:.3g} s that its header states"
            raise ValueError(f"cannot decode video {self._path}: {told}")

    def close(self) -> None:
        """Close the file."""
        self._stack.close()

    def skip(self, start: int, *, seconds: float = math.inf) -> bool:
        """Pass over the pictures before number `start`, or all; returns whether that took less than `seconds`."""
        over = time.monotonic() + seconds
        if start - self.position > _NEAR and self.rate is not None:
            self._jump(start, seconds / 2)
        with self._reading():
            for _ in self._next(start - self.position, over - time.monotonic()):
                pass
        return self.position >= start or time.monotonic() < over

    def _jump(self, start: int, seconds: float) -> None:
        """Go on at the last keyframe before picture `start`, if there is a known one behind the current picture."""
        with contextlib.ExitStack() as stack:
            container, stream = stack.enter_context(_opened(self._path, self._threads))
            if not self._has_looked:
                self._table, self._has_looked = read_table(self._path, stream.index, seconds), True
            if (table := self._table) is None:
                return
            # one before it: for the time at which a picture begins, and where containers round time stamps
            number = (start if self._fps is None else table.number_at(start / self._fps)) - 1
            if table.time(table.key_before(number)) <= self._end:
                return
            later = frames_before(container, stream, table, number)
            if later is None or table.time(later[1]) <= self._end:
                return
            self._stack.close()
            self._stack = stack.pop_all()
        self._ends[-1] = table.time(later[1])
        self._pictures, self.position = self._resampled(later[0], start), later[1] if self._fps is None else start

    def take(self, frames: int | None = None) -> tuple[list[np.ndarray], float]:
        """At most `frames` pictures `[H, W, 3]` of one size, all without a number, and their frame rate.

        Raises:
            ValueError: there are none, FFmpeg finds some damaged, or the file ends before the end that it states.
        """
        path, begin, first, video = self._path, self._end, self.position, list[np.ndarray]()
        last, damaged, repeated = None, 0, 0
        del self._ends[:-1]
        with self._reading():
            for picture, view, _, is_damaged in self._next(math.inf if frames is None else frames):
                damaged += is_damaged
                repeated += picture is last
                height, width = view.size(picture.height, picture.width)
                _refuse_size(path, height, width)
                if (len(video) + 1) * height * width * 3 > MAX_BYTES:
                    raise ValueError(f"cannot decode video {path}: over {MAX_BYTES >> 30} GiB of frames; ask for fewer")
                # resampling repeats pictures
                video.append(video[-1] if picture is last else view.show(stored_pixels(picture)))
                last = picture
        if len(video) < (frames or math.inf):
            self._refuse_missing()
        if not video:
            what = f"it ends before frame {self.position + 1}" if self.position else "it holds no frames"
            raise ValueError(f"cannot decode video {path}: {what}")
        if damaged:
            raise ValueError(f"cannot decode video {path}: {damaged} of its pictures from {first + 1} on are damaged")
        if len({picture.shape for picture in video}) > 1:
            raise ValueError(f"cannot decode video {path}: the frame size changes inside the file")
        self.times = irregular(self._ends, repeated)
        if self._fps is not None:
            return video, self._fps
        # of a variable rate the mean
        rate, length = self.rate, self._end - begin
        constant = rate is not None and abs(length * rate - len(video)) < 0.5
        return video, (rate if constant else len(video) / length if rate or len(video) > 1 else 1.0) or 1.0

    def thumbnails(self, frames: int, *, seconds: float = math.inf) -> tuple[list[np.ndarray], list[float]]:
        """At most `frames` pictures `[27, 48, 3]` as shown, squeezed to that size, and until when each is shown, in s.

        Less are returned after `seconds`, none at the end of the file.
        """
        small, ends = list[np.ndarray](), list[float]()
        with self._reading():
            for picture, view, *_ in self._next(frames, seconds):
                height, width = (48, 27) if view.transpose else (27, 48)
                if isinstance(picture, Image.Image):
                    pixels = np.asarray(picture.convert("RGB").resize((width, height)))
                else:
                    pixels = converted(picture, "rgb24", width=width, height=height)
                small.append(view._replace(aspect=1.0).show(pixels))
                ends.append(self._end)
        if not ends:
            self._refuse_missing()
        return small, ends

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """An error of the block closes the file and is told with its name."""
        with self._stack.pop_all() as stack:
            yield
            self._stack = stack.pop_all()

    def _next(self, count: float, seconds: float = math.inf) -> Iterator[Shown]:
        """At most `count` pictures, and none after the first that took too long."""
        over = time.monotonic() + seconds
        while count > 0 and (item := next(self._pictures, None)) is not None:
            self._end = item[2]
            self.position += 1
            yield item
            count = count - 1 if time.monotonic() < over else 0


def probe_video(path: str | Path, *, fps: float | None = None) -> tuple[int | None, int, int]:
    """Size as shown and length of a video or image file, from its header and its first frame.

    Args:
        path: video or image file.
        fps: frame rate to which the counted frames are resampled.

    Returns:
        (frames, height, width); frames is an estimate from the duration, or None, where the header has no number.
    """
    path = Path(path)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        with _opened_image(path) as image:
            count = len(_numbers(image))
            return count if count == 1 or fps is None else None, *View.of_picture(image).size(image.height, image.width)
    with _opened(path) as (container, stream):
        rate = rate_of(stream)
        num_frames = stream.frames or round((container.duration or 0) / av.time_base * rate)
        view = View(aspect_of(stream))
        # what is wrong with the pictures is reported when they are read
        with contextlib.suppress(av.FFmpegError):
            view = next((View.of_frame(frame, view.aspect) for frame in container.decode(stream)), view)
        size = view.size(stream.height, stream.width)
        if num_frames < 1 or 0 in (stream.height, stream.width):
            return None, *size
        if fps is not None:
            num_frames = max(1, instants(num_frames / rate, steady_rate(stream), fps))
        return num_frames, *size


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
        raise ValueError(f"video must be uint8 [T, H, W, 3] and not empty, got {video.dtype} {list(video.shape)}")
    return video.detach().cpu().numpy()


@contextlib.contextmanager
def _opened(path: Path, threads: int = 1) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container of a video file and its first moving picture; errors of the block name the file too."""
    if not path.is_file():
        raise ValueError(f"no such video: {path}")
    try:
        with opened(path) as container:
            if not container.streams.video:
                raise ValueError(f"cannot decode video {path}: it has no video stream")
            stream = container.streams.video[0 if len(container.streams.video) == 1 else _moving(path)]
            if stream.codec_context is None:
                raise ValueError(f"cannot decode video {path}: no decoder for its video stream")
            _refuse_size(path, stream.height, stream.width)
            context = stream.codec_context
            if context.codec_tag in _DOLBY_VISION and context.color_trc == 2:
                refuse_dolby_vision()
            stream.thread_type, context.thread_count = "AUTO", threads
            yield container, stream
    except (NotShown, av.FFmpegError, OSError, MemoryError, OverflowError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise ValueError(f"cannot decode video {path}: {reason.splitlines()[0]}") from error


def _moving(path: Path) -> int:
    """Place of the first video stream with more than one picture, so no cover; 0 if there is none."""
    with opened(path) as container:
        places = [stream.index for stream in container.streams.video]
        pictures = Counter(p.stream_index for p in container.demux(video=[*range(len(places))]) if p.size)
    return next((place for place, index in enumerate(places) if pictures[index] > 1), 0)


@contextlib.contextmanager
def _opened_image(path: Path) -> Iterator[Image.Image]:
    """An image file whose pixels are not read yet; errors of the block name the file too."""
    if not path.is_file():
        raise ValueError(f"no such image: {path}")
    try:
        # only these formats, because others call external programs
        with Image.open(path, formats=_FORMATS) as image:
            _refuse_size(path, image.height, image.width)
            yield image
    except (NotShown, UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot decode image {path}: {error}") from error


def _refuse_size(path: Path, height: int, width: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"cannot decode {path}: {width}x{height} pixels are over the limit")


@contextlib.contextmanager
def _shown(path: Path, threads: int) -> Iterator[tuple[Iterator[Shown], float | None, float]]:
    """The pictures of a file in their order in time, its frame rate, None for an image file, and its stated length."""
    if path.suffix.lower() in IMAGE_SUFFIXES:
        with _opened_image(path) as image:
            yield _pictures(image), None, math.inf
    else:
        with _opened(path, threads) as (container, stream):
            # files of this kind count each frame in a table
            ticks = stream.duration if "mp4" in container.format.name else None
            length = float(ticks * stream.time_base) if ticks and stream.time_base else math.inf
            yield timed_frames(container, stream), steady_rate(stream), length


def _numbers(image: Image.Image) -> range:
    """Frames of an image file, without the picture that an animated PNG has for readers of still ones."""
    count = getattr(image, "n_frames", 1) if image.format in _ANIMATED else 1
    return range(1 if count > 1 and image.info.get("default_image") else 0, count)


def _pictures(image: Image.Image) -> Iterator[Shown]:
    view, end, numbers = View.of_picture(image), 0.0, _numbers(image)
    for i in numbers:
        image.seek(i)
        image.load()
        duration = image.info.get("duration", 0)
        # browsers show frames without a duration for 100 ms; a lone picture is one frame at any rate
        end += (duration if duration > 10 else 100) / 1000 if len(numbers) > 1 else 1 / FASTEST
        yield image.copy(), view, end, False
