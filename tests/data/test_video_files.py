from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from PIL import Image

from vsa.data import video_files
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import probe_video, read_video, write_gif, write_video
from vsa.files import atomic_file


def numbered(frames: int, height: int = 16, width: int = 16) -> torch.Tensor:
    """Frame i is the flat grey 10 * i."""
    return (10 * torch.arange(frames)).to(torch.uint8).view(-1, 1, 1, 1).expand(frames, height, width, 3).contiguous()


def frame_numbers(video: torch.Tensor) -> list[int]:
    return (video.float().mean((1, 2, 3)) / 10).round().int().tolist()


@pytest.mark.parametrize("size", [(5, 32, 48), (1, 16, 16), (3, 31, 33), (2, 48, 10)])
def test_mp4_round_trip(tmp_path: Path, size: tuple[int, int, int]) -> None:
    video, _, _ = render_clip(0, 1, size=size)
    write_video(tmp_path / "a.mp4", video, fps=12)
    actual, fps = read_video(tmp_path / "a.mp4")
    assert fps == 12
    assert actual.shape == (size[0], size[1] + size[1] % 2, size[2] + size[2] % 2, 3)
    assert (actual[:, : size[1], : size[2]].float() - video.float()).abs().mean() < 5
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_gif_round_trip(tmp_path: Path) -> None:
    video, _, _ = render_clip(0, 2, size=(6, 32, 32))
    write_gif(tmp_path / "a.gif", video, fps=5)
    actual, fps = read_video(tmp_path / "a.gif")
    assert fps == 5
    assert actual.shape == video.shape
    assert (actual.float() - video.float()).abs().mean() < 8


@pytest.mark.parametrize(("stored", "wanted"), [(8, 4), (8, 16), (10, 4), (8, 8), (12, 5), (5, 12)])
def test_resampling_takes_the_newest_frame_of_every_instant(tmp_path: Path, stored: int, wanted: int) -> None:
    write_video(tmp_path / "a.mp4", numbered(20), fps=stored)
    video, fps = read_video(tmp_path / "a.mp4", fps=wanted)
    # instants k / wanted before the end at 20 / stored, in integers
    expected = [k * stored // wanted for k in range(100) if k * stored < 20 * wanted]
    assert frame_numbers(video) == expected
    assert fps == wanted


def test_first_frames_only(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", numbered(9), fps=8)
    assert frame_numbers(read_video(tmp_path / "a.mp4", frames=4)[0]) == [0, 1, 2, 3]


def write_tracks(path: Path, tracks: list[torch.Tensor], codec: str, **dispositions: int) -> None:
    """A file with several video streams, each uint8 `[T, H, W, 3]`; dispositions by name, with the stream's place."""
    with av.open(str(path), mode="w") as container:
        streams: list[Any] = []
        for place, video in enumerate(tracks):
            stream: Any = container.add_stream("mjpeg" if len(video) == 1 else codec, rate=8)
            stream.height, stream.width = video.shape[1:3]
            stream.pix_fmt = "yuvj420p" if len(video) == 1 else "yuv420p"
            for name, at in dispositions.items():
                if at == place:
                    stream.disposition = Disposition[name]
            streams.append(stream)
        for stream, video in zip(streams, tracks, strict=True):
            for frame in video.numpy():
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.mkv"])
@pytest.mark.parametrize("dispositions", [{}, {"attached_pic": 0}, {"default": 0}], ids=str)
def test_a_still_before_the_video_is_not_the_video(tmp_path: Path, name: str, dispositions: dict[str, int]) -> None:
    still, video = numbered(1, 32, 48) + 200, numbered(6)
    write_tracks(tmp_path / name, [still, video], "libx264", **dispositions)
    assert probe_video(tmp_path / name)[1:] == (16, 16)
    assert frame_numbers(read_video(tmp_path / name)[0]) == [0, 1, 2, 3, 4, 5]
    assert frame_numbers(read_video(tmp_path / name, frames=2, fps=4)[0]) == [0, 2]


def test_of_several_videos_the_first_is_taken_and_a_lone_still_is_one_frame(tmp_path: Path) -> None:
    write_tracks(tmp_path / "two.mkv", [numbered(3), numbered(6)], "libx264")
    assert frame_numbers(read_video(tmp_path / "two.mkv")[0]) == [0, 1, 2]
    write_tracks(tmp_path / "stills.mkv", [numbered(1), numbered(1)], "libx264")
    assert frame_numbers(read_video(tmp_path / "stills.mkv")[0]) == [0]


def test_images(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for fps in (None, 16, 240):
        video, rate = read_video(tmp_path / "a.png", fps=fps)
        assert np.array_equal(video.numpy(), pixels[None, ..., :3])
        assert rate == (fps or 1)


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def hostile_files(folder: Path) -> list[Path]:
    """Files that must be refused: cut at many places, damaged, empty, mislabelled, without frames, absurdly large."""
    video, _, _ = render_clip(0, 3, size=(6, 32, 32))
    write_video(folder / "good.mp4", video)
    good = (folder / "good.mp4").read_bytes()
    files = []
    # the table of an mp4 lies at its end, before a few tags: every earlier cut loses it
    for cut in range(0, int(0.9 * len(good)), max(len(good) // 60, 1)):
        files.append(folder / f"cut{cut}.mp4")
        files[-1].write_bytes(good[:cut])
    rng = np.random.default_rng(0)
    for i in range(40):
        files.append(folder / f"noise{i}.{('mp4', 'webm', 'gif', 'avi', 'png', 'jpg', 'mkv', 'mov')[i % 8]}")
        files[-1].write_bytes(rng.bytes(int(rng.integers(0, 3000))))
    (folder / "text.mp4").write_text("not a video\n")
    (folder / "bomb.png").write_bytes(png_header(100_000, 100_000) + b"\0" * 64)
    (folder / "header.png").write_bytes(png_header(8, 8))
    (folder / "half.gif").write_bytes(b"GIF89a\x10\x00\x10\x00\x00\x00\x00")
    files += [folder / name for name in ("text.mp4", "bomb.png", "header.png", "half.gif", "absent.mp4")]
    return files


def test_hostile_files_give_one_line_that_names_them(tmp_path: Path) -> None:
    files = hostile_files(tmp_path)
    assert len(files) > 90
    for path in files:
        with pytest.raises(ValueError, match=path.name) as caught:
            read_video(path)
        assert "\n" not in str(caught.value)
    assert read_video(tmp_path / "good.mp4")[0].shape == (6, 32, 32, 3)


def test_flipped_bits_never_crash_the_decoder(tmp_path: Path) -> None:
    video, _, _ = render_clip(0, 4, size=(6, 32, 32))
    write_video(tmp_path / "a.mp4", video)
    good = bytearray((tmp_path / "a.mp4").read_bytes())
    rng = np.random.default_rng(1)
    messages = []
    for _ in range(60):
        bad = bytearray(good)
        bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
        (tmp_path / "b.mp4").write_bytes(bad)
        try:
            frames, _ = read_video(tmp_path / "b.mp4")
        except ValueError as error:
            messages.append(str(error))
        else:
            assert frames.dim() == 4
    assert all("b.mp4" in message and "\n" not in message for message in messages)
    assert messages


def test_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "a.mp4", numbered(9), fps=8)
    monkeypatch.setattr(video_files, "MAX_BYTES", 5 * 16 * 16 * 3)
    with pytest.raises(ValueError, match=r"a\.mp4.*ask for fewer"):
        read_video(tmp_path / "a.mp4")
    assert len(read_video(tmp_path / "a.mp4", frames=5)[0]) == 5
    monkeypatch.setattr(video_files, "MAX_PIXELS", 100)
    with pytest.raises(ValueError, match="16x16"):
        read_video(tmp_path / "a.mp4", frames=5)


def test_writers_refuse_what_is_not_video(tmp_path: Path) -> None:
    for bad in (
        torch.zeros(4, 8, 8, 3),
        torch.zeros(4, 8, 8, 1, dtype=torch.uint8),
        torch.zeros(0, 8, 8, 3, dtype=torch.uint8),
    ):
        for write in (write_video, write_gif):
            with pytest.raises(ValueError, match="uint8"):
                write(tmp_path / "a.mp4", bad)
    assert not list(tmp_path.iterdir())


def test_atomic_file_keeps_the_old_content_on_an_error(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    with atomic_file(target) as temporary:
        temporary.write_text("old")
        assert not target.exists()
        assert temporary.parent == target.parent
    assert target.read_text() == "old"

    def fail() -> None:
        with atomic_file(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert target.read_text() == "old"
    assert [p.name for p in target.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("name", ["pipe.png", "pipe.mp4"])
def test_a_pipe_is_no_picture_and_no_video(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    # opening it would wait for its other end
    with pytest.raises(ValueError, match=rf"no such (image|video): .*{name}"):
        probe_video(tmp_path / name)
