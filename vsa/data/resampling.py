"""Which picture of a file is shown at each instant of another frame rate."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from av.video.stream import VideoStream

from vsa.data.timed_frames import Shown

FASTEST = 240.0
"""Rate of the grid on which pictures of image files lie; a video file with a higher one has no frame rate."""

# seconds of a picture from which on it is a pause instead of a gap, and the milliseconds that rounding to one changes
_PAUSE, _ROUNDING = 0.5, 1.01
# largest denominator of a rate, and the share of a rate from which on two count as one, such as 23.976 and 24
_PARTS, _EQUAL = 10**6, Fraction(99, 100)


def steady_rate(stream: VideoStream) -> float:
    """Frames per second of the grid of a file's time stamps, as FFmpeg finds it; above `FASTEST` if there is none."""
    # the mean of some formats has all pictures in the time of all but the last
    mean = float(stream.average_rate or 0) * (1 - 1 / (stream.frames or math.inf))
    return steady if (steady := float(stream.base_rate or 0)) > _EQUAL * mean else 2 * FASTEST


def resampled(shown: Iterable[Shown], rate: float, fps: float, start: int) -> Iterator[Shown]:
    """Pictures at instants number `start` and later of 0, 1/fps, 2/fps, ...; a file has one at least."""
    item, count = None, start
    for item in shown:
        stop = instants(item[2], rate, fps)
        yield from [item] * (stop - count)
        count = max(count, stop)
    if item is not None and count == 0:
        yield item


def instants(end: float, rate: float, fps: float) -> int:
    """How many of the instants 0, 1/fps, 2/fps, ... come before the picture that begins after `end` seconds.

    Pictures are placed at the nearest multiple of the file's frame time, so that time stamps which are rounded or
    unsteady decide nothing: FFmpeg's filter `fps=RATE:round=near`. An instant belongs to the newest picture that begins
    at or before it. A rate within 1% of a multiple of `fps` counts as that, and a file without a rate has `fps`.

    Args:
        end: seconds from the first picture.
        rate: frame rate of the file, see `steady_rate`, or `FASTEST`.
        fps: instants per second.
    """
    grid, ratio = _grid(rate, fps)
    # halves go up, as in FFmpeg
    return math.ceil(math.floor(end * grid + 0.5 + 1e-6) / ratio)


@functools.cache
def _grid(rate: float, fps: float) -> tuple[float, Fraction]:
    """Rate of the grid, and how many times `fps` it is: once at least."""
    exact = Fraction(fps).limit_denominator(_PARTS)
    ratio = Fraction(1) if rate > FASTEST else Fraction(rate).limit_denominator(_PARTS) / exact
    ratio *= math.ceil(_EQUAL / ratio)
    ratio = Fraction(round(ratio)) if abs(ratio / round(ratio) - 1) < 1 - _EQUAL else ratio
    return float(ratio * exact), ratio


def irregular(ends: Sequence[float], repeated: int) -> str:
    """What a person should know of the times of a clip's pictures; empty if these come at a constant rate.

    Args:
        ends: when the first one begins and when each ends, in seconds.
        repeated: how many pictures are the one before once more, because of resampling.
    """
    lengths = [end - begin for begin, end in pairwise(ends)]
    usual = statistics.median(lengths or [1.0]) or 1.0
    short = [length for length in lengths if length < _PAUSE or length < 1.5 * usual]
    gaps = sum(max(round(length / usual), 1) - 1 for length in short)
    jitter = 1000 * max((abs(length - round(length / usual) * usual) for length in short), default=0)
    told = [f"{repeated} repeated"] * (repeated > 0) + [f"{gaps} missing"] * (gaps > 0)
    told += [f"a pause of {max(lengths, default=0):.2g} s"] * (len(short) < len(lengths))
    return ", ".join(told + [f"jitter of {jitter:.2g} ms"] * (jitter > _ROUNDING))
