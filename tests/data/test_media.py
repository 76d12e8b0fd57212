"""The table of docs/data.md about what is understood: a test a row, on files made here."""

from __future__ import annotations

import codecs
import contextlib
import gc
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from tests.data.encoding import encode_folder
from tests.data.media import HEIGHT, WIDTH, corners, write
from tests.data.test_timed_frames import write_film
from vsa.data.buckets import Bucket
from vsa.data.captions import read_captions
from vsa.data.clip_rules import ClipRules
from vsa.data.codecs import HaarCodec
from vsa.data.media_folder import media_files
from vsa.data.prompts import read_prompts
from vsa.data.sample_store import ShardStore
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    VideoReader,
    probe_video,
    read_video,
    write_gif,
    write_video,
)
from vsa.sampling.clip_folder import all_prompts

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
ROWS: dict[str, Callable[[Path], None]] = {}
# what a person does with a picture of each EXIF orientation to see it upright
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda p: p,
    2: np.fliplr,
    3: lambda p: np.rot90(p, 2),
    4: np.flipud,
    5: lambda p: np.rot90(np.fliplr(p), 1),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: np.rot90(np.fliplr(p), -1),
    8: lambda p: np.rot90(p, 1),
}
ONE = 1 << 16
ENCODER = HashedNgramEncoder(dim=8, max_tokens=5)


def row(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def taken(check: Callable[[Path], None]) -> Callable[[Path], None]:
        ROWS[name] = check
        return check

    return taken


def seen(path: Path, **options: Any) -> np.ndarray:
    """`[T, H, W, 3]`; the header says the same size."""
    video = read_video(path, **options)[0].numpy()
    assert probe_video(path)[1:] == video.shape[1:3]
    return video


def numbered(count: int) -> list[np.ndarray]:
    return [np.full((16, 16, 3), 20 * i, dtype=np.uint8) for i in range(count)]


def numbers(video: np.ndarray) -> list[int]:
    return np.rint(video.mean((1, 2, 3)) / 20).astype(int).tolist()


def far(a: np.ndarray, b: np.ndarray) -> float:
    """Mean difference, for pictures of different sizes infinite."""
    return float(np.abs(a.astype(int) - b).mean()) if a.shape == b.shape else float("inf")


@row("orientation of pictures")
def check_exif(folder: Path) -> None:
    for suffix in ("jpg", "png", "webp", "avif", "tif"):
        for code, upright in UPRIGHT.items():
            exif = Image.Exif()
            exif[0x0112] = code
            path = folder / f"{code}.{suffix.upper() if code == 6 else suffix}"
            Image.fromarray(corners()).save(path, exif=exif, quality=95)
            video = seen(path)
            others = [far(video[0], other(corners())) for k, other in UPRIGHT.items() if k != code]
            assert far(video[0], upright(corners())) < 6 < min(others)
    # viewers ignore EXIF that is damaged
    for suffix in ("jpg", "png", "webp"):
        Image.fromarray(corners()).save(folder / f"damaged.{suffix}", exif=b"Exif\0\0garbage of a camera", quality=95)
        assert far(seen(folder / f"damaged.{suffix}")[0], corners()) < 6


@row("orientation of videos")
def check_display_matrix(folder: Path) -> None:
    # rows and columns of the stored picture, as the matrix of a file places them
    turns = {
        1: (ONE, 0, 0, ONE),
        2: (-ONE, 0, 0, ONE),
        3: (-ONE, 0, 0, -ONE),
        4: (ONE, 0, 0, -ONE),
        5: (0, ONE, ONE, 0),
        6: (0, ONE, -ONE, 0),
        7: (0, -ONE, -ONE, 0),
        8: (0, -ONE, ONE, 0),
    }
    for code, (a, b, c, d) in turns.items():
        path = write(folder / f"{code}.mp4", [corners()] * 4, matrix=(a, b, 0, c, d, 0, 0, 0, 1 << 30))
        video = seen(path)
        others = [far(video[0], other(corners())) for k, other in UPRIGHT.items() if k != code]
        assert far(video[0], UPRIGHT[code](corners())) < 6 < min(others)
    # the bucket is that of what is seen
    buckets = (Bucket(32, 48, 4), Bucket(48, 32, 4))
    for code, size in ((1, (4, 32, 48)), (6, (4, 48, 32))):
        clip, info = ClipRules(buckets=buckets).cut(folder / f"{code}.mp4", HaarCodec())
        assert tuple(clip.shape[:3]) == size
        assert info["source_size"] == list(size[1:])


@row("pixel aspect")
def check_aspect(folder: Path) -> None:
    for aspect, width in ((Fraction(3, 2), 72), (Fraction(1, 2), 24), (Fraction(1), 48), (Fraction(200, 201), 48)):
        path = write(folder / "a.mp4", [corners()] * 4, sample_aspect_ratio=aspect)
        assert far(seen(path)[0], corners(HEIGHT, width)) < 8
    # stored pixels are stretched before the picture is turned
    turned = (0, ONE, 0, -ONE, 0, 0, 0, 0, 1 << 30)
    path = write(folder / "b.mp4", [corners()] * 4, sample_aspect_ratio=Fraction(3, 2), matrix=turned)
    assert far(seen(path)[0], np.rot90(corners(HEIGHT, 72), -1)) < 8


@row("time stamps")
def check_times(folder: Path) -> None:
    paused = [0, 100, 200, 300, 1300, 1400, 1500, 1600]
    expected = [0, 1, 2, *[3] * 10, 4, 5, 6, 7]
    for path in (
        write(folder / "a.mp4", numbered(8), times=paused, rate=10),
        # the first frame is shown at once, whatever its time stamp
        write(folder / "b.mkv", numbered(8), codec="ffv1", pixels="bgr0", times=[t + 5000 for t in paused], rate=10),
    ):
        assert numbers(seen(path, fps=10))[:17] == expected
        assert numbers(seen(path, fps=5))[:9] == expected[::2]
    video, rate = read_video(folder / "a.mp4")
    assert numbers(video.numpy()) == list(range(8))
    assert rate == pytest.approx(8 / 1.7, rel=0.01)
    frames = [Image.fromarray(frame) for frame in numbered(4)]
    frames[0].save(folder / "a.gif", save_all=True, append_images=frames[1:], duration=[100, 500, 100, 300])
    assert numbers(seen(folder / "a.gif", fps=10)) == [0, 1, 1, 1, 1, 1, 2, 3, 3, 3]
    # matroska rounds to a millisecond, which must not shift a frame of a constant rate
    for stored in (24, 30, 60):
        path = write(folder / f"{stored}.mkv", numbered(12), codec="ffv1", pixels="bgr0", rate=stored)
        assert numbers(seen(path, fps=stored)) == list(range(12))
        assert numbers(seen(path, fps=stored / 2)) == list(range(0, 12, 2))


@row("animated pictures")
def check_animations(folder: Path) -> None:
    frames = [Image.fromarray(frame) for frame in numbered(6)]
    for name in ("a.webp", "a.png", "b.apng", "a.avif"):
        options: dict[str, Any] = {"lossless": True} if name == "a.webp" else {}
        options |= {"format": "PNG"} if name == "b.apng" else {}
        durations = [100, 100, 400, 100, 100, 100]
        frames[0].save(folder / name, save_all=True, append_images=frames[1:], duration=durations, **options)
        assert numbers(seen(folder / name)) == list(range(6))
        assert read_video(folder / name)[1] == pytest.approx(6 / 0.9)
        assert numbers(seen(folder / name, fps=10)) == [0, 1, 2, 2, 2, 2, 3, 4, 5]
        assert probe_video(folder / name) == (6, 16, 16)
        clip, _ = ClipRules(frames=4).cut(folder / name, HaarCodec())
        assert clip.shape == (4, 16, 16, 3)
    # the picture for readers of still images is no frame
    frames[5].save(folder / "c.png", save_all=True, append_images=frames[:4], default_image=True, duration=100)
    assert numbers(seen(folder / "c.png")) == [0, 1, 2, 3]
    # pages and previews are none either
    for name in ("d.tif", "d.mpo"):
        frames[2].save(folder / name, save_all=True, append_images=frames[:2])
    (folder / "d.jpg").write_bytes((folder / "d.mpo").read_bytes())
    assert numbers(seen(folder / "d.tif")) == numbers(seen(folder / "d.jpg")) == [2]


@row("interlaced video")
def check_interlaced(folder: Path) -> None:
    # a bar that moves by 8 pixels a field: two fields in a frame give a comb
    def field(i: int) -> np.ndarray:
        picture = np.zeros((HEIGHT, 96, 3), dtype=np.uint8)
        picture[:, 8 * i : 8 * i + 16] = 255
        return picture

    woven = []
    for i in range(4):
        frame = field(2 * i).copy()
        frame[1::2] = field(2 * i + 1)[1::2]
        woven.append(frame)

    def comb(video: np.ndarray) -> float:
        middle = video[1:3, 4:-4, :, 0].astype(int)
        return float(np.abs(2 * middle[:, 1:-1] - middle[:, :-2] - middle[:, 2:]).mean())

    encoder: dict[str, Any] = {"codec": "mpeg2video", "pixels": "yuv420p", "rate": 25, "bit_rate": 8_000_000}
    video = seen(write(folder / "a.mkv", woven, **encoder, options={"flags": "+ilme+ildct"}))
    assert len(video) == 4
    assert comb(video) < 0.25 * comb(np.stack(woven))
    # what is not interlaced is not filtered
    plain = write(folder / "b.mkv", woven, **encoder)
    assert comb(seen(plain)) > 0.7 * comb(np.stack(woven))


def hlg_code(nits: float) -> float:
    """Code of a grey that a display of 1,000 cd/m2 shows: BT.2100, table 5, inverse OOTF and OETF."""
    scene = (nits / 1000) ** (1 / 1.2)
    a = 0.17883277
    return (3 * scene) ** 0.5 if scene <= 1 / 12 else a * np.log(12 * scene - (1 - 4 * a)) + 0.5 - a * np.log(4 * a)


def pq_code(nits: float) -> float:
    """BT.2100, table 4."""
    y = (nits / 10_000) ** 0.1593017578125
    return ((0.8359375 + 18.8515625 * y) / (1 + 18.6875 * y)) ** 78.84375


def below_the_knee(nits: float) -> float:
    """8-bit BT.1886 code of light that is shown as it is on a display of 203 cd/m2."""
    return 255 * (nits / 203) ** (1 / 2.4)


@row("HDR")
def check_hdr(folder: Path) -> None:
    def grey(name: str, transfer: int, code: float, colour: tuple[float, float, float] = (1, 1, 1)) -> np.ndarray:
        frame = np.broadcast_to(np.rint(65535 * code * np.array(colour)).astype(np.uint16), (16, 16, 3))
        tags: dict[str, Any] = {"color_trc": transfer, "color_primaries": 9, "colorspace": 9, "color_range": 1}
        path = write(folder / name, [frame] * 2, codec="ffv1", pixels="yuv444p10le", source="rgb48le", **tags)
        return seen(path)[0].mean((0, 1))

    for transfer, code_of in ((16, pq_code), (18, hlg_code)):
        shown = [grey("a.mkv", transfer, code_of(nits)) for nits in (5.0, 20.0, 60.0, 203.0, 500.0, 1000.0)]
        for value, nits in zip(shown, (5.0, 20.0, 60.0), strict=False):
            assert value == pytest.approx(below_the_knee(nits), abs=2)
            # the control: decoded as SDR
            assert abs(255 * code_of(nits) - below_the_knee(nits)) > 5
        # above it highlights are compressed, in order, and the peak is white
        values = [float(value.mean()) for value in shown]
        assert values == sorted(values)
        assert 220 < values[3] < 240 < values[4] < values[5]
        assert values[5] == pytest.approx(255, abs=1)
        # red of BT.709 in BT.2020 is red alone
        red = np.array([0.6274, 0.0691, 0.0164]) * 100
        codes = [pq_code(float(nits)) for nits in red]
        if transfer == 16:
            value = grey("b.mkv", 16, 1.0, (codes[0], codes[1], codes[2]))
            assert value[0] == pytest.approx(below_the_knee(100), abs=14)
            assert value[1:].max() < 40


@row("Dolby Vision")
def check_dolby_vision(folder: Path) -> None:
    plain = write(folder / "a.mp4", [corners()] * 4)
    content = plain.read_bytes()
    assert content.count(b"avc1") == 2
    # the name of its sample entry alone
    (folder / "dolby.mp4").write_bytes(content.replace(b"avc1", b"dvhe"))
    assert len(seen(plain)) == 4
    for read in (read_video, probe_video):
        with pytest.raises(ValueError, match=r"dolby\.mp4: Dolby Vision without a base layer \(profile 5\)"):
            read(folder / "dolby.mp4")


@row("range and matrix")
def check_matrices(folder: Path) -> None:
    # luma weights of BT.601, BT.709 and BT.2020
    weights = {5: (0.299, 0.114), 1: (0.2126, 0.0722), 9: (0.2627, 0.0593)}
    colour = np.array([200.0, 40.0, 90.0])
    for space, (red, blue) in weights.items():
        for full in (False, True):
            luma = red * colour[0] + (1 - red - blue) * colour[1] + blue * colour[2]
            chroma = (colour[2] - luma) / (2 - 2 * blue), (colour[0] - luma) / (2 - 2 * red)
            y, cb, cr = (luma, *chroma) if full else (16 + luma * 219 / 255, *(c * 224 / 255 for c in chroma))
            planes = np.rint([y, 128 + cb, 128 + cr]).astype(np.uint8)
            frame = np.broadcast_to(planes[:, None, None], (3, 16, 16))
            tags: dict[str, Any] = {"colorspace": space, "color_range": 2 if full else 1}
            path = write(folder / "a.mkv", [frame] * 2, codec="ffv1", source="yuv444p", **tags)
            assert seen(path)[0].mean((0, 1)) == pytest.approx(colour, abs=3)


@row("colour profiles")
def check_profiles(folder: Path) -> None:
    def to_xyz(corners: list[tuple[float, float]]) -> np.ndarray:
        xyz = np.array([(x / y, 1, (1 - x - y) / y) for x, y in corners]).T
        white = np.array((0.3127 / 0.3290, 1, (1 - 0.3127 - 0.3290) / 0.3290))
        return xyz * np.linalg.solve(xyz, white)

    blue = (0.15, 0.06)
    to_bt709 = np.linalg.inv(to_xyz([(0.64, 0.33), (0.30, 0.60), blue])) @ to_xyz([(0.68, 0.32), (0.265, 0.69), blue])
    for colour in ((128, 128, 128), (190, 110, 110), (90, 140, 100)):
        frame = np.broadcast_to(np.array(colour, np.uint8), (16, 16, 3))
        path = write(folder / "a.mkv", [frame] * 2, codec="ffv1", color_primaries=12, color_trc=1)
        expected = 255 * (to_bt709 @ (np.array(colour) / 255) ** 2.4) ** (1 / 2.4)
        assert seen(path)[0].mean((0, 1)) == pytest.approx(expected, abs=2)
        assert (abs(expected - colour).max() > 6) == (colour != (128, 128, 128))
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for name, profile in (("srgb.png", lab), ("damaged.png", b"no profile"), ("none.png", b"")):
        Image.fromarray(pixels).save(folder / name, icc_profile=profile)
        assert np.array_equal(seen(folder / name)[0], pixels)
    # a profile whose red and blue are swapped
    swapped = bytearray(lab)
    red, blue = (swapped.index(tag, 128) for tag in (b"rXYZ", b"bXYZ"))
    swapped[red : red + 4], swapped[blue : blue + 4] = b"bXYZ", b"rXYZ"
    name = swapped.index("sRGB".encode("utf-16-be"))
    swapped[name : name + 8] = "xRGB".encode("utf-16-be")
    Image.fromarray(pixels).save(folder / "swapped.png", icc_profile=bytes(swapped))
    assert far(seen(folder / "swapped.png")[0], pixels[..., ::-1]) < 3 < far(pixels, pixels[..., ::-1])


@row("transparency")
def check_alpha(folder: Path) -> None:
    rgba = np.full((HEIGHT, WIDTH, 4), 200, dtype=np.uint8)
    rgba[:, : WIDTH // 3, 3], rgba[:, WIDTH // 3 : 2 * WIDTH // 3, 3], rgba[:, 2 * WIDTH // 3 :, 3] = 0, 128, 255
    Image.fromarray(rgba).save(folder / "a.png")
    Image.fromarray(rgba).save(folder / "a.webp", lossless=True)
    Image.fromarray(rgba[..., [0, 3]]).save(folder / "b.png")
    paths = [folder / "a.png", folder / "a.webp", folder / "b.png"]
    paths += [
        write(folder / "a.mov", [rgba] * 2, codec="prores_ks", pixels="yuva444p10le", source="rgba"),
        write(folder / "b.mov", [rgba] * 2, codec="qtrle", pixels="argb", source="rgba"),
        write(folder / "a.mkv", [rgba] * 2, codec="ffv1", pixels="yuva444p", source="rgba"),
        write(folder / "a.webm", [rgba] * 2, codec="libvpx-vp9", pixels="yuva420p", source="rgba"),
    ]
    for path in paths:
        video = seen(path)[:, :, [4, WIDTH // 2, -5]].mean((0, 1, 3))
        assert video == pytest.approx(np.array([0, 100, 200]), abs=3), path
    # a GIF whose transparent pixels have a colour
    palette = Image.new("P", (16, 16), 1)
    palette.putpalette([0, 0, 0, 250, 250, 250])
    palette.save(folder / "a.gif", save_all=True, append_images=[palette] * 3, transparency=1, duration=100)
    assert seen(folder / "a.gif").max() == 0


@row("depth and modes")
def check_depth(folder: Path) -> None:
    ramp = np.linspace(0, 65535, 24 * 16).reshape(16, 24)
    expected = np.rint(ramp / 257)
    Image.fromarray(ramp.astype(np.uint16)).save(folder / "a.png")
    Image.fromarray(ramp.astype(np.uint16)).save(folder / "a.tif")
    Image.fromarray((ramp / 65535).astype(np.float32)).save(folder / "b.tif")
    Image.fromarray(ramp.astype(np.int32)).save(folder / "c.tif")
    for name in ("a.png", "a.tif", "b.tif", "c.tif"):
        assert np.abs(seen(folder / name)[0] - expected[..., None]).max() <= 1
    for name, values in (("d.tif", ramp.astype(np.float32)), ("e.tif", ramp.astype(np.float32) * np.nan)):
        Image.fromarray(values).save(folder / name)
        with pytest.raises(ValueError, match=rf"{name}: F values outside 0 to 1$"):
            read_video(folder / name)
    picture = Image.fromarray(corners())
    for mode, suffix in (("1", "png"), ("L", "bmp"), ("P", "png"), ("LA", "png"), ("CMYK", "jpg"), ("YCbCr", "tif")):
        picture.convert(mode).save(folder / f"{mode}.{suffix}")
        want = np.asarray(picture.convert(mode).convert("RGB"))
        assert far(seen(folder / f"{mode}.{suffix}")[0], want) < 6
    grey = [np.full((16, 16), 30_000, dtype=np.uint16)] * 2
    video = seen(write(folder / "a.mkv", grey, codec="ffv1", pixels="gray16le", source="gray16le"))
    assert video == pytest.approx(30_000 / 257, abs=1)


def encode(folder: Path, **options: Any) -> tuple[LatentReader, list[str]]:
    """The data set of a folder, and what was said."""
    said: list[str] = []
    out = folder.parent / f"{folder.name}-shards"
    encode_folder(
        folder,
        out,
        codec=HaarCodec(),
        text_encoder=ENCODER,
        tell=said.append,
        overwrite=True,
        **options,
    )
    return LatentReader(out), said


def captions_in(folder: Path) -> dict[str, list[str]]:
    files = sorted(folder.rglob("*.png"))
    captions = read_captions(folder, None, files)
    assert not captions.unusable
    return {path.relative_to(folder).as_posix(): captions.of[path] for path in files if path in captions.of}


def pictures(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        Image.fromarray(corners()).save(folder / name, format="PNG")
    return folder


@row("frame rate of a set")
def check_rates(folder: Path) -> None:
    for name, rate in (("a", 24), ("b", 24), ("c", 30)):
        write_video(folder / "v" / f"{name}.mp4", render_clip(0, 0, size=(9, 16, 16))[0], fps=rate)
        (folder / "v" / f"{name}.txt").write_text(name)
    reader, _ = encode(folder / "v")
    assert "frames per second of the clips: 24 (2), 30 (1): they move at different speeds" in reader.index.summary()
    assert ShardStore({"v": reader}).fps == 24
    assert ClipRules(fps=12).cut(folder / "v" / "a.mp4", HaarCodec())[1]["fps"] == 12


@row("extensions")
def check_extensions(folder: Path) -> None:
    videos = {"m4v": "libx264", "MTS": "libx264", "m2ts": "libx264", "ts": "libx264", "mpg": "mpeg2video", "flv": "flv"}
    videos |= {"3gp": "mpeg4", "ogv": "libtheora", "wmv": "wmv2", "MOV": "libx264"}
    (folder / "v").mkdir()
    for suffix, codec in videos.items():
        source = folder / f"made.{suffix.lower()}"
        try:
            write(source, [corners(64, 96)] * 30, codec=codec, pixels="yuv420p", rate=25)
        except (ValueError, av.FFmpegError):
            # the codec of Ogg is not in every build
            (folder / "skipped").touch()
            continue
        source.rename(folder / "v" / f"{suffix}.{suffix}")
        assert far(seen(folder / "v" / f"{suffix}.{suffix}", frames=1)[0], corners(64, 96)) < 12
    pictures(folder / "v", "a.JPG", "b.heic", "c.heic", "._a.jpg", "Thumbs.db", ".DS_Store", "notes.pdf")
    Image.fromarray(corners()).save(folder / "v" / "a.JPG")
    Image.fromarray(corners()).save(folder / "v" / "b.bmp")
    (folder / "v" / "orphan.txt").write_text("of nothing")
    for path in sorted((folder / "v").iterdir()):
        if path.suffix.lower() in VIDEO_SUFFIXES + IMAGE_SUFFIXES:
            path.with_suffix(".txt").write_text("a picture")
    reader, said = encode(folder / "v", size=(32, 48), frames=4)
    assert {Path(str(sample.about.source)).suffix for sample in reader.index.samples.values()} == {
        *(f".{suffix}" for suffix in videos if suffix != "ogv" or not (folder / "skipped").exists()),
        ".JPG",
        ".bmp",
    }
    listed = next(line for line in said if "not read" in line)
    assert listed == (
        "neither videos nor images, not read: 2 .heic (b.heic, c.heic), 1 .pdf (notes.pdf), 1 .txt (orphan.txt)"
    )
    only = pictures(folder / "w", "a.heic")
    with pytest.raises(ValueError, match=r"no videos in .*w, it has 1 \.heic \(a\.heic\) .*HEIC"):
        encode(only)


@row("folders")
def check_folders(folder: Path) -> None:
    """In more forms in test_media_folder."""
    row = PAGE.read_text(encoding="utf-8").partition("| **folders** |")[2].partition("\n")[0]
    for name in re.findall(r"`([^`]+)`", row):
        path = folder / "v" / name
        # a folder, with a picture in it
        path = path if path.suffix or name == "a.mp4~" else path / "b.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = media_files(pictures(folder / "v", "a.png"))
    assert found.files == [folder / "v" / "a.png"]
    assert len(found.left_out) == len(re.findall(r"`([^`]+)`", row))


@row("links")
def check_links(folder: Path) -> None:
    """In more forms in test_media_folder."""
    pictures(folder / "other", "a.png")
    videos = pictures(folder / "v", "b.png")
    (videos / "films").symlink_to(folder / "other")
    (videos / "b.txt").symlink_to(folder / "other" / "a.png")
    assert media_files(videos).files == [videos / "b.png", videos / "films" / "a.png"]
    assert "leads out of" in read_captions(videos, None, [videos / "b.png"]).missing[videos / "b.png"]


@row("no caption")
def check_no_caption(folder: Path) -> None:
    row = PAGE.read_text(encoding="utf-8").partition("| **no caption** |")[2].partition("\n")[0]
    words = re.findall(r"`([^`]+)`", row)
    assert len(words) == 7
    videos = pictures(folder / "v", "a.png")
    for word in (*words, ""):
        (videos / "captions.csv").write_text(f"video,caption\na.png,{word.upper()}\n")
        assert captions_in(videos) == {}
    (videos / "captions.csv").write_text("video,caption\na.png,nana\n")
    assert captions_in(videos) == {"a.png": ["nana"]}


@row("names")
def check_names(folder: Path) -> None:
    nfc, nfd = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
    (folder / "v").mkdir()
    pictures(folder / "v" / "deep", "a.png", f"{nfd}-1.png", f"{nfc}-2.png", f"{nfd}-3.png")
    entries = [f"deep\\{name}" for name in ("a.png", f"{nfc}-1.png", f"{nfd}-2.png")]
    lines = [json.dumps({"video": name, "caption": f"number {i}"}) for i, name in enumerate(entries)]
    (folder / "v" / "captions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "v" / "deep" / f"{nfc}-3.TXT").write_text("number 3")
    captions = captions_in(folder / "v")
    assert captions == {
        "deep/a.png": ["number 0"],
        f"deep/{nfd}-1.png": ["number 1"],
        f"deep/{nfc}-2.png": ["number 2"],
        f"deep/{nfd}-3.png": ["number 3"],
    }

    if sys.platform == "linux":
        # a name of an old system is told, and takes no other file with it
        os.rename(folder / "v" / "deep" / "a.png", os.fsencode(folder / "v" / "deep") + b"/\xff.png")
        (folder / "v" / "captions.jsonl").unlink()
        for path in (folder / "v" / "deep").glob("*.png"):
            path.with_suffix(".txt").write_text("a picture")
        with pytest.raises(ValueError, match=r"\.png is not UTF-8: rename it"):
            encode(folder / "v")


@row("encodings of text")
def check_encodings(folder: Path) -> None:
    caption = "ein gr\u00fcner W\u00fcrfel \U0001f3b2"
    files = {
        "captions.jsonl": json.dumps({"video": "a.png", "caption": caption}, ensure_ascii=False) + "\r\n",
        "captions.json": json.dumps({"a.png": caption}, ensure_ascii=False),
        "captions.csv": f'video;caption\r\na.png;"{caption}"\r\n',
        "captions.txt": f"a.png\t{caption}\r\n",
        "a.txt": f"{caption}\r\n",
    }
    for i, (name, text) in enumerate(files.items()):
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            videos = pictures(folder / f"{i}-{encoding}", "a.png")
            (videos / name).write_bytes(text.encode(encoding))
            assert captions_in(videos) == {"a.png": [caption]}, (name, encoding)
            (folder / "p.txt").write_bytes(f"{caption}\r\n\r\na cat\r\n".encode(encoding))
            (folder / "p.jsonl").write_bytes(json.dumps({"prompt": caption}).encode(encoding))
            assert read_prompts(folder / "p.txt") == [caption, "a cat"]
            assert read_prompts(folder / "p.jsonl") == [caption]
    # big endian, as few write it; and Latin-1 is refused by name
    (folder / "p.txt").write_bytes(codecs.BOM_UTF16_BE + caption.encode("utf-16-be"))
    assert read_prompts(folder / "p.txt") == [caption]
    (folder / "p.txt").write_bytes("gr\u00fcn".encode("latin-1"))
    with pytest.raises(ValueError, match=r"p\.txt is not text in UTF-8"):
        read_prompts(folder / "p.txt")


@row("captions")
def check_captions(folder: Path) -> None:
    videos = pictures(folder / "v", "a.png", "b.png", "c.png")
    (videos / "a.txt").write_text("a red circle that moves\nto the left, then\nup\n")
    (videos / "b.txt").write_bytes(b"a red circle\r\nthat moves\r\n \r\n\r\nshort\r\n")
    lines = [json.dumps({"video": "c.png", "caption": "one\u2028line\u0085of\nmany"}, ensure_ascii=False)]
    (videos / "captions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert captions_in(videos) == {
        "a.png": ["a red circle that moves to the left, then up"],
        "b.png": ["a red circle that moves", "short"],
        "c.png": ["one line of many"],
    }
    # those who write a caption a line are told
    _, said = encode(videos)
    assert [line for line in said if "joined" in line] == [
        "lines joined to one caption: 1 text files, first a.txt; a blank line begins another caption"
    ]
    # what Excel writes; a column of its own is a field
    (videos / "captions.jsonl").unlink()
    (videos / "captions.csv").write_text('Video,Caption,film\nc.png,"one, two\nthree",x\n')
    assert captions_in(videos)["c.png"] == ["one, two three"]
    assert read_captions(videos, None, [videos / "c.png"]).fields == {videos / "c.png": {"film": "x"}}
    (videos / "captions.csv").write_text("name,text\nc.png,one\n")
    ((_, problem),) = read_captions(videos, None, []).unusable
    assert "captions.csv, row 1: expected" in problem
    # nothing of a caption may be lost at a comma that stands in no quotes, and an old Mac ends lines by CR
    (videos / "captions.csv").write_bytes(b"video,caption\rc.png,one, two\rb.png,three\r")
    found = read_captions(videos, None, [videos / "b.png"])
    assert found.of == {videos / "b.png": ["three"]}
    assert [place for place, reason in found.unusable if "quotes around a caption" in reason] == ["captions.csv, row 1"]
    # one entry that is damaged leaves the others alone
    (videos / "captions.csv").unlink()
    damaged = [f'{{"video": "{"x" * 5000}", "caption": "x"}}', '{"video": "c.png", "caption": "x", "caption": "y"}']
    damaged += ["[" * 100_000, '{"video": "c.png", "caption": "one", "film": "\\ud83d"}']
    (videos / "captions.jsonl").write_text("\n".join(damaged))
    found = read_captions(videos, None, [videos / "c.png"])
    assert found.of == {videos / "c.png": ["one"]}
    assert [place for place, _ in found.unusable] == [f"captions.jsonl, line {i}" for i in (1, 2, 3)]
    assert found.fields == {}
    (folder / "p.JSONL").write_text('{"prompt": "a"}')
    assert read_prompts(folder / "p.JSONL") == ["a"]
    (folder / "p.JSONL").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"p\.JSONL, line 1"):
        read_prompts(folder / "p.JSONL")


@row("keys and columns")
def check_keys(folder: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("| **keys and columns** |")[2].partition("\n")[0]
    names, captions = (re.findall(r"`(\w+)`", part) for part in text.partition("captions under")[::2])
    assert len(names) == 8
    assert len(captions) == 6
    videos = pictures(folder / "v", "a.png")
    for name in names:
        for caption in captions:
            (videos / "captions.csv").write_text(f"{name},film,{caption}\na.png,x,one\n")
            assert captions_in(videos) == {"a.png": ["one"]}
            (videos / "captions.jsonl").write_text(
                json.dumps({name: "a.png", caption: ["one", "two"], "n": 3, "f": 0.5})
            )
            assert captions_in(videos) == {"a.png": ["one", "two"]}
            assert read_captions(videos, None, [videos / "a.png"]).fields == {videos / "a.png": {"n": "3"}}
            (videos / "captions.jsonl").unlink()


@row("paths in caption files")
def check_paths(folder: Path) -> None:
    (folder / "v" / "deep").mkdir(parents=True)
    videos = pictures(folder / "v", "a.png", "deep/b.png")
    lists = folder / "lists"
    lists.mkdir()
    (lists / "own.jsonl").write_text(
        "\n".join(
            json.dumps({"video": name, "caption": name})
            for name in ("D:\\films\\a.png", "/somewhere/v/deep/b.png", "/x/gone.png", "..\\v\\a.png", "v/a.png")
        )
    )
    found = read_captions(videos, lists / "own.jsonl", [videos / "a.png", videos / "deep" / "b.png"])
    assert found.of == {videos / "a.png": ["D:\\films\\a.png"], videos / "deep" / "b.png": ["/somewhere/v/deep/b.png"]}
    assert found.moved == {"D:\\films\\a.png": videos / "a.png", "/somewhere/v/deep/b.png": videos / "deep" / "b.png"}
    assert [place for place, _ in found.unusable] == [f"own.jsonl, line {i}" for i in (3, 4, 5)]
    assert "either of which may be" in found.unusable[1][1]


@row("characters")
def check_characters(folder: Path) -> None:
    said = "a\u00a0re\u200bd \u3000 cafe\u0301 \u201cblue\u201d \U0001f469\u200d\U0001f680\u202e \x1b[31m\ufeff\n"
    expected = "a red caf\u00e9 \u201cblue\u201d \U0001f469\u200d\U0001f680 [31m"
    videos = pictures(folder / "v", "a.png")
    (videos / "a.txt").write_text(said, encoding="utf-8")
    assert captions_in(videos) == {"a.png": [expected]}
    (folder / "p.jsonl").write_text(json.dumps({"prompt": said}))
    assert read_prompts(folder / "p.jsonl") == all_prompts([said], None) == [expected]


@row("long captions")
def check_long_captions(folder: Path) -> None:
    videos = pictures(folder / "v", "a.png", "b.png", "c.png")
    for name, words in (("a", ENCODER.max_tokens + 4), ("b", ENCODER.max_tokens), ("c", ENCODER.max_tokens + 1)):
        (videos / f"{name}.txt").write_text(" ".join(["word"] * words) + ("\n\n\U0001f3b2" if name == "b" else ""))
    _, said = encode(videos)
    assert [line for line in said if "captions" in line] == [
        f"text encoder {ENCODER.id}: 2 of 4 captions are cut after 5 tokens and lose 2.5 in the mean, 4 at most; "
        "1 of 4 captions have no word that it knows"
    ]
    for path in videos.glob("*.txt"):
        path.write_text("a few words")
    assert not [line for line in encode(videos)[1] if "captions" in line]


@row("late clips")
def check_late_clips(folder: Path) -> None:
    """In more forms, and from which keyframe, in test_timed_frames."""
    options = {"g": "48", "bf": "3"}
    whole = read_video(write_film(folder / "a.mp4", options))[0]
    assert torch.equal(read_video(folder / "a.mp4", start=250, frames=4)[0], whole[250:254])


@row("plain files")
def check_plain(folder: Path) -> None:
    """Without any of this, pixels are those that FFmpeg and Pillow give at once."""
    write_video(folder / "a.mp4", render_clip(0, 1, size=(9, 31, 48))[0], fps=12)
    write_gif(folder / "b.gif", render_clip(0, 2, size=(9, 32, 48))[0], fps=8)
    for path in (folder / "a.mp4", folder / "b.gif"):
        with av.open(str(path)) as container:
            plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            stored = float(container.streams.video[0].average_rate or 0)
        video, rate = read_video(path)
        assert np.array_equal(video.numpy(), np.stack(plain))
        assert rate == stored
        for fps in (5, 8, 24):
            picked = [int(k * stored / fps + 1e-3) for k in range(100) if k / fps < (9 - 1e-3) / stored]
            assert np.array_equal(read_video(path, fps=fps)[0].numpy(), np.stack([plain[i] for i in picked]))
    Image.fromarray(corners()).save(folder / "a.jpg")
    assert np.array_equal(seen(folder / "a.jpg")[0], np.asarray(Image.open(folder / "a.jpg")))
    assert read_video(folder / "a.jpg")[1] == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_frame_keeps_threads(tmp_path: Path) -> None:
    """Those of 1,000 thumbnails are over the memory limit of a decoder on a machine with 16 cores."""
    write_video(tmp_path / "a.mp4", render_clip(0, 1, size=(40, 32, 48))[0])

    def most(read: Callable[[VideoReader], Any]) -> int:
        with contextlib.closing(VideoReader(tmp_path / "a.mp4")) as reader:
            kept = read(reader)
            number = len(os.listdir("/proc/self/task"))
            del kept
        return number

    gc.disable()
    try:
        before = len(os.listdir("/proc/self/task"))
        assert most(lambda reader: reader.thumbnails(40)) <= before + 4
        assert most(lambda reader: reader.take(40)) <= before + 4
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ROWS)
def test_what_the_table_says_is_understood(name: str, tmp_path: Path) -> None:
    ROWS[name](tmp_path)


def test_every_row_of_the_table_has_its_test() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## What is understood\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \*\*([^*|]+)\*\* \|", section, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| ", section, re.MULTILINE)) - 1
    assert sorted(rows) == sorted(ROWS)
