"""A late clip of a film is reached from the keyframe before it, and is the clip that decoding from the start gives."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from vsa.data import timed_frames, video_files
from vsa.data.decoder_process import DecoderProcess
from vsa.data.video_files import read_video

FRAMES = 300
B_FRAMES = {"g": "48", "bf": "3"}


def write_film(
    path: Path, options: dict[str, str], *, codec: str = "libx264", shift: int = 0, dropped: Collection[int] = ()
) -> Path:
    """A texture that moves by a row a frame, at 24 frames per second, its first frame at number `shift`."""
    still = np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8)
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream(codec, rate=24, options={**options, "threads": "1"})
        stream.height, stream.width, stream.pix_fmt = 48, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 24)
        for number in sorted({*range(FRAMES)} - {*dropped}):
            frame = av.VideoFrame.from_ndarray(np.roll(still, number, 0), format="rgb24")
            frame.pts, frame.time_base = number + shift, Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Number of the frame at which decoding went on, of each jump; None where it went on from the start."""
    numbers: list[int | None] = []

    def spied(*arguments):
        later = timed_frames.frames_before(*arguments)
        numbers.append(None if later is None else later[1])
        return later

    monkeypatch.setattr(video_files, "frames_before", spied)
    return numbers


STARTS = (101, 143, 144, 145, 250)
OPEN = {**B_FRAMES, "x264-params": "open-gop=1"}
REFRESH = {"g": "48", "x264-params": "intra-refresh=1"}
CASES = {
    "a.mp4": ({**B_FRAMES}, {"shift": 100}),
    "open.mov": (OPEN, {}),
    "open.ts": (OPEN, {"shift": 100}),
    "variable.mkv": (B_FRAMES, {"dropped": range(50, FRAMES, 7)}),
    "short.mp4": ({"g": "5", "bf": "3"}, {}),
    "vp9.webm": ({"g": "48", "deadline": "realtime", "cpu-used": "8"}, {"codec": "libvpx-vp9"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_late_clip_is_that_of_decoding_from_the_start(name: str, tmp_path: Path, jumps: list[int | None]) -> None:
    options, more = CASES[name]
    film = write_film(tmp_path / name, options, **more)
    for fps in (None, 16, 23.976):
        whole, _ = read_video(film, fps=fps)
        for start in (start for start in STARTS if start + 4 <= len(whole)):
            clip, rate = read_video(film, fps=fps, start=start, frames=4)
            assert torch.equal(clip, whole[start : start + 4])
            # neighbours are other frames
            assert not torch.equal(clip[0], clip[-1])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(video_files, "_NEAR", FRAMES)
                assert read_video(film, fps=fps, start=start, frames=4)[1] == rate
    assert len(jumps) >= 10
    assert all(number is not None and number > 0 for number in jumps)


def test_a_jump_to_a_wrong_frame_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = write_film(tmp_path / "a.mp4", B_FRAMES)
    whole, _ = read_video(film)

    def off_by_one(*arguments):
        frames, number = timed_frames.frames_before(*arguments) or ((), 0)
        return frames, number + 1

    monkeypatch.setattr(video_files, "frames_before", off_by_one)
    assert not torch.equal(read_video(film, start=150, frames=4)[0], whole[150:154])


@pytest.mark.parametrize(
    ("name", "options"),
    # time stamps that are guessed, frames that are whole only after a while, no keyframe but the first
    [("open.avi", OPEN), ("refresh.mp4", REFRESH), ("one.mp4", {"g": "1000", "sc_threshold": "0"})],
)
def test_a_film_without_such_keyframes_is_decoded_from_the_start(
    name: str, options: dict[str, str], tmp_path: Path, jumps: list[int | None]
) -> None:
    film = write_film(tmp_path / name, options)
    whole, _ = read_video(film)
    for start in STARTS:
        assert torch.equal(read_video(film, start=start, frames=4)[0], whole[start : start + 4])
    assert not any(jumps), jumps


def test_clips_in_turn_and_time_stamps_that_take_too_long(tmp_path: Path, jumps: list[int | None]) -> None:
    film = write_film(tmp_path / "a.mp4", B_FRAMES)
    whole, _ = read_video(film)
    reader = video_files.VideoReader(film)
    for start in (4, 9, 200, 204, 296):
        assert reader.skip(start)
        pictures, rate = reader.take(4)
        assert np.array_equal(np.stack(pictures), whole[start : start + 4])
        assert rate == 24
    # the next ones are near
    assert jumps == [192]
    reader.close()
    assert timed_frames.read_table(film, 0, seconds=-1) is None
    assert timed_frames.read_table(film, 0, seconds=60) is not None


def test_a_clip_behind_the_end_is_one_line(tmp_path: Path) -> None:
    film = write_film(tmp_path / "a.mp4", B_FRAMES)
    with DecoderProcess(seconds=60, memory_gib=4) as decoder:
        for fps in (None, 12):
            with pytest.raises(ValueError, match=r"cannot decode video .*a\.mp4: it ends before frame \d+$"):
                decoder.read_video(film, start=5000, frames=4, fps=fps)
