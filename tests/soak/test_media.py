"""Row about encoding of files that are truncated, forged or endless, or that crash the decoder, beside good ones."""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.data.encoding import encode_folder
from tests.data.spoilt import faulty_decoder
from vsa.data.codecs import HaarCodec
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video

Content = bytes | Callable[[Path], object]
GOOD = 10
# limit per file; a good one takes some hundredths of a second, on a busy machine a few seconds
SECONDS = 12
MAY_PASS = ("cut-7", "flip")
"""Names of files that may still decode: a video without its last bytes, or with other bits."""


def png(width: int, height: int, rows: bytes) -> bytes:
    """A PNG whose header may lie about its size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def clip(*size: int) -> Callable[[Path], object]:
    return lambda path: write_video(path, torch.zeros(*size, 3, dtype=torch.uint8))


def link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def hostile_files(good: bytes, draw: random.Random) -> Iterator[tuple[str, Content]]:
    """56 files by name: their bytes, or what makes them."""
    for name in ("hang", "abort", "exit", "segment", "grow"):
        yield f"{name}.mp4", good
    for i in range(8):
        yield f"cut-{i}.mp4", good[: len(good) * i // 8 + 9]
    for suffix in ("mp4", "webm", "mkv", "mov", "avi", "gif", "png", "jpg", "webp"):
        yield f"noise.{suffix}", draw.randbytes(5000)
        yield f"empty.{suffix}", b""
    yield "list.mp4", b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n"
    yield "concat.mp4", b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield "web.mkv", b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n"
    yield "session.mov", b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n"
    yield "xml.webp", b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY y SYSTEM "file:///etc/passwd">]><x>&y;</x>'
    yield from (("pipe.mp4", os.mkfifo), ("pipe.png", os.mkfifo), ("folder.mp4", Path.mkdir))
    yield from (("gone.mp4", link("/nowhere")), ("zero.mp4", link("/dev/zero")))
    yield from (("passwd.mp4", link("/etc/passwd")), ("self.mp4", link("self.mp4")))
    yield "bomb.png", png(60_000, 60_000, zlib.compress(bytes(10**7)))
    yield "wide.png", png(2**31 - 1, 1, zlib.compress(bytes(10**6)))
    yield "lying.png", png(8000, 8000, zlib.compress(bytes(100)))
    yield from (("thin.mp4", clip(8, 2, 2)), ("flat.mp4", clip(2, 2, 4096)), ("one.mp4", clip(1, 32, 32)))
    yield "pickle.mp4", b"cposix\nsystem\n(S'touch /tmp/executed'\ntR."
    for i in range(6):
        flipped = bytearray(good)
        for place in draw.sample(range(len(good)), 1 + i):
            flipped[place] ^= 1 << draw.randrange(8)
        yield f"flip-{i}.mp4", bytes(flipped)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], set[str], set[str]]:
    """Names of hostile files encoded beside good ones, of those left out, and ids of those that were encoded."""
    folder = tmp_path_factory.mktemp("media")
    videos, good = folder / "videos", [f"good-{i}.mp4" for i in range(GOOD)]
    videos.mkdir()
    for i, name in enumerate(good):
        write_video(videos / name, render_clip(0, i, size=(8, 32, 32))[0])
    files = dict(hostile_files((videos / good[0]).read_bytes(), random.Random(0)))
    for name, content in files.items():
        (videos / name).write_bytes(content) if isinstance(content, bytes) else content(videos / name)
    for name in (*good, *files):
        (videos / name).with_suffix(".txt").write_text("a clip")
    options = {"skip_bad": True, "decode_seconds": SECONDS, "decode_memory": 2}
    with faulty_decoder(folder / "faults"):
        report = encode_folder(
            *(videos, folder / "shards"), codec=HaarCodec(), text_encoder=HashedNgramEncoder(), **options
        )
    reader = LatentReader(folder / "shards")
    reader.verify()
    finite = {name for name in reader.index.samples if reader.latent(name).isfinite().all()}
    assert {Path(name).stem for name in good} <= finite
    return [*files], {name for name, _ in report.skipped}, {name for name in finite if not name.startswith("good-")}


@pytest.mark.soak("hostile files in encode cost themselves alone", attempts=56, short=0)
def test_a_hostile_file_costs_itself_alone(attempt: int, encoded) -> None:
    files, left_out, passed = encoded
    assert len(files) == 56
    name = files[attempt % len(files)]
    was_encoded = any(sample.startswith(Path(name).stem) for sample in passed)
    assert (name in left_out) != was_encoded
    assert not was_encoded or name.startswith(MAY_PASS)
