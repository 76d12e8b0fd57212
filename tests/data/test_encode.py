from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.encoding import encode_folder
from tests.data.spoilt import write_spoilt
from tests.forged_samples import abouts, edit_index
from vsa.data.buckets import Bucket
from vsa.data.codecs import HaarCodec, WanVAE
from vsa.data.encode import UnusableFiles, sample_ids
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import read_video, write_video

CODEC = HaarCodec()
ENCODER = HashedNgramEncoder(dim=8, max_tokens=5)
SCRIPTS = Path(__file__).parents[2] / "scripts"


def encode(videos: Path, out: Path, **options):
    return encode_folder(videos, out, codec=CODEC, text_encoder=ENCODER, **options)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Two clips with a caption file, one clip in a subfolder and one image with text files."""
    folder = tmp_path / "videos"
    for i, name in enumerate(("a.mp4", "b.mp4", "deep/a b.mp4")):
        write_video(folder / name, render_clip(0, i, size=(9, 32, 48))[0], fps=8)
    Image.fromarray(np.zeros((40, 56, 3), dtype=np.uint8) + 77).save(folder / "still.png")
    lines = [{"video": "a.mp4", "captions": ["one", "two"]}, {"video": "b.mp4", "caption": "three"}]
    (folder / "captions.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    (folder / "deep" / "a b.txt").write_text("four\n\nfive\n")
    (folder / "still.txt").write_text("a grey picture")
    return folder


def test_folder_of_videos_and_images(videos: Path, tmp_path: Path) -> None:
    report = encode(videos, tmp_path / "out")
    assert (report.samples, report.skipped) == (4, ())
    reader = LatentReader(tmp_path / "out")
    shapes = {sample.id: sample.latent_shape for sample in reader.index.samples.values()}
    spaced_name = next(name for name in shapes if name.startswith("deep_a_b-"))
    assert shapes == {"a": (16, 2, 4, 6), "b": (16, 2, 4, 6), spaced_name: (16, 2, 4, 6), "still": (16, 1, 4, 6)}
    captions = {s.id: [reader.text(s.id, k)[0] for k in range(s.captions)] for s in reader.index.samples.values()}
    assert captions == {"a": ["one", "two"], "b": ["three"], spaced_name: ["four", "five"], "still": ["a grey picture"]}
    # nine frames: the codec takes eight
    video, _ = read_video(videos / "a.mp4")
    assert torch.equal(reader.latent("a"), CODEC.encode(video[:8]).half().float())
    still = CODEC.decode(reader.latent("still"))
    # cropped to whole patches of 2x2 cells
    assert still.shape == (4, 32, 48, 3)
    assert (still.int() - 77).abs().max() <= 1


def test_sizes_and_frames(videos: Path, tmp_path: Path) -> None:
    encode(videos, tmp_path / "out", size=(16, 16), frames=4)
    shapes = {s.id.split("-")[0]: s.latent_shape for s in LatentReader(tmp_path / "out").index.samples.values()}
    assert shapes == {"a": (16, 1, 2, 2), "b": (16, 1, 2, 2), "deep_a_b": (16, 1, 2, 2), "still": (16, 1, 2, 2)}
    encode(videos, tmp_path / "slow", fps=4)
    assert LatentReader(tmp_path / "slow").index.samples["a"].latent_shape == (16, 1, 4, 6)


def test_buckets(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    sizes = {
        "wide": (12, 32, 64),
        "short": (6, 32, 64),
        "tall": (12, 64, 32),
        "tiny": (3, 32, 64),
        "square": (9, 40, 40),
    }
    for i, (name, size) in enumerate(sizes.items()):
        write_video(folder / f"{name}.mp4", render_clip(0, i, size=size)[0])
        (folder / f"{name}.txt").write_text(name)
    Image.fromarray(np.zeros((40, 56, 3), dtype=np.uint8)).save(folder / "still.png")
    (folder / "still.txt").write_text("still")
    buckets = [Bucket.parse(text) for text in ("32x64x8", "32x64x4", "64x32x12", "32x32x8", "16x16x1")]
    report = encode(folder, tmp_path / "out", buckets=buckets, skip_bad=True)
    assert [name for name, _ in report.skipped] == ["tiny.mp4"]
    assert report.skipped[0][1].endswith(
        "(3 frames of 32x64) is too small for the buckets 32x64x8, 32x64x4, 64x32x12, 32x32x8, 16x16x1"
    )
    reader = LatentReader(tmp_path / "out")
    assert {s.id: s.latent_shape[1:] for s in reader.index.samples.values()} == {
        "wide": (2, 4, 8),
        "short": (1, 4, 8),
        "tall": (3, 8, 4),
        "square": (2, 4, 4),
        "still": (1, 2, 2),
    }
    # nothing was scaled here: the clip's first frames
    video, _ = read_video(folder / "wide.mp4")
    assert torch.equal(reader.latent("wide"), CODEC.encode(video[:8]).half().float())
    with pytest.raises(ValueError, match=r"buckets exclude size and frames, got size=None and frames=4"):
        encode(folder, tmp_path / "other", buckets=buckets, frames=4)
    with pytest.raises(ValueError, match=r"cannot encode 9 frames; the nearest valid lengths are 8 and 12"):
        encode(folder, tmp_path / "other", buckets=[Bucket(32, 64, 9)])
    with pytest.raises(ValueError, match="size 30x64"):
        encode(folder, tmp_path / "other", buckets=[Bucket(30, 64, 8)])


def test_image_conditions_are_stored(tmp_path: Path, wan_vae: WanVAE) -> None:
    for i in range(2):
        write_video(tmp_path / "v" / f"{i}.mp4", render_clip(0, i, size=(9, 16, 32))[0])
        (tmp_path / "v" / f"{i}.txt").write_text(f"clip {i}")
    options = {"codec": wan_vae, "text_encoder": ENCODER}
    encode_folder(tmp_path / "v", tmp_path / "out", **options, image_condition=True, dtype="float32")
    reader = LatentReader(tmp_path / "out")
    assert reader.index.cond_channels == 20
    for name in ("0", "1"):
        video, _ = read_video(tmp_path / "v" / f"{name}.mp4")
        torch.testing.assert_close(reader.latent(name), wan_vae.encode(video))
        torch.testing.assert_close(reader.image_inputs(name), wan_vae.image_inputs(video))
    assert not torch.equal(*(reader.image_inputs(name)["cond_latents"] for name in ("0", "1")))
    assert reader.index.image_encoder is None
    encode_folder(tmp_path / "v", tmp_path / "plain", **options)
    plain = LatentReader(tmp_path / "plain")
    assert plain.index.cond_channels == 0
    assert plain.image_inputs("0") == {}
    with pytest.raises(ValueError, match="need Wan's VAE, got codec haar"):
        encode(tmp_path / "v", tmp_path / "other", image_condition=True)


@given(
    names=st.lists(
        st.text(alphabet="aAbB.-_/ é", min_size=1, max_size=90).map(lambda s: s + ".mp4"),
        min_size=1,
        max_size=12,
        unique=True,
    )
)
@settings(max_examples=60, deadline=None)
def test_sample_ids_are_unique_plain_and_stable(names: list[str]) -> None:
    ids = sample_ids(names)
    assert len(set(ids)) == len(names)
    assert all(len(i) <= 80 and i.replace("-", "").replace("_", "").isalnum() for i in ids if i.strip("-_"))
    assert all("." not in i and "/" not in i for i in ids)
    assert sample_ids(names) == ids


def test_sample_ids_of_equal_stems_and_cases() -> None:
    ids = sample_ids(["a.mp4", "a.png", "B.mp4", "b.mp4", "c.mp4"])
    assert ids[4] == "c"
    assert len({i.lower() for i in ids}) == 5


@pytest.mark.parametrize("suffix", ["jsonl", "json", "mapping.json", "txt"])
def test_caption_file_formats(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "videos"
    for name in ("a.mp4", "b.mp4"):
        write_video(folder / name, render_clip(0, 0, size=(4, 16, 16))[0])
    entries = [{"video": "a.mp4", "captions": ["one"]}, {"video": "b.mp4", "captions": ["two"]}]
    text = {
        "jsonl": "\n".join(json.dumps(entry) for entry in entries),
        "json": json.dumps(entries),
        "mapping.json": json.dumps({"a.mp4": "one", "b.mp4": ["two"]}),
        "txt": "a.mp4\tone\nb.mp4\ttwo\n",
    }[suffix]
    (tmp_path / f"words.{suffix}").write_text(text)
    encode(folder, tmp_path / "out", captions=tmp_path / f"words.{suffix}")
    reader = LatentReader(tmp_path / "out")
    assert [reader.text(name, 0)[0] for name in ("a", "b")] == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"video": "gone.mp4", "captions": ["x"]}', r"captions\.jsonl names a missing video: .*gone\.mp4"),
        ('{"video": "a.mp4", "captions": ["x"]', r"captions\.jsonl, line 1 does not parse"),
        ('{"video": "a.mp4"}', r"line 1: captions of a\.mp4 must be"),
        ('{"video": "a.mp4", "captions": [3]}', r"line 1: captions of a\.mp4 must be"),
        ('\n["a.mp4"]', r"line 2: expected"),
        ("", r"video .*a\.mp4 has no caption: expected one in .*captions\.jsonl and .*a\.txt"),
    ],
)
def test_bad_caption_files(tmp_path: Path, text: str, message: str) -> None:
    write_video(tmp_path / "v" / "a.mp4", render_clip(0, 0, size=(4, 16, 16))[0])
    (tmp_path / "v" / "captions.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        encode(tmp_path / "v", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_broken_videos_stop_or_are_reported(videos: Path, tmp_path: Path) -> None:
    (videos / "c.mp4").write_bytes(b"not a video")
    (videos / "c.txt").write_text("broken")
    write_video(videos / "d.mp4", render_clip(0, 0, size=(2, 16, 16))[0])
    (videos / "d.txt").write_text("short")
    with pytest.raises(ValueError, match=r"cannot decode video .*c\.mp4"):
        encode(videos, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = encode(videos, tmp_path / "out", skip_bad=True)
    assert report.samples == 4
    assert [name for name, _ in report.skipped] == ["c.mp4", "d.mp4"]
    assert "2 frames, expected at least 4" in report.skipped[1][1]
    assert len(LatentReader(tmp_path / "out").index.samples) == 4


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    return write_spoilt(tmp_path / "spoilt")


def test_every_problem_is_told_at_once_and_left_out_by_name(spoilt: Path, tmp_path: Path) -> None:
    expected = {
        "captions.jsonl, line 1": "names a missing video",
        "captions.jsonl, line 2": "does not parse",
        "empty.mp4": "has no caption",
        "latin.mp4": "latin.txt is not text in UTF-8",
        "one.mp4": "has 1 frame, expected at least 4",
        "silent.mp4": "has no caption",
        "two.mp4": "has 2 frames, expected at least 4",
        "zero.mp4": "cannot decode video",
    }
    with pytest.raises(
        UnusableFiles, match=r"^8 problems .*spoilt, first: .*gone\.mp4; --skip-bad leaves them out"
    ) as caught:
        encode(spoilt, tmp_path / "out")
    problems = dict(caught.value.problems)
    assert list(problems) == list(expected)
    assert all(reason in problems[name] for name, reason in expected.items())
    assert not (tmp_path / "out").exists()
    report = encode(spoilt, tmp_path / "out", skip_bad=True)
    skips = {"folder.mp4": "it is a folder", "link.mp4": "it is a link to a missing file or to itself"}
    assert dict(report.skipped) == {**problems, **skips}
    assert list(LatentReader(tmp_path / "out").index.samples) == ["a", "b"]


def test_a_single_problem_names_the_way_out(tmp_path: Path) -> None:
    for i, name in enumerate("abc"):
        write_video(tmp_path / "v" / f"{name}.mp4", render_clip(0, i, size=(8, 32, 32))[0])
        (tmp_path / "v" / f"{name}.txt").write_text(name)
    (tmp_path / "v" / "b.txt").write_text("")
    with pytest.raises(UnusableFiles, match=r"^video .*b\.mp4 has no caption.*; --skip-bad leaves it out$"):
        encode(tmp_path / "v", tmp_path / "out")
    (tmp_path / "v" / "b.txt").write_text("b")
    # the header is whole, the pictures are not
    content = bytearray((tmp_path / "v" / "b.mp4").read_bytes())
    start = content.index(b"mdat") + 4
    content[start : start + 200] = bytes(200)
    (tmp_path / "v" / "b.mp4").write_bytes(content)
    with pytest.raises(UnusableFiles, match=r"^cannot decode video .*b\.mp4.*; --skip-bad leaves it out$"):
        encode(tmp_path / "v", tmp_path / "out", samples_per_shard=1)
    # what was finished before is kept, unless its file has been replaced
    content = (tmp_path / "v" / "a.mp4").read_bytes()
    (tmp_path / "v" / "a.mp4").write_bytes(b"gone bad")
    with pytest.raises(ValueError, match=r"out was started with a\.mp4 of digest \w{12}, got \w{12}: .* --overwrite$"):
        encode(tmp_path / "v", tmp_path / "out", samples_per_shard=1, skip_bad=True)
    (tmp_path / "v" / "a.mp4").write_bytes(content)
    report = encode(tmp_path / "v", tmp_path / "out", samples_per_shard=1, skip_bad=True)
    assert [name for name, _ in report.skipped] == ["b.mp4"]
    assert list(LatentReader(tmp_path / "out").index.samples) == ["a", "c"]


def replace_one(path: Path, number: int) -> None:
    write_video(path, render_clip(1, number, size=(9, 32, 48))[0], fps=8)


def test_a_replaced_file_is_not_mixed_in(videos: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"samples_per_shard": 1}
    encode(videos, out, **options, rank=0, world_size=2)
    # what no part holds yet may change, and a copy with another date is the same
    replace_one(videos / "b.mp4", 7)
    os.utime(videos / "a.mp4", (1, 1))
    encode(videos, out, **options, rank=1, world_size=2)
    first = (videos / "a.mp4").read_bytes()
    replace_one(videos / "a.mp4", 8)
    for call in ({}, {"rank": 1, "world_size": 2}):
        with pytest.raises(
            ValueError, match=r"out was started with a\.mp4 of digest \w{12}, got \w{12}: .* --overwrite$"
        ):
            encode(videos, out, **options, **call)
    # a set that was started before versions were kept goes on
    other = tmp_path / "other"
    shutil.copytree(out, other)
    for index in other.glob("parts/*/index.json"):
        edit_index(index.parent, lambda content: [about.pop("version", None) for about in abouts(content)])
    assert encode(videos, other, **options).samples == 4
    assert all(sample.about.version is None for sample in LatentReader(other).index.samples.values())
    encode(videos, out, **options, overwrite=True)
    video, _ = read_video(videos / "a.mp4")
    assert torch.equal(LatentReader(out).latent("a"), CODEC.encode(video[:8]).half().float())
    with pytest.raises(ValueError, match="nothing to add"):
        encode(videos, out, add=True)
    (videos / "a.mp4").write_bytes(first)
    with pytest.raises(
        ValueError, match=r"videos/a\.mp4 is not the file of that name in the data set: give it another"
    ):
        encode(videos, out, add=True)


def test_shards_may_not_lie_where_links_lead(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (videos / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"must not contain each other"):
        encode(videos, tmp_path / "elsewhere" / "shards")


def test_a_trigger_that_nobody_sees_is_refused(videos: Path, tmp_path: Path) -> None:
    for trigger in ("\n", " ", "\u200b"):
        with pytest.raises(ValueError, match=r"^--trigger .* has no visible character$"):
            encode(videos, tmp_path / "out", trigger=trigger)


def test_leaving_all_out_is_no_way_out(videos: Path, tmp_path: Path) -> None:
    for path in (videos / "captions.jsonl", videos / "still.txt", videos / "deep" / "a b.txt"):
        path.unlink()
    with pytest.raises(
        UnusableFiles, match=r"^none of the 4 videos in .* can be encoded, --skip-bad would leave out all; "
    ):
        encode(videos, tmp_path / "out")
    with pytest.raises(UnusableFiles, match=r"^none of the 4 videos in .* can be encoded; first: "):
        encode(videos, tmp_path / "out", skip_bad=True)


def test_shards_and_videos_lie_apart(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(videos)
    before = sorted(videos.rglob("*"))
    for out in (videos, videos / "shards", tmp_path, tmp_path / "link", tmp_path / "link" / "deep" / "shards"):
        with pytest.raises(ValueError, match=r"folder of shards .* must not contain each other") as caught:
            encode(videos, out, overwrite=True)
        assert str(out) in str(caught.value)
    assert sorted(videos.rglob("*")) == before
    # a name that only begins alike is another folder
    encode(videos, tmp_path / "videos-shards")


def test_memory_that_runs_out_stops_in_one_line(videos: Path, tmp_path: Path) -> None:
    class Greedy(HaarCodec):
        def encode(self, video: torch.Tensor) -> torch.Tensor:
            return torch.empty(1 << 60)

    class Broken(HaarCodec):
        def encode(self, video: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("a defect of ours")

    options = {"text_encoder": ENCODER, "skip_bad": True}
    with pytest.raises(
        ValueError, match=r"^not enough memory to encode .*a\.mp4: choose a smaller size or fewer frames$"
    ):
        encode_folder(videos, tmp_path / "out", codec=Greedy(), **options)
    with pytest.raises(RuntimeError, match="a defect of ours"):
        encode_folder(videos, tmp_path / "out", codec=Broken(), **options)


def test_what_the_set_loses_is_told(tmp_path: Path) -> None:
    for name, size in {"even": (8, 32, 48), "odd": (8, 40, 48), "odder": (8, 40, 56), "tiny": (8, 16, 16)}.items():
        write_video(tmp_path / "v" / f"{name}.mp4", render_clip(0, 0, size=size)[0])
        (tmp_path / "v" / f"{name}.txt").write_text(name)
    messages: list[str] = []
    encode(tmp_path / "v", tmp_path / "as-is", tell=messages.append, samples_per_shard=1)
    shapes = {s.id: s.latent_shape[2:] for s in LatentReader(tmp_path / "as-is").index.samples.values()}
    assert shapes == {"even": (4, 6), "odd": (4, 6), "odder": (4, 6), "tiny": (2, 2)}
    assert messages[0].startswith("the codec haar-4x8x8-c16 rebuilds the clips at ")
    assert messages[-1] == (
        "latents cropped to divide into the 2x2 patches of models: 1 from 5x6 to 4x6, 1 from 5x7 to 4x6; "
        "--size and --buckets choose other sizes"
    )
    messages.clear()
    encode(tmp_path / "v", tmp_path / "sized", tell=messages.append, size=(40, 48))
    assert messages[0] == (
        "clips of 40x48 give latents of 5x6, which do not divide into the 2x2 patches of models: choose multiples of "
        "16x16 with --size or --buckets"
    )
    assert messages[-1] == "enlarged, because the file has fewer pixels: 2, up to 3 times"
    messages.clear()
    encode(tmp_path / "v", tmp_path / "fine", tell=messages.append, size=(16, 16))
    assert not [line for line in messages if "dB" not in line]


def test_measuring_changes_nothing_that_is_stored(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(videos, tmp_path / "measured", tell=lambda line: None)
    monkeypatch.setattr("vsa.data.encode.describe_reconstruction", lambda *_: [])
    encode(videos, tmp_path / "plain", tell=lambda line: pytest.fail(line) if "dB" in line else None)
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "measured" / path.name).read_bytes()


def test_bad_requests(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Path, dict, str]] = [
        (tmp_path / "absent", {}, "no such folder of videos"),
        (tmp_path / "empty", {}, "no videos in"),
        (videos, {"size": (20, 16)}, "size 20x16"),
        (videos, {"frames": 6}, "cannot encode 6 frames; the nearest valid lengths are 4 and 8"),
        (videos, {"frames": 12}, "has 9 frames, expected at least 12"),
        (videos, {"fps": 0.0}, "fps must be above 0"),
        (videos, {"dtype": "int8"}, "int8"),
        (videos, {"captions": videos / "none.jsonl"}, r"cannot read caption file .*none\.jsonl"),
    ]
    for folder, options, message in cases:
        with pytest.raises(ValueError, match=message):
            encode(folder, tmp_path / "out", **options)


def test_all_bad_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "a.mp4").write_bytes(b"x")
    (tmp_path / "v" / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="none of the 1 videos"):
        encode(tmp_path / "v", tmp_path / "out", skip_bad=True)


def test_unwritable_folder_is_refused_before_decoding(tmp_path, monkeypatch):
    videos = tmp_path / "videos"
    videos.mkdir()
    (videos / "a.mp4").write_bytes(b"never read")

    def touched(*_, **__):
        raise AssertionError("a file was looked at")

    monkeypatch.setattr("vsa.data.encode.media_files", touched)
    out = Path("/proc/shards")
    with pytest.raises(ValueError, match="cannot write to /proc/shards: /proc is not a writable folder"):
        encode_folder(videos, out, codec=HaarCodec(), text_encoder=HashedNgramEncoder())
