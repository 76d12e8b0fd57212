"""Buckets: the clip sizes that a folder of videos is brought to."""

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
        """The bucket written as HEIGHTxWIDTHxFRAMES.

        Raises:
            ValueError: it is not three positive numbers.
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise ValueError(f"a bucket is HEIGHTxWIDTHxFRAMES, such as 448x832x61, got {text!r}")
        height, width, frames = (int(n) for n in match.groups())
        return Bucket(height, width, frames)


def choose_bucket(buckets: Sequence[Bucket], *, frames: int, height: int, width: int) -> Bucket | None:
    """The bucket of a video: of those it can fill, the nearest in aspect, then the longest, then the largest.

    Images go to buckets of one frame and videos to longer ones. Of equal aspect and length, the largest that needs no
    enlarging is taken, or the smallest when all of them do.

    Args:
        buckets: what there is to choose from.
        frames: of the video; 1 for an image.
        height: of its pictures.
        width: of its pictures.

    Returns:
        None when no bucket can be filled.
    """
    fitting = [b for b in buckets if (b.frames == 1) == (frames == 1) and b.frames <= frames]

    def rank(bucket: Bucket) -> tuple[float, int, bool, int]:
        # rounded: 448x832 and 224x416 have one aspect
        distance = round(abs(math.log(bucket.height / bucket.width) - math.log(height / width)), 6)
        enlarged = bucket.height > height or bucket.width > width
        area = bucket.height * bucket.width
        return distance, -bucket.frames, enlarged, area if enlarged else -area

    return min(fitting, key=rank, default=None)
