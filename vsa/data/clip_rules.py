"""Rules that cut a clip out of a video: number of frames, size, and errors for unsuitable videos.

T H W frames and pixels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.data import video_files
from vsa.data.buckets import Bucket, choose_bucket
from vsa.data.codecs import Codec, check_frames
from vsa.data.shots import Film, ShotsBy
from vsa.data.video_files import IMAGE_SUFFIXES
from vsa.errors import told_together

# height and width, in latent cells, of the patches of models: LTX-Video's take cells of 32 pixels one by one
_PATCHES = {"ltx-vae": 1}
# memory of a pixel value: float32 before and after scaling, and a byte
_BYTES_PER_VALUE = 9


class Decoder(Protocol):
    """Reader of video files: the functions of `vsa.data.video_files`, in this process or a separate one."""

    def read_video(
        self, path: str | Path, *, frames: int | None = None, fps: float | None = None, start: int | None = None
    ) -> tuple[Tensor, float]:
        """See `vsa.data.video_files.read_video`."""
        ...

    def probe_video(self, path: str | Path, *, fps: float | None = None) -> tuple[int | None, int, int]:
        """See `vsa.data.video_files.probe_video`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Scaling and cropping of one video.

    Args:
        scaled: (height, width) in pixels after scaling, before the centre crop.
        size: (frames, height, width) of the clip.
    """

    scaled: tuple[int, int]
    size: tuple[int, int, int]


class Window(NamedTuple):
    """A clip within a film: its first frame, after resampling, and its size (frames, height, width)."""

    start: int
    size: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class ClipRules:
    """Rules that cut a clip out of a video, or several out of its shots.

    Args:
        size: (height, width) in pixels: scale to cover, then crop the centre (None: keep the scale and crop to whole
            patches of 2 x 2 latent cells, so that models can train on the latents).
        frames: frames of a clip, from the start (None: all); reduced to a number that the codec can encode.
        fps: frame rate to which clips are resampled first, by time stamps (None: every stored frame).
        buckets: available clip sizes, instead of `size` and `frames`; see `choose_bucket`.
        clips_per_film: most clips of a video, spread over it; 0: all.
        stride: frames from the start of a clip to that of the next one (None: the length of the clip).
        shots: how shots are found, between which no clip lies. With one of `clips_per_film`, `stride` and `shots`, a
            video is a film with several clips; without them it is one clip from the start.
    """

    size: tuple[int, int] | None = None
    frames: int | None = None
    fps: float | None = None
    buckets: tuple[Bucket, ...] = ()
    clips_per_film: int | None = None
    stride: int | None = None
    shots: ShotsBy | None = None

    def __post_init__(self) -> None:
        if self.buckets and (self.size is not None or self.frames is not None):
            raise ValueError(f"buckets exclude size and frames, got size={self.size} and frames={self.frames}")
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise ValueError(f"fps must be above 0 and finite, got {self.fps}")
        if self.films and not self.buckets and self.frames is None:
            raise ValueError("clips_per_film, stride and shots need the length of a clip: frames or buckets")
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"stride must be at least 1 frame, got {self.stride}")

    @property
    def films(self) -> bool:
        """Whether videos are films, of which several clips are taken."""
        return (self.clips_per_film, self.stride, self.shots) != (None, None, None)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Every requested (height, width); empty if videos keep their size."""
        return [(b.height, b.width) for b in self.buckets] or ([self.size] if self.size is not None else [])

    def check(self, codec: Codec) -> None:
        """Raise ValueError for sizes that the codec cannot encode or that do not fit into memory."""
        told_together(
            *(partial(_check_size, codec, *size) for size in dict.fromkeys(self.sizes)),
            *(partial(check_frames, codec, frames) for frames in dict.fromkeys(self._lengths)),
        )
        for bucket in self.buckets or [Bucket(*size, self.frames or 1) for size in self.sizes]:
            _check_memory(bucket.frames, bucket.height, bucket.width, f"a clip of {bucket}")

    @property
    def _lengths(self) -> list[int]:
        """Every requested number of frames."""
        return [b.frames for b in self.buckets] or ([self.frames] if self.frames is not None else [])

    def untrainable(self, codec: Codec) -> list[tuple[int, int]]:
        """Requested sizes whose latents do not divide into the patches of models."""
        (_, sh, sw), patch = codec.stride, patch_of(codec.id)
        return sorted({(h, w) for h, w in self.sizes if h // sh % patch or w // sw % patch})

    def plan(self, path: Path, codec: Codec, *, frames: int, height: int, width: int) -> Cut:
        """Scaling and cropping of a video of the given size; ValueError if it is too short or too small."""
        st, sh, sw = codec.stride
        length_text = f"{frames} frame{'s' * (frames != 1)}"
        size, target_frames = self.size, self.frames
        still = frames == 1 and path.suffix.lower() in IMAGE_SUFFIXES
        if self.buckets:
            bucket = choose_bucket(self.buckets, frames=frames, height=height, width=width)
            if bucket is None:
                bucket_list = ", ".join(map(str, self.buckets))
                raise ValueError(
                    f"video {path} ({length_text} of {height}x{width}) is too small for the buckets {bucket_list}"
                )
            size, target_frames = (bucket.height, bucket.width), bucket.frames
        length = 1 if still else target_frames or codec.frames_that_fit(frames)
        # a video of one frame is a damaged or a wrong file, unless one frame was requested
        if length < 1 or length > frames or (length == 1 and not still and target_frames != 1):
            shortest = next(n for n in range(2, 2 * st + 1) if codec.frames_that_fit(n) == n)
            raise ValueError(f"video {path} has {length_text}, expected at least {target_frames or shortest}")

        if size is None:
            ph, pw = (patch_of(codec.id) * s for s in (sh, sw))
            cropped = (length, height - height % ph, width - width % pw)
            if 0 in cropped:
                raise ValueError(f"video {path} has {height}x{width} pixels, expected at least a patch of {ph}x{pw}")
            return Cut(scaled=(height, width), size=cropped)
        scale = max(size[0] / height, size[1] / width)
        scaled = (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
        return Cut(scaled=scaled, size=(length, *size))

    def windows(self, film: Film, path: Path, codec: Codec) -> tuple[list[Window], int]:
        """Every clip of a film, before at most `clips_per_film` are chosen, and the number of its shots that have none.

        Raises:
            ValueError: no shot is long enough, or the picture is too small.
        """
        windows, without = list[Window](), 0
        lengths = [shot.frames(film.rate, self.fps) for shot in film.shots]
        # a bucket of one frame is for pictures, not for what is left of a shot
        least = 2 if max(self._lengths) > 1 and sum(map(len, lengths)) > 1 else 1
        for frames in lengths:
            start, before = frames.start, len(windows)
            while start + least <= frames.stop:
                try:
                    cut = self.plan(path, codec, frames=frames.stop - start, height=film.height, width=film.width)
                except ValueError:
                    break
                windows.append(Window(start, cut.size))
                start += self.stride or cut.size[0]
            without += len(windows) == before
        if not windows:
            longest = max(map(len, lengths), default=0)
            try:
                self.plan(path, codec, frames=longest, height=film.height, width=film.width)
            except ValueError as error:
                raise ValueError(f"{error}, in the longest of its {len(lengths)} shots") from None
        return windows, without

    def chosen(self, windows: Sequence[Window]) -> list[Window]:
        """At most `clips_per_film` of the clips of a film, spread over it."""
        most = min(self.clips_per_film or len(windows), len(windows))
        return [windows[k * len(windows) // most] for k in range(most)]

    def fit(self, video: Tensor, path: Path, codec: Codec) -> Tensor:
        """Trim, scale and crop a decoded video.

        Args:
            video: uint8 `[T, H, W, 3]`.
            path: file of the video, for messages and to distinguish videos from images.
            codec: codec whose stride applies.

        Returns:
            uint8 clip `[T', H', W', 3]` that the codec can encode.
        """
        T, H, W, _ = video.shape
        cut = self.plan(path, codec, frames=T, height=H, width=W)
        frames, height, width = cut.size
        video = video[:frames]
        if cut.scaled != (H, W):
            _check_memory(frames, *cut.scaled, f"video {path}, scaled to {cut.scaled[0]}x{cut.scaled[1]},")
            pixels = video.permute(0, 3, 1, 2).float()
            pixels = F.interpolate(pixels, size=cut.scaled, mode="bilinear", align_corners=False, antialias=True)
            video = pixels.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        top, left = (video.shape[1] - height) // 2, (video.shape[2] - width) // 2
        return video[:, top : top + height, left : left + width].contiguous()

    def part(self, window: Window | None) -> tuple[int | None, int | None]:
        """First frame and number of frames that are read for a clip."""
        return (window.start, window.size[0]) if window else (None, max(self._lengths, default=None))

    def cut(
        self, path: Path, codec: Codec, decoder: Decoder = video_files, window: Window | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The clip of a file, uint8 `[T, H, W, 3]`, with its metadata.

        Args:
            path: the file.
            codec: codec whose stride applies.
            decoder: reader of the file.
            window: the clip of a film.
        """
        start, frames = self.part(window)
        video, rate = decoder.read_video(path, frames=frames, fps=self.fps, start=start)
        clip = self.fit(video, path, codec)
        info = {"fps": rate, "source_size": [video.shape[1], video.shape[2]], "clip_size": list(clip.shape[:3])}
        return clip, info

    def probe(
        self, path: Path, codec: Codec, decoder: Decoder = video_files
    ) -> tuple[tuple[int, int, int], int] | None:
        """Size (frames, height, width) of the clip of a file and the file's number of frames, from its header.

        None where the header does not tell it; ValueError for a file without a suitable clip; arguments as in `cut`.
        """
        frames, height, width = decoder.probe_video(path, fps=self.fps)
        if frames is None:
            return None
        try:
            return self.plan(path, codec, frames=frames, height=height, width=width).size, frames
        except ValueError:
            # a header can be wrong, and a file that seems too short decodes quickly
            size: tuple[int, int, int] = tuple(self.cut(path, codec, decoder)[1]["clip_size"])
            return size, size[0]


def patch_of(codec: str) -> int:
    """Height and width, in latent cells, of the patches of the models that take latents of a codec, by its id."""
    return next((patch for name, patch in _PATCHES.items() if codec.startswith(name)), 2)


def _check_size(codec: Codec, height: int, width: int) -> None:
    _, sh, sw = codec.stride
    if height < 1 or width < 1 or height % sh or width % sw:
        raise ValueError(f"size {height}x{width} (height x width) must be multiples of the codec stride {sh}x{sw}")
    ph, pw = (patch_of(codec.id) * s for s in (sh, sw))
    if height < ph or width < pw:
        raise ValueError(f"size {height}x{width} (height x width) is below the smallest tile, one token of {ph}x{pw}")


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_memory(frames: int, height: int, width: int, name: str) -> None:
    needed = _BYTES_PER_VALUE * 3 * frames * height * width
    if needed > _memory():
        raise ValueError(
            f"{name} needs {needed / 2**30:.1f} GiB of memory, this machine has {_memory() / 2**30:.1f}: "
            "choose a smaller size or fewer frames"
        )


def clip_size(codec: Codec, latent_shape: Sequence[int]) -> Bucket:
    """The clip size in pixels whose latents have a shape."""
    _, time, height, width = latent_shape
    stride, sh, sw = codec.stride
    fitting = [n for n in range(1, stride * time + 1) if codec.frames_that_fit(n) == n]
    # one latent frame is an image
    frames = next(n for n in fitting if codec.latent_shape(n, sh, sw)[1] == time)
    return Bucket(height=height * sh, width=width * sw, frames=frames)
