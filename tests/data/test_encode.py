from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.tiny_wan import make_vae, save_pipeline
from vsa.data.buckets import Bucket
from vsa.data.codecs import HaarCodec, WanVAE
from vsa.data.encode import encode_folder, fit_clip, sample_ids
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import read_video, write_video

CODEC = HaarCodec()
ENCODER = HashedNgramEncoder(dim=8, max_tokens=5)
SCRIPTS = Path(__file__).parents[2] / "scripts"


def encode(videos: Path, out: Path, **options):
    return encode_folder(videos, out, codec=CODEC, text_encoder=ENCODER, progress=False, **options)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Two clips with a caption file, one clip in a subfolder and one image with text files."""
    folder = tmp_path / "videos"
    for i, name in enumerate(("a.mp4", "b.mp4", "deep/a b.mp4")):
        write_video(folder / name, render_clip(0, i, size=(9, 32, 48))[0], fps=8)
    Image.fromarray(np.zeros((40, 56, 3), dtype=np.uint8) + 77).save(folder / "still.png")
    lines = [{"video": "a.mp4", "captions": ["one", "two"]}, {"video": "b.mp4", "caption": "three"}]
    (folder / "captions.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    (folder / "deep" / "a b.txt").write_text("four\nfive\n")
    (folder / "still.txt").write_text("a grey picture")
    return folder


def test_folder_of_videos_and_images(videos: Path, tmp_path: Path) -> None:
    report = encode(videos, tmp_path / "out")
    assert (report.samples, report.skipped) == (4, ())
    reader = LatentReader(tmp_path / "out")
    shapes = {sample.id: sample.latent_shape for sample in reader.index.samples.values()}
    spaced = next(name for name in shapes if name.startswith("deep_a_b-"))
    assert shapes == {"a": (16, 2, 4, 6), "b": (16, 2, 4, 6), spaced: (16, 2, 4, 6), "still": (16, 1, 5, 7)}
    captions = {s.id: [reader.text(s.id, k)[0] for k in range(s.captions)] for s in reader.index.samples.values()}
    assert captions == {"a": ["one", "two"], "b": ["three"], spaced: ["four", "five"], "still": ["a grey picture"]}
    # nine frames: the codec takes eight
    video, _ = read_video(videos / "a.mp4")
    assert torch.equal(reader.latent("a"), CODEC.encode(video[:8]).half().float())
    still = CODEC.decode(reader.latent("still"))
    assert still.shape == (4, 40, 56, 3)
    assert (still.int() - 77).abs().max() <= 1


def test_sizes_and_frames(videos: Path, tmp_path: Path) -> None:
    encode(videos, tmp_path / "out", size=(16, 16), frames=4)
    shapes = {s.id.split("-")[0]: s.latent_shape for s in LatentReader(tmp_path / "out").index.samples.values()}
    assert shapes == {"a": (16, 1, 2, 2), "b": (16, 1, 2, 2), "deep_a_b": (16, 1, 2, 2), "still": (16, 1, 2, 2)}
    encode(videos, tmp_path / "slow", fps=4)
    assert LatentReader(tmp_path / "slow").index.samples["a"].latent_shape == (16, 1, 4, 6)


@given(
    T=st.integers(1, 13),
    H=st.integers(8, 60),
    W=st.integers(8, 60),
    h=st.integers(1, 5),
    w=st.integers(1, 5),
    sized=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_fit_clip_gives_what_the_codec_takes(T: int, H: int, W: int, h: int, w: int, sized: bool) -> None:
    video = torch.full((T, H, W, 3), 9, dtype=torch.uint8)
    size = (8 * h, 8 * w) if sized else None
    if 1 < T < 4:
        with pytest.raises(ValueError, match=rf"video x has {T} frames, 4 are needed"):
            fit_clip(video, codec=CODEC, size=size, frames=None, name="x")
        return
    clip = fit_clip(video, codec=CODEC, size=size, frames=None, name="x")
    assert clip.shape == (T // 4 * 4 or 1, *(size or (H // 8 * 8, W // 8 * 8)), 3)
    assert (clip == 9).all()
    CODEC.encode(clip)


@pytest.fixture(scope="module")
def wan_vae(tmp_path_factory: pytest.TempPathFactory) -> WanVAE:
    folder = tmp_path_factory.mktemp("wan") / "vae"
    make_vae().save_pretrained(folder)
    return WanVAE(str(folder))


@given(T=st.integers(1, 40), frames=st.none() | st.integers(0, 9).map(lambda n: 1 + 4 * n))
@settings(max_examples=60, deadline=None)
def test_clips_for_a_causal_codec(wan_vae: WanVAE, T: int, frames: int | None) -> None:
    video = torch.arange(T, dtype=torch.uint8)[:, None, None, None].expand(T, 9, 17, 3)
    if frames is not None and 1 < T < frames:
        with pytest.raises(ValueError, match=f"has {T} frames, {frames} are needed"):
            fit_clip(video, codec=wan_vae, size=None, frames=frames, name="x")
        return
    clip = fit_clip(video, codec=wan_vae, size=None, frames=frames, name="x")
    assert clip.shape[1:] == (8, 16, 3)
    # from the start; the longest of 1 + 4n
    assert clip[:, 0, 0, 0].tolist() == list(range(len(clip)))
    if frames is not None and T > 1:
        assert len(clip) == frames
    else:
        assert len(clip) % 4 == 1
        assert T - 4 < len(clip) <= T
    assert wan_vae.latent_shape(*clip.shape[:3]) == (16, 1 + (len(clip) - 1) // 4, 1, 2)


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
        "of 3 frames of 32x64 fills none of the buckets 32x64x8, 32x64x4, 64x32x12, 32x32x8, 16x16x1"
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
    with pytest.raises(ValueError, match=r"takes clips of 8 frames, not of as many: got 9"):
        encode(folder, tmp_path / "other", buckets=[Bucket(32, 64, 9)])
    with pytest.raises(ValueError, match="size 30x64"):
        encode(folder, tmp_path / "other", buckets=[Bucket(30, 64, 8)])


def test_image_conditions_are_stored(tmp_path: Path, wan_vae: WanVAE) -> None:
    for i in range(2):
        write_video(tmp_path / "v" / f"{i}.mp4", render_clip(0, i, size=(9, 16, 24))[0])
        (tmp_path / "v" / f"{i}.txt").write_text(f"clip {i}")
    options = {"codec": wan_vae, "text_encoder": ENCODER, "progress": False}
    encode_folder(tmp_path / "v", tmp_path / "out", **options, image_condition=True, dtype="float32")
    reader = LatentReader(tmp_path / "out")
    assert reader.index.cond_channels == 20
    for name in ("0", "1"):
        video, _ = read_video(tmp_path / "v" / f"{name}.mp4")
        torch.testing.assert_close(reader.latent(name), wan_vae.encode(video))
        torch.testing.assert_close(reader.condition(name), wan_vae.image_condition(video))
    assert not torch.equal(reader.condition("0"), reader.condition("1"))
    encode_folder(tmp_path / "v", tmp_path / "plain", **options)
    plain = LatentReader(tmp_path / "plain")
    assert plain.index.cond_channels == 0
    with pytest.raises(ValueError, match="cond of shape None"):
        plain.condition("0")
    with pytest.raises(ValueError, match="need Wan's VAE, the codec is haar"):
        encode(tmp_path / "v", tmp_path / "other", image_condition=True)


def test_fit_clip_keeps_the_middle_and_the_proportions() -> None:
    yy, xx = torch.meshgrid(torch.arange(64.0), torch.arange(96.0), indexing="ij")
    disc = ((yy - 31.5) ** 2 + (xx - 47.5) ** 2 < 20**2).to(torch.uint8) * 200
    video = disc[None, :, :, None].expand(1, 64, 96, 3)
    clip = fit_clip(video, codec=CODEC, size=(32, 32), frames=None, name="x")[0, :, :, 0].float()
    rows, columns = clip.sum(1), clip.sum(0)
    centre = torch.arange(32.0) + 0.5
    assert float((rows * centre).sum() / rows.sum()) == pytest.approx(16, abs=0.3)
    assert float((columns * centre).sum() / columns.sum()) == pytest.approx(16, abs=0.3)
    assert int((clip[16] > 100).sum()) == int((clip[:, 16] > 100).sum()) == 20


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
        ('{"video": "a.mp4", "captions": ["x"]', r"captions\.jsonl, line 1: not JSON"),
        ('{"video": "a.mp4"}', r"line 1: captions of a\.mp4 must be"),
        ('{"video": "a.mp4", "captions": [3]}', r"line 1: captions of a\.mp4 must be"),
        ('\n["a.mp4"]', r"line 2: expected"),
        ("", r"no caption for video .*a\.mp4: looked in .*captions\.jsonl and .*a\.txt"),
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
    assert not list((tmp_path / "out").iterdir())
    report = encode(videos, tmp_path / "out", skip_bad=True)
    assert report.samples == 4
    assert [name for name, _ in report.skipped] == ["c.mp4", "d.mp4"]
    assert "2 frames, 4 are needed" in report.skipped[1][1]
    assert len(LatentReader(tmp_path / "out").index.samples) == 4


def test_bad_requests(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Path, dict, str]] = [
        (tmp_path / "absent", {}, "no such folder of videos"),
        (tmp_path / "empty", {}, "no videos in"),
        (videos, {"size": (20, 16)}, "size 20x16"),
        (videos, {"frames": 6}, "got 6"),
        (videos, {"frames": 12}, "has 9 frames, 12 are needed"),
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


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_scripts_make_and_encode_videos(tmp_path: Path) -> None:
    made = run("make_toy_videos.py", tmp_path / "v", "--count", "3", "--size", "8", "32", "32")
    assert made.returncode == 0, made.stderr
    done = run("encode_videos.py", tmp_path / "v", tmp_path / "s", "--text-dim", "8", "--max-tokens", "6")
    assert done.returncode == 0, done.stderr
    reader = LatentReader(tmp_path / "s")
    assert len(reader.index.samples) == 3
    assert all(s.captions == 2 and s.latent_shape == (16, 2, 4, 4) for s in reader.index.samples.values())
    again = run("encode_videos.py", tmp_path / "v", tmp_path / "s")
    assert again.returncode == 1
    assert again.stderr.startswith("error: ")
    assert again.stderr.count("\n") == 1
    assert str(tmp_path / "s") in again.stderr


def test_script_encodes_with_a_wan_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("script_encode_videos", SCRIPTS / "encode_videos.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = save_pipeline(tmp_path / "wan")
    for i, frames in enumerate((5, 9, 3)):
        write_video(tmp_path / "v" / f"{i}.mp4", render_clip(0, i, size=(frames, 16, 24))[0])
        (tmp_path / "v" / f"{i}.txt").write_text("a red circle\na cat")
    common = [str(tmp_path / "v"), str(tmp_path / "s"), "--model", str(folder), "--buckets", "16x24x9", "16x24x5"]
    common += ["--skip-bad", "--samples-per-shard", "1", "--text-dtype", "float32", "--image-condition"]
    for rank in ("0", "1"):
        script.main([*common, "--rank", rank, "--world-size", "2"])
    assert "run the command once more without --rank" in capsys.readouterr().out
    script.main(common)
    printed = capsys.readouterr().out
    assert "left out 2.mp4: video" in printed
    assert "2 samples in" in printed
    reader = LatentReader(tmp_path / "s")
    assert f"latent mean by channel: {reader.index.latent_mean[0]:.4g} " in printed
    assert {s.id: s.latent_shape for s in reader.index.samples.values()} == {"0": (16, 2, 2, 3), "1": (16, 3, 2, 3)}
    assert (reader.index.codec.id, reader.index.text_encoder.id) == ("wan-vae-4x8x8-c16", "umt5-32x512")
    assert reader.index.cond_channels == 20
    caption, tokens = reader.text("1", 1)
    assert caption == "a cat"
    # two words and the end
    assert tokens.shape == (3, 32)
    assert reader.null_text.shape == (1, 32)
    with pytest.raises(ValueError, match=r"no such model folder: .*nowhere"):
        script.main([str(tmp_path / "v"), str(tmp_path / "t"), "--vae", str(tmp_path / "nowhere")])
