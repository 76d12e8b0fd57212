"""Which pictures `--fps` takes, against FFmpeg's own filter `fps` on the same time stamps."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.filter import Graph

from vsa.data.resampling import FASTEST, instants, irregular, resampled, steady_rate
from vsa.data.video_files import probe_video, read_video

RATES = (8, 12, 15, 16, 23.976023976023978, 24, 25, 29.97002997002997, 30, 48, 50, 59.94005994005994, 60)
UNITS = (Fraction(1, 90000), Fraction(1, 1000), Fraction(1, 600), Fraction(1, 15360))


def stamped(times: Sequence[float], unit: Fraction) -> list[int]:
    """Time stamps, which begin at 0."""
    return [round((time - times[0]) / unit) for time in times]


def ours(stamps: Sequence[int], unit: Fraction, length: float, rate: float, fps: float) -> list[int]:
    ends: list[Any] = [*(float(stamp * unit) for stamp in stamps[1:]), float(stamps[-1] * unit) + length]
    shown: Any = [(number, None, end, False) for number, end in enumerate(ends)]
    return [number for number, *_ in resampled(shown, rate, fps, 0)]  # type: ignore[misc]


def filtered(stamps: Sequence[int], unit: Fraction, length: float, *filters: str) -> list[int]:
    """Numbers of the pictures that a chain of FFmpeg's filters lets through."""
    graph: Any = Graph()
    links = [graph.add_buffer(width=16, height=16, format="gray", time_base=unit)]
    links += [graph.add("fps", text) for text in filters]
    graph.link_nodes(*links, graph.add("buffersink")).configure()
    numbers = list[int]()
    for number, stamp in enumerate([*stamps, None]):
        frame = None
        if stamp is not None:
            frame = av.VideoFrame.from_ndarray(np.full((16, 16), number, np.uint8), format="gray")
            frame.pts, frame.time_base = stamp, unit
            frame.duration = round(length / unit)
        graph.push(frame)
        while True:
            try:
                numbers.append(int(graph.pull().to_ndarray()[0, 0]))
            except (BlockingIOError, EOFError):
                break
    return numbers


def exact(rate: float) -> str:
    fraction = Fraction(rate).limit_denominator(1001)
    return f"{fraction.numerator}/{fraction.denominator}"


def unsteady(kind: str, rate: float, count: int = 100) -> list[float]:
    rng = np.random.default_rng(2)
    times = np.arange(count) / rate
    if kind == "jitter":
        times[1:] += rng.uniform(-0.3, 0.3, count - 1) / rate
    if kind == "gaps":
        times = times[[0, *sorted(rng.choice(np.arange(1, count), count * 2 // 3, replace=False))]]
    if kind == "pauses":
        times = np.cumsum([0, *rng.choice([1, 1, 1, 2, 15, 40], count - 1)]) / rate
    return times.tolist()


ALL = [(RATES[2::5], UNITS[1:2], 1), pytest.param(RATES, UNITS, 100, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("rates", "units", "least"), ALL, ids=["some", "all"])
@pytest.mark.parametrize("kind", ["steady", "jitter", "gaps", "pauses"])
def test_at_the_rate_of_the_file_the_pictures_are_those_of_the_filter(
    kind: str, rates: Sequence[float], units: Sequence[Fraction], least: int
) -> None:
    repeats = 0
    for rate in rates:
        for unit in units:
            stamps = stamped(unsteady(kind, rate), unit)
            taken = ours(stamps, unit, 1 / rate, rate, rate)
            expected = filtered(stamps, unit, 1 / rate, f"fps={exact(rate)}:round=near")
            assert taken[: len(expected) - 1] == expected[:-1], (rate, unit)
            assert abs(len(taken) - len(expected)) <= 1
            repeats += len(taken) - len({*taken})
    # where every picture has its place, none is taken twice and none is left out
    assert (repeats == 0) == (kind in ("steady", "jitter"))


@pytest.mark.parametrize(("rates", "units", "least"), ALL, ids=["some", "all"])
@pytest.mark.parametrize("kind", ["steady", "jitter", "gaps", "pauses"])
def test_at_other_rates_they_are_the_newest_of_what_the_filter_makes_steady(
    kind: str, rates: Sequence[float], units: Sequence[Fraction], least: int
) -> None:
    compared = 0
    for rate in rates:
        stamps = stamped(unsteady(kind, rate), UNITS[0])
        for fps in rates:
            near = round(rate / fps)
            if fps > rate or (near and abs(rate / fps / near - 1) < 0.01 and rate / fps != near):
                continue
            chain = f"fps={exact(rate)}:round=near", f"fps={exact(fps)}:round=up"
            expected = filtered(stamps, UNITS[0], 1 / rate, *chain)
            taken = ours(stamps, UNITS[0], 1 / rate, rate, fps)
            assert taken[: len(expected) - 1] == expected[:-1], (rate, fps)
            compared += 1
    assert compared >= least * 0.6


def test_a_file_without_a_rate_and_rates_that_are_nearly_equal_are_filtered_at_once() -> None:
    times = unsteady("jitter", 24)
    for rate, fps in ((2 * FASTEST, 24), (2 * FASTEST, 10), (24000 / 1001, 24), (24, 24000 / 1001), (30000 / 1001, 30)):
        stamps = stamped(times, UNITS[1])
        expected = filtered(stamps, UNITS[1], 1 / 24, f"fps={exact(fps)}:round=near")
        assert ours(stamps, UNITS[1], 1 / 24, rate, fps)[: len(expected) - 1] == expected[:-1]


def test_the_choice_of_a_steady_file_is_by_exact_numbers_as_before() -> None:
    for rate in (8, 12, 24, 25, 30, 60):
        for fps in (3, 5, 8, 12, 12.5, 16, 24, 30, 48):
            expected = [k * 2 * rate // int(2 * fps) for k in range(1000) if k * 2 * rate < 41 * int(2 * fps)]
            stamps = stamped([i / rate for i in range(41)], UNITS[0])
            assert ours(stamps, UNITS[0], 1 / rate, rate, fps) == expected
    # the control: rates that are neither equal nor multiples
    assert ours(stamped([i / 24 for i in range(9)], UNITS[0]), UNITS[0], 1 / 24, 24, 16) == [0, 1, 3, 4, 6, 7]


def write_at(path: Path, times: Sequence[float], unit: Fraction) -> Path:
    """Grey pictures 2 i at times in seconds, without a declared rate."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264")
        stream.height, stream.width, stream.pix_fmt, stream.options = 16, 16, "yuv420p", {"qp": "0", "threads": "1"}
        stream.codec_context.time_base, stream.codec_context.framerate = unit, Fraction(0, 1)
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 2 * i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(time / unit), unit
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("name", ["milliseconds.mkv", "milliseconds.mp4", "phone.mp4", "phone.mkv"])
def test_files_with_rounded_and_unsteady_stamps_lose_and_repeat_no_picture(name: str, tmp_path: Path) -> None:
    rate, unit = (30, Fraction(1, 90000)) if "phone" in name else (24, Fraction(1, 1000))
    rng = np.random.default_rng(4)
    times = [i / rate + float(rng.uniform(-1e-3, 1e-3)) * ("phone" in name and i > 0) for i in range(100)]
    path = write_at(tmp_path / name, times, unit)
    with av.open(str(path)) as container:
        assert steady_rate(container.streams.video[0]) == rate
    whole, _ = read_video(path)
    # without a length, the last picture of some files is none
    assert len(whole) >= 99
    assert (whole[1:] != whole[:-1]).any(3).any(2).any(1).sum() > 80
    assert torch.equal(read_video(path, fps=rate)[0], whole)
    assert torch.equal(read_video(path, fps=rate / 2)[0], whole[::2])
    assert (probe_video(path, fps=rate)[0] or 0) in (99, 100)


def test_what_is_told_of_irregular_times() -> None:
    steady = [i / 24 for i in range(30)]
    assert irregular(steady, 0) == ""
    assert irregular([round(1000 * time) / 1000 for time in steady], 0) == ""
    assert irregular(steady, 3) == "3 repeated"
    assert irregular([*steady[:9], *steady[11:]], 0) == "2 missing"
    assert irregular([*steady[:9], *(time + 2 for time in steady[9:])], 0) == "a pause of 2 s"
    assert irregular([time + 0.003 * (i % 2) for i, time in enumerate(steady)], 0) == "jitter of 6 ms"
    # pictures of a second each are no pauses
    assert irregular([float(i) for i in range(9)], 0) == ""


def test_a_picture_of_no_length_is_one_frame() -> None:
    for fps in (0.01, 1, 24, 239, 240):
        assert instants(1 / FASTEST, FASTEST, fps) == 1
        assert ours([0], Fraction(1, 1000), 0.001, 1000.0, fps) == [0]
