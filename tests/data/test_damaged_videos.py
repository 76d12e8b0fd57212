"""What FFmpeg knows of a file's damage is asked: no damaged picture becomes data, and what is whole stays."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from tests.data.encoding import encode_folder
from tests.data.test_timed_frames import write_film
from vsa.data.encode_errors import UnusableFiles
from vsa.data.shards import LatentReader
from vsa.data.video_files import read_video

FRAMES, HEIGHT, WIDTH = 48, 48, 64
# pictures that differ more from those of the whole file are wrong
WRONG_DB = 35.0
CODECS: dict[str, tuple[str, str, dict[str, str]]] = {
    "h264.mp4": ("libx264", "yuv420p", {"crf": "20", "g": "16"}),
    "mpeg4.mp4": ("mpeg4", "yuv420p", {"b": "500k", "g": "12"}),
    "mjpeg.mov": ("mjpeg", "yuvj420p", {}),
    "h264.ts": ("libx264", "yuv420p", {"crf": "20", "g": "16"}),
    "mpeg2.mpg": ("mpeg2video", "yuv420p", {"b": "800k"}),
    "hevc.mp4": ("libx265", "yuv420p", {"x265-params": "log-level=none:keyint=16"}),
    "vp9.webm": ("libvpx-vp9", "yuv420p", {"b": "300k", "deadline": "realtime", "cpu-used": "8", "g": "16"}),
}


def write_moving(path: Path, name: str, *, times: list[int] | None = None, **container: str) -> Path:
    """A texture over moving waves, at 24 frames per second or at times in 1/24 s."""
    codec, pixels, options = CODECS[name]
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    texture = np.random.default_rng(7).integers(-12, 12, (HEIGHT, WIDTH, 3))
    with av.open(str(path), "w", options=container) as file:
        stream: Any = file.add_stream(codec, rate=24)
        stream.height, stream.width, stream.pix_fmt, stream.options = HEIGHT, WIDTH, pixels, {**options, "threads": "1"}
        for i, time in enumerate(times or range(FRAMES)):
            wave = 128 + 60 * np.sin((x + 3 * i) / 9) + 40 * np.sin((y - 2 * i) / 7)
            picture = np.clip(wave[..., None] + np.roll(texture, (i, 2 * i), (0, 1)), 0, 255).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 24)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def flipped(data: bytes, at: int, rng: np.random.Generator) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :]


def noisy(data: bytes, at: int, rng: np.random.Generator) -> bytes:
    return data[:at] + rng.bytes(60) + data[at + 60 :]


def zeroed(data: bytes, at: int, rng: np.random.Generator) -> bytes:
    return data[:at] + bytes(300) + data[at + 300 :]


DAMAGES: tuple[Callable[[bytes, int, np.random.Generator], bytes], ...] = (flipped, noisy, zeroed)


def damaged(whole: Path, count: int) -> Iterator[Path]:
    """The file with damage at places among its pictures."""
    data, rng = whole.read_bytes(), np.random.default_rng(5)
    for damage in DAMAGES:
        for _ in range(count):
            path = whole.with_stem("damaged")
            path.write_bytes(damage(data, int(rng.integers(int(0.05 * len(data)), int(0.7 * len(data)))), rng))
            yield path


def wrong_pictures(whole: Path, count: int) -> tuple[int, int, int]:
    """Files, those that are refused, and wrong pictures in the others."""
    expected = read_video(whole)[0].double()
    files = refused = wrong = 0
    for path in damaged(whole, count):
        files += 1
        try:
            video = read_video(path)[0].double()
        except ValueError:
            refused += 1
        else:
            if video.shape[1:] != expected.shape[1:]:
                wrong += len(video)
                continue
            error = (video - expected[: len(video)]).square().mean((1, 2, 3))
            wrong += int((error > 255**2 / 10 ** (WRONG_DB / 10)).sum())
    return files, refused, wrong


@pytest.mark.parametrize("name", ["h264.mp4", "mpeg4.mp4", "mjpeg.mov"])
def test_no_picture_that_is_found_damaged_becomes_data(name: str, tmp_path: Path) -> None:
    whole = write_moving(tmp_path / name, name)
    assert len(read_video(whole)[0]) == FRAMES
    files, refused, wrong = wrong_pictures(whole, 4)
    assert refused >= files // 2
    # of arithmetic codes a flipped bit may give another picture that is as valid
    assert wrong <= {"h264.mp4": 40, "mpeg4.mp4": 0, "mjpeg.mov": 4}[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    # wrong pictures in 120 files; of arithmetic codes a flipped bit may give another picture that is as valid;
    # h264.mp4 gave 164 and 174 alone and 203 beside other tests, why was not found (443 before it was mended)
    [("h264.mp4", 300), ("mpeg4.mp4", 0), ("mjpeg.mov", 10), ("h264.ts", 700), ("mpeg2.mpg", 10), ("hevc.mp4", 100)],
)
def test_wrong_pictures_that_pass_are_few(name: str, most: int, tmp_path: Path) -> None:
    files, refused, wrong = wrong_pictures(write_moving(tmp_path / name, name), 40)
    print(f"{name}: {refused} of {files} refused, {wrong} wrong pictures pass")
    assert wrong <= most
    assert refused >= files // 4


@pytest.mark.parametrize(("name", "codec"), [("film.mp4", "libx264"), ("film.ts", "libx264"), ("film.ts", "libx265")])
def test_pictures_made_of_others_before_a_keyframe_are_no_damage(name: str, codec: str, tmp_path: Path) -> None:
    settings = "open-gop=1:keyint=24:bframes=3:scenecut=0"
    if codec == "libx265":
        # with its assembler 12 of 15 processes aborted in writing this film, without it none of 8
        settings += ":asm=0"
    film = write_film(tmp_path / name, {f"{codec.removeprefix('lib')}-params": settings}, codec=codec)
    whole = read_video(film)[0]
    for start in range(20, len(whole) - 10, 17):
        assert torch.equal(read_video(film, start=start, frames=10)[0], whole[start : start + 10]), start
    if name == "film.ts":
        # a recording that begins between two keyframes
        data = film.read_bytes()
        film.write_bytes(data[len(data) // 3 // 188 * 188 :])
        later = read_video(film)[0]
        assert len(later) >= 24
        assert torch.equal(later[-24:], whole[-24:])


def encode(folder: Path, out: Path, **options: Any):
    for path in folder.iterdir():
        path.with_suffix(".txt").write_text("waves")
    return encode_folder(folder, out, tell=lambda line: None, **options)


def break_picture(path: Path, number: int, seed: int = 0) -> None:
    """Overwrite the end of a picture's bytes."""
    with av.open(str(path)) as container:
        packet = sorted((p for p in container.demux(video=0) if p.size), key=lambda p: p.pts or 0)[number]
        place, size = packet.pos, packet.size
    data = bytearray(path.read_bytes())
    data[place + size // 3 : place + size] = np.random.default_rng(seed).bytes(size - size // 3)
    path.write_bytes(data)


def test_a_damaged_file_is_refused_or_left_out_and_told(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    for name in ("good", "bad"):
        write_moving(tmp_path / "v" / f"{name}.mp4", "h264.mp4")
    whole = read_video(tmp_path / "v" / "bad.mp4", frames=12)[0]
    break_picture(tmp_path / "v" / "bad.mp4", 21)
    reason = r"cannot decode video .*bad\.mp4: \d+ of its pictures from 1 on are damaged"
    with pytest.raises(UnusableFiles, match=f"{reason}; --skip-bad leaves it out"):
        encode(tmp_path / "v", tmp_path / "out")
    report = encode(tmp_path / "v", tmp_path / "out", skip_bad=True)
    assert [name for name, _ in report.skipped] == ["bad.mp4"]
    assert {sample.about.source for sample in LatentReader(tmp_path / "out").index.samples.values()} == {"good.mp4"}
    # the pictures before the damage are whole
    assert torch.equal(read_video(tmp_path / "v" / "bad.mp4", frames=12)[0], whole)


def test_clips_of_a_film_before_and_after_the_damage_stay(tmp_path: Path) -> None:
    film = write_film(tmp_path / "film.mp4", {"g": "48", "bf": "3"})
    whole = read_video(film)[0]
    break_picture(film, 100)
    for start in (0, 80, 200, 292):
        assert torch.equal(read_video(film, start=start, frames=8)[0], whole[start : start + 8])
    # what is made of a damaged picture is damaged too, up to the next keyframe at 144
    for start in (96, 112, 130, 140):
        with pytest.raises(ValueError, match=rf"\d of its pictures from {start + 1} on are damaged"):
            read_video(film, start=start, frames=8)


def test_a_file_that_a_download_cut_is_told(tmp_path: Path) -> None:
    whole = write_moving(tmp_path / "a.mp4", "h264.mp4", movflags="+faststart")
    data = whole.read_bytes()
    with av.open(str(whole)) as container:
        ends = [entry.pos + entry.size for entry in container.streams.video[0].index_entries]
    (tmp_path / "cut.mp4").write_bytes(data[: ends[20]])
    with pytest.raises(ValueError, match=r"cut\.mp4: (it ends after .* of the 2 s that its header states|\d+ of its)"):
        read_video(tmp_path / "cut.mp4")
    with pytest.raises(ValueError, match=r"cut\.mp4"):
        read_video(tmp_path / "cut.mp4", frames=40)
    # clips before the cut are whole
    assert torch.equal(read_video(tmp_path / "cut.mp4", frames=12)[0], read_video(whole, frames=12)[0])


def trimmed(path: Path) -> Path:
    """A second from the tenth picture on, by the edit list, as phones cut videos."""
    data = bytearray(path.read_bytes())
    place = data.index(b"elst") + 12
    _, begin = struct.unpack_from(">Ii", data, place)
    struct.pack_into(">Ii", data, place, 1000, begin + 512 * 10)
    path.write_bytes(data)
    return path


def test_whole_files_of_unusual_kinds_stay(tmp_path: Path) -> None:
    assert len(read_video(trimmed(write_moving(tmp_path / "trimmed.mp4", "h264.mp4")))[0]) == 24
    gaps = [i for i in range(FRAMES) if i not in (5, 6, 7, 20)]
    # its header counts the empty frames
    assert len(read_video(write_moving(tmp_path / "gaps.avi", "mpeg4.mp4", times=gaps))[0]) == 44
    late = [i + 100 for i in gaps]
    assert len(read_video(write_moving(tmp_path / "late.mp4", "h264.mp4", times=late))[0]) == 44
    fragments = write_moving(tmp_path / "a.mp4", "h264.mp4", movflags="+frag_keyframe+empty_moov")
    assert len(read_video(fragments)[0]) == FRAMES
    # a recording that begins within a group of pictures
    stream = write_moving(tmp_path / "a.ts", "h264.ts").read_bytes()
    (tmp_path / "late.ts").write_bytes(stream[188 * 40 :])
    assert 16 <= len(read_video(tmp_path / "late.ts")[0]) < FRAMES
    for name in ("vp9.webm", "hevc.mp4", "mpeg2.mpg"):
        assert len(read_video(write_moving(tmp_path / name, name))[0]) == FRAMES
