from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from vsa.data import toy_videos
from vsa.data.codecs import HaarCodec
from vsa.data.toy_shapes import measure_shape
from vsa.data.toy_videos import (
    COLOURS,
    DIRECTIONS,
    ToyAttributes,
    ToyClips,
    caption_of,
    captions_of,
    clip_attributes,
    evaluation_prompts,
    measure_clip,
    parse_prompt,
    render_clip,
    score_clip,
    write_toy_videos,
)
from vsa.data.video_files import read_video


@cache
def clips() -> list[tuple[torch.Tensor, str, ToyAttributes]]:
    return [render_clip(3, i) for i in range(60)]


def rate(scores: list[dict[str, bool]], name: str) -> float:
    return sum(score[name] for score in scores) / len(scores)


def test_clip_is_a_pure_function_of_seed_and_index() -> None:
    video, caption, attributes = render_clip(3, 7)
    assert torch.equal(video, clips()[7][0])
    assert caption == clips()[7][1] == caption_of(attributes)
    assert clip_attributes(3, 7) == attributes
    assert not torch.equal(render_clip(4, 7)[0], video)


@pytest.mark.slow
def test_scorer_is_right_on_clips_and_on_their_reconstructions() -> None:
    codec = HaarCodec()
    plain = [score_clip(video, caption) for video, caption, _ in clips()]
    rebuilt = [score_clip(codec.decode(codec.encode(video)), caption) for video, caption, _ in clips()]
    for scores in (plain, rebuilt):
        assert rate(scores, "colour") >= 0.98
        assert rate(scores, "direction") >= 0.98
        assert rate(scores, "shape") >= 0.98


def test_scorer_is_near_chance_on_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    # each clip is measured once for its four prompts
    monkeypatch.setattr(toy_videos, "measure_clip", cache(measure_clip))
    monkeypatch.setattr(toy_videos, "measure_shape", cache(measure_shape))
    prompts = evaluation_prompts(240)
    scores = [score_clip(clips()[i % 60][0], prompt) for i, prompt in enumerate(prompts)]
    assert 0.05 < rate(scores, "colour") < 0.3
    assert 0.12 < rate(scores, "direction") < 0.4
    assert 0.12 < rate(scores, "shape") < 0.4


def test_scorer_sees_motion_and_colour_not_the_file() -> None:
    for video, _, attributes in clips()[:12]:
        opposite = {"left": "right", "right": "left", "up": "down", "down": "up"}[attributes.direction]
        assert measure_clip(video.flip(0)) == (attributes.colour, opposite)
        still = video[:1].expand_as(video)
        assert measure_clip(still) == (attributes.colour, None)
        turned_direction = {"left": "up", "right": "down", "up": "left", "down": "right"}[attributes.direction]
        assert measure_clip(video.transpose(1, 2)) == (attributes.colour, turned_direction)


def test_scorer_survives_noise_and_fading() -> None:
    generator = torch.Generator().manual_seed(0)
    for video, _, attributes in clips()[:12]:
        noise = 12 * torch.randn(video.shape, generator=generator)
        faint_video = (0.6 * video.float() + 20 + noise).clamp(0, 255).to(torch.uint8)
        assert measure_clip(faint_video) == (attributes.colour, attributes.direction)


def test_empty_pictures_score_nothing() -> None:
    flat = torch.full((8, 32, 32, 3), 20, dtype=torch.uint8)
    assert measure_clip(flat) == (None, None)
    wrong = {"colour": False, "direction": False}
    assert score_clip(flat, "a red circle moving left slowly") == {**wrong, "shape": False}
    assert score_clip(flat, "something red moving left") == wrong


@pytest.mark.parametrize("size", [(4, 48, 80), (9, 64, 40), (1, 40, 40)])
def test_other_sizes_keep_the_shape_inside(size: tuple[int, int, int]) -> None:
    for i in range(12):
        video, _, attributes = render_clip(0, i, size=size)
        assert video.shape == (*size, 3)
        border = torch.cat(
            [video[:, 0].flatten(), video[:, -1].flatten(), video[:, :, 0].flatten(), video[:, :, -1].flatten()]
        )
        assert border.max() < 60
        colour, direction = measure_clip(video)
        assert colour == attributes.colour
        assert direction == (attributes.direction if size[0] > 1 else None)


def test_captions_and_prompts() -> None:
    attributes = ToyAttributes(colour="red", direction="left", shape="circle", speed="slowly")
    assert captions_of(attributes) == ("a red circle moving left slowly", "a red circle moving left")
    assert parse_prompt("A RED circle, moving left slowly.") == attributes
    assert parse_prompt("something cyan going up") == ToyAttributes(colour="cyan", direction="up")
    for bad in ("a circle moving left", "a red circle", "a red and blue circle moving left", ""):
        with pytest.raises(ValueError, match="must name one"):
            parse_prompt(bad)


def test_evaluation_prompts_are_balanced() -> None:
    attributes = [parse_prompt(prompt) for prompt in evaluation_prompts(96)]
    pairs = Counter((p.colour, p.direction) for p in attributes)
    assert pairs == dict.fromkeys(((c, d) for c in COLOURS for d in DIRECTIONS), 4)
    assert len({p.shape for p in attributes}) == 4
    assert Counter(p.speed for p in attributes) == {"slowly": 48, "quickly": 48}


def test_attributes_of_a_set_are_spread() -> None:
    attributes = [clip_attributes(0, i) for i in range(960)]
    for name, count in (("colour", 6), ("direction", 4), ("shape", 4), ("speed", 2)):
        counts = Counter(getattr(a, name) for a in attributes)
        assert len(counts) == count
        assert min(counts.values()) > 0.7 * 960 / count


def test_written_files_hold_the_clips_and_replace_an_older_set(tmp_path) -> None:
    write_toy_videos(ToyClips(count=3, size=(4, 32, 32), seed=9), tmp_path)
    write_toy_videos(ToyClips(count=2, size=(4, 32, 32), seed=1), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "captions.jsonl",
        "toy-1-000000.mp4",
        "toy-1-000001.mp4",
        "toy_clips.json",
    ]
    lines = [json.loads(line) for line in (tmp_path / "captions.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        video, caption, _ = render_clip(1, i, size=(4, 32, 32))
        actual, fps = read_video(tmp_path / line["video"])
        assert line["captions"][0] == caption
        assert fps == 8
        assert (actual.float() - video.float()).abs().mean() < 4


def test_files_of_others_stay(tmp_path: Path) -> None:
    clips = ToyClips(count=2, size=(4, 32, 32))

    def expect_refusal(name: str) -> None:
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(ValueError, match=rf"cannot write toy clips to .*: {name} is not from an earlier call"):
            write_toy_videos(clips, tmp_path)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

    # a user's captions, a clip beside its text, a name like ours
    for name in ("captions.jsonl", "mine.mp4", "toy-0-000000.mp4"):
        (tmp_path / name).write_text("mine")
        expect_refusal(name)
        (tmp_path / name).unlink()
    write_toy_videos(clips, tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    expect_refusal("mine.txt")
    (tmp_path / "mine.txt").unlink()
    own = (tmp_path / "captions.jsonl").read_bytes()
    (tmp_path / "captions.jsonl").write_bytes(own.replace(b"circle", b"disc").replace(b"square", b"box"))
    expect_refusal("captions.jsonl")
    (tmp_path / "captions.jsonl").write_bytes(own)
    write_toy_videos(clips, tmp_path)
    (tmp_path / "toy_clips.json").write_text("{}")
    with pytest.raises(ValueError, match=r"toy_clips\.json does not describe toy clips"):
        write_toy_videos(clips, tmp_path)


def test_an_interrupted_set_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path, video: torch.Tensor, *, fps: float) -> None:
        if path.name.endswith("1.mp4"):
            raise KeyboardInterrupt
        path.write_bytes(b"begun")

    with monkeypatch.context() as patch:
        patch.setattr(toy_videos, "write_video", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_toy_videos(ToyClips(count=3, size=(4, 32, 32)), tmp_path)
    # what a kill leaves
    (tmp_path / ".tmp-0123456789abcdef.mp4").write_bytes(b"half")
    write_toy_videos(ToyClips(count=1, size=(4, 32, 32)), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["captions.jsonl", "toy-0-000000.mp4", "toy_clips.json"]


def test_refuses_empty_sets() -> None:
    with pytest.raises(ValueError, match="0"):
        ToyClips(count=0)
