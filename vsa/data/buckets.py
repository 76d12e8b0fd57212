"""Buckets: the clip sizes to which the videos of a folder are scaled and cropped."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """A clip size in pixels and frames; one frame is an image."""

    height: int
    width: int
    frames: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.frames}"

    @staticmethod
    def parse(text: str) -> Bucket:
        """The bucket written as HEIGHTxWIDTHxFRAMES."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise ValueError(f"expected a bucket HEIGHTxWIDTHxFRAMES such as 448x832x61, got {text!r}")
        height, width, frames = (int(n) for n in match.groups())
        return Bucket(height, width, frames)


def choose_bucket(buckets: Sequence[Bucket], *, frames: int, height: int, width: int) -> Bucket | None:
    """The bucket of a video: among those that it can fill, the closest in aspect ratio, then the longest and largest.

    Images use buckets of one frame and videos longer ones. Among buckets of equal aspect ratio and length, the largest
    one that needs no upscaling is chosen, or the smallest if all need it.

    Args:
        buckets: available buckets.
        frames: frames of the video; 1 for an image.
        height: height of its frames in pixels.
        width: width of its frames in pixels.

    Returns:
        The bucket, or None if the video cannot fill any.
    """
    fitting = [b for b in buckets if (b.frames == 1) == (frames == 1) and b.frames <= frames]

    def rank(bucket: Bucket) -> tuple[float, int, bool, int]:
        # rounded, so that 448x832 and 224x416 have equal aspect ratios
        distance = round(abs(math.log(bucket.height / bucket.width) - math.log(height / width)), 6)
        enlarged = bucket.height > height or bucket.width > width
        area = bucket.height * bucket.width
        return distance, -bucket.frames, enlarged, area if enlarged else -area

    return min(fitting, key=rank, default=None)
