from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsa.data.buckets import Bucket, choose_bucket

sizes = st.integers(1, 12).map(lambda n: 16 * n)
buckets = st.builds(Bucket, sizes, sizes, st.sampled_from([1, 5, 9, 33, 61]))


@given(
    buckets=st.lists(buckets, max_size=6),
    frames=st.integers(1, 70),
    height=st.integers(10, 300),
    width=st.integers(10, 300),
)
@settings(max_examples=300, deadline=None)
def test_the_choice_is_fillable_nearest_and_longest(
    buckets: list[Bucket], frames: int, height: int, width: int
) -> None:
    choice = choose_bucket(buckets, frames=frames, height=height, width=width)
    fillable = [b for b in buckets if b.frames <= frames and (b.frames > 1) == (frames > 1)]
    if choice is None:
        assert not fillable
        return
    assert choice in fillable

    def distance(bucket: Bucket) -> float:
        return abs(math.log(bucket.height * width / (bucket.width * height)))

    for other in fillable:
        assert distance(choice) <= distance(other) + 1e-5
        if abs(distance(other) - distance(choice)) < 1e-9:
            assert choice.frames >= other.frames
    assert choose_bucket(buckets[::-1], frames=frames, height=height, width=width) in fillable


@pytest.mark.parametrize(
    ("frames", "height", "width", "expected"),
    [
        (81, 1080, 1920, "448x832x61"),
        # too short for the wide bucket
        (40, 1080, 1920, "480x480x33"),
        (81, 500, 480, "480x480x33"),
        (20, 500, 480, None),
        (1, 500, 480, "512x512x1"),
        # of one aspect: the longer, then the largest without enlarging
        (61, 448, 832, "448x832x61"),
        (61, 300, 560, "224x416x61"),
        (33, 100, 100, "480x480x33"),
    ],
)
def test_examples(frames: int, height: int, width: int, expected: str | None) -> None:
    names = ("448x832x61", "224x416x61", "448x832x5", "480x480x33", "512x512x1")
    options = [Bucket.parse(name) for name in names if name != "448x832x5"]
    choice = choose_bucket(options, frames=frames, height=height, width=width)
    assert (None if choice is None else str(choice)) == expected


@pytest.mark.parametrize("text", ["", "448x832", "448x832x61x1", "448x0x61", "-448x832x61", "448 832 61", "448X832X61"])
def test_malformed_buckets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HEIGHTxWIDTHxFRAMES"):
        Bucket.parse(text)
