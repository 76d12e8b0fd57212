from __future__ import annotations

from pathlib import Path

import av
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vsa.data import clip_rules
from vsa.data.buckets import Bucket
from vsa.data.clip_rules import ClipRules
from vsa.data.codecs import HaarCodec, WanVAE
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_gif, write_video

CODEC = HaarCodec()
VIDEO, IMAGE = Path("x.mp4"), Path("x.png")


@given(
    T=st.integers(1, 13),
    H=st.integers(16, 60),
    W=st.integers(16, 60),
    h=st.integers(1, 5),
    w=st.integers(1, 5),
    sized=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_clip_is_what_the_codec_takes(T: int, H: int, W: int, h: int, w: int, sized: bool) -> None:
    video = torch.full((T, H, W, 3), 9, dtype=torch.uint8)
    rules = ClipRules(size=(8 * h, 8 * w) if sized else None)
    if 1 < T < 4:
        with pytest.raises(ValueError, match=rf"video x\.mp4 has {T} frames, expected at least 4"):
            rules.fit(video, VIDEO, CODEC)
        return
    clip = rules.fit(video, VIDEO if T > 1 else IMAGE, CODEC)
    # without a size: whole patches of two cells, which models can train on
    assert clip.shape == (T // 4 * 4 or 1, *(rules.size or (H // 16 * 16, W // 16 * 16)), 3)
    assert (clip == 9).all()
    CODEC.encode(clip)


@given(T=st.integers(1, 40), frames=st.none() | st.integers(0, 9).map(lambda n: 1 + 4 * n))
@settings(max_examples=60, deadline=None)
def test_clips_for_a_causal_codec(wan_vae: WanVAE, T: int, frames: int | None) -> None:
    video = torch.arange(T, dtype=torch.uint8)[:, None, None, None].expand(T, 17, 33, 3)
    rules = ClipRules(frames=frames)
    # one frame is no video unless it is asked for
    if (frames or 5) > T:
        with pytest.raises(ValueError, match=rf"has {T} frames?, expected at least {frames or 5}"):
            rules.fit(video, VIDEO, wan_vae)
        return
    clip = rules.fit(video, VIDEO, wan_vae)
    assert clip.shape[1:] == (16, 32, 3)
    # from the start; the longest of 1 + 4n
    assert clip[:, 0, 0, 0].tolist() == list(range(len(clip)))
    if frames is not None:
        assert len(clip) == frames
    else:
        assert len(clip) % 4 == 1
        assert T - 4 < len(clip) <= T
    assert wan_vae.latent_shape(*clip.shape[:3]) == (16, 1 + (len(clip) - 1) // 4, 2, 4)


@pytest.mark.parametrize(("height", "width"), [(64, 96), (96, 64)])
def test_a_clip_is_the_middle_in_its_proportions(height: int, width: int) -> None:
    yy, xx = torch.meshgrid(torch.arange(float(height)), torch.arange(float(width)), indexing="ij")
    disc = ((yy - height / 2 + 0.5) ** 2 + (xx - width / 2 + 0.5) ** 2 < 20**2).to(torch.uint8) * 200
    video = disc[None, :, :, None].expand(1, height, width, 3)
    clip = ClipRules(size=(32, 32)).fit(video, IMAGE, CODEC)[0, :, :, 0].float()
    rows, columns = clip.sum(1), clip.sum(0)
    centre = torch.arange(32.0) + 0.5
    assert float((rows * centre).sum() / rows.sum()) == pytest.approx(16, abs=0.3)
    assert float((columns * centre).sum() / columns.sum()) == pytest.approx(16, abs=0.3)
    assert int((clip[16] > 100).sum()) == int((clip[:, 16] > 100).sum()) == 20


@pytest.mark.parametrize(
    ("rules", "frames", "message"),
    [
        (ClipRules(), 1, r"has 1 frame, expected at least 4"),
        (ClipRules(frames=8), 1, r"has 1 frame, expected at least 8"),
        (ClipRules(frames=8), 5, r"has 5 frames, expected at least 8"),
        (ClipRules(buckets=(Bucket(16, 16, 8),)), 1, r"\(1 frame of 32x32\) is too small for the buckets 16x16x8"),
        (ClipRules(frames=1), 1, None),
        (ClipRules(frames=1), 9, None),
        (ClipRules(buckets=(Bucket(16, 16, 8), Bucket(16, 16, 1))), 1, None),
    ],
)
def test_a_video_of_one_frame_is_no_image_unless_asked_for(rules: ClipRules, frames: int, message: str | None) -> None:
    if message is None:
        assert rules.plan(VIDEO, CODEC, frames=frames, height=32, width=32).size[0] == 1
        return
    with pytest.raises(ValueError, match=message):
        rules.plan(VIDEO, CODEC, frames=frames, height=32, width=32)
    if frames == 1 and not rules.buckets:
        assert rules.plan(IMAGE, CODEC, frames=1, height=32, width=32).size[0] == 1


def test_sizes_that_no_patch_divides() -> None:
    rules = ClipRules(buckets=tuple(map(Bucket.parse, ("200x200x8", "128x136x8", "128x128x8", "128x136x4"))))
    assert rules.untrainable(CODEC) == [(128, 136), (200, 200)]
    assert ClipRules().untrainable(CODEC) == []
    for size, cropped_size in {(200, 248): (192, 240), (208, 16): (208, 16), (31, 17): (16, 16)}.items():
        cut = ClipRules().plan(VIDEO, CODEC, frames=8, height=size[0], width=size[1])
        assert (cut.scaled, cut.size) == (size, (8, *cropped_size))
    with pytest.raises(ValueError, match=r"video x\.mp4 has 15x80 pixels, expected at least a patch of 16x16"):
        ClipRules().plan(VIDEO, CODEC, frames=8, height=15, width=80)


def test_clips_beyond_the_memory_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"a clip of 100000x100000x16 needs 4023\.3 GiB of memory, this machine has .*: choose a smaller size"
    with pytest.raises(ValueError, match=message):
        ClipRules(size=(100_000, 100_000), frames=16).check(CODEC)
    with pytest.raises(ValueError, match="a clip of 100000x100000x16 needs"):
        ClipRules(buckets=(Bucket(64, 64, 16), Bucket(100_000, 100_000, 16))).check(CODEC)
    # 9 bytes for each of 3 x 8 x 64 x 64 values
    monkeypatch.setattr(clip_rules, "_memory", lambda: 9 * 3 * 8 * 64 * 64)
    rules = ClipRules(size=(64, 64), frames=8)
    rules.check(CODEC)
    # a wide picture that covers the clip is much larger than the clip
    with pytest.raises(ValueError, match=r"video x\.mp4, scaled to 64x512, needs"):
        rules.fit(torch.zeros(8, 8, 64, 3, dtype=torch.uint8), VIDEO, CODEC)
    monkeypatch.setattr(clip_rules, "_memory", lambda: 9 * 3 * 8 * 64 * 64 - 1)
    with pytest.raises(ValueError, match="a clip of 64x64x8 needs"):
        rules.check(CODEC)


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_frame_rates_do_not_blame_a_file(fps: float) -> None:
    with pytest.raises(ValueError, match=rf"^fps must be above 0 and finite, got {fps}$"):
        ClipRules(fps=fps)


def test_probing_tells_what_cutting_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for frames in (1, 3, 8):
        write_video(tmp_path / f"{frames}.mp4", render_clip(0, 0, size=(frames, 32, 32))[0], fps=8)
        write_gif(tmp_path / f"{frames}.gif", render_clip(0, 0, size=(frames, 32, 32))[0], fps=8)
        # matroska stores no number of frames
        with av.open(str(tmp_path / f"{frames}.mkv"), "w") as container:
            stream = container.add_stream("ffv1", rate=8)
            stream.height = stream.width = 32
            for _ in range(frames):
                container.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
            container.mux(stream.encode())
    Image.new("RGB", (32, 32)).save(tmp_path / "still.png")
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "short.mp4").write_bytes((tmp_path / "8.mp4").read_bytes()[:300])

    def outcome(call, rules: ClipRules, path: Path) -> str | None:
        try:
            call(rules, path, CODEC)
        except ValueError as error:
            return str(error)
        return None

    refusals = 0
    for rules in (ClipRules(), ClipRules(frames=8), ClipRules(fps=4), ClipRules(fps=2), ClipRules(frames=1)):
        for path in sorted(tmp_path.iterdir()):
            expected = outcome(ClipRules.cut, rules, path)
            assert outcome(ClipRules.probe, rules, path) == expected
            refusals += expected is not None
    assert 30 < refusals < 50
    # by their headers alone
    monkeypatch.setattr(ClipRules, "cut", lambda *_: pytest.fail("decoded"))
    ClipRules().probe(tmp_path / "8.mp4", CODEC)
    with pytest.raises(ValueError, match=r"cannot decode video .*text\.mp4"):
        ClipRules().probe(tmp_path / "text.mp4", CODEC)
