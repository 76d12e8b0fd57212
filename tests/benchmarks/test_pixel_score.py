from __future__ import annotations

import pytest
import torch

from benchmarks.world.pixel_score import ATTRIBUTES, chance, measure_clip, score_clip, score_clips
from vsa.data.codecs import HaarCodec
from vsa.data.world.render import render
from vsa.data.world.scenes import COLOURS, draw_scene, parse_caption, stack_scenes, world_attributes, world_caption

SIZE, CLIPS = (32, 128, 128), 6
CAPTIONS = [world_caption(world_attributes(11, i)) for i in range(CLIPS)]


@pytest.fixture(scope="module")
def videos() -> torch.Tensor:
    return render(stack_scenes([draw_scene(11, i, SIZE) for i in range(CLIPS)]), SIZE)


@pytest.fixture(scope="module")
def rebuilt(videos: torch.Tensor) -> list[torch.Tensor]:
    codec = HaarCodec()
    return [codec.decode(codec.encode(video)) for video in videos]


def test_clips_behind_the_codec_show_what_their_captions_say(rebuilt) -> None:
    scores = score_clips(rebuilt, CAPTIONS)
    assert set(scores) == set(ATTRIBUTES)
    assert min(scores.values()) >= 0.95


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sees_what_a_cpu_sees(rebuilt) -> None:
    clips = [*rebuilt, *(torch.randint(0, 256, rebuilt[0].shape, dtype=torch.uint8) for _ in range(2))]
    for clip in clips:
        assert measure_clip(clip.cuda(), 3) == measure_clip(clip, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [((32, 128, 128), 50), ((32, 256, 256), 20), ((64, 256, 256), 8)])
def test_many_clips_are_scored_as_they_are_and_other_captions_at_chance(size, count) -> None:
    codec = HaarCodec()
    captions = [world_caption(world_attributes(12, i)) for i in range(count)]
    clips = [render(draw_scene(12, i, size), size)[0] for i in range(count)]
    again = [codec.decode(codec.encode(video)) for video in clips]
    real, behind = score_clips(clips, captions), score_clips(again, captions)
    assert min(real[name] for name in ATTRIBUTES[:-1]) >= 0.98
    assert min(behind[name] for name in ATTRIBUTES[:-1]) >= 0.95
    # captions of as many objects change places, which is what chance is said of
    order = sorted(range(count), key=lambda i: captions[i].count(" and "))
    rotation = order[1:] + order[:1]
    others, expected = score_clips([again[i] for i in order], [captions[i] for i in rotation]), chance(captions)
    objects = sum(len(parse_caption(caption).objects) for caption in captions)
    for name in ATTRIBUTES[:-1]:
        trials = count if name == "camera" else objects
        deviation = (expected[name] * (1 - expected[name]) / trials) ** 0.5
        assert abs(others[name] - expected[name]) < 4 * deviation
    assert others["all"] == 0


def test_a_clip_that_stands_still_has_colours_and_shapes_but_no_motion(rebuilt) -> None:
    still = score_clips([video[:1].expand_as(video) for video in rebuilt[:2]], CAPTIONS[:2])
    assert still["colour"] == 1
    assert still["motion"] == still["all"] == 0
    assert measure_clip(rebuilt[0][:1].expand_as(rebuilt[0]), 3)[1] == "still"


def test_time_and_mirrors_turn_the_motions(videos) -> None:
    back = {"left": "right", "right": "left", "up": "down", "down": "up"}
    round_ = {"clockwise": "counterclockwise", "counterclockwise": "clockwise"}
    for video, caption in zip(videos[:2], CAPTIONS, strict=False):
        truth = parse_caption(caption)
        objects, camera = measure_clip(video.flip(0), len(truth.objects))
        assert camera == back.get(truth.camera, "still")
        assert {name: o.motion for name, o in objects.items()} == {
            o.colour: {**back, **round_}[o.motion] for o in truth.objects
        }
        mirror_objects, _ = measure_clip(video.flip(2), len(truth.objects))
        flat = {"left": "right", "right": "left", "up": "up", "down": "down"}
        assert {name: o.motion for name, o in mirror_objects.items()} == {
            o.colour: {**flat, **round_}[o.motion] for o in truth.objects
        }


def test_nothing_is_seen_in_noise_and_in_an_empty_world() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (*SIZE, 3), generator=generator, dtype=torch.uint8)
    assert not any(score_clip(noise, CAPTIONS[0])["shape"])
    assert not any(score_clip(torch.full((*SIZE, 3), 60, dtype=torch.uint8), CAPTIONS[0])["colour"])


def test_too_many_colours_do_not_help(videos) -> None:
    """A clip that shows every colour has as many right ones as chance: only the most visible count."""
    bars = torch.zeros_like(videos[0])
    for i, rgb in enumerate(COLOURS.values()):
        # each a little larger than the one before
        bars[:, 16 * i : 16 * i + 8, : 40 + 10 * i] = torch.tensor(rgb, dtype=torch.uint8)
    objects, _ = measure_clip(bars, 2)
    assert set(objects) == set(list(COLOURS)[-2:])


def test_chance_is_counted_over_objects() -> None:
    two = "a red X moving up and a blue 4 moving left as the camera drifts up"
    three = "a red X moving up and a blue 4 moving left and a green T moving down as the camera drifts up"
    assert chance([two])["colour"] == 2 / 8
    assert chance([three])["shape"] == 3 / 8 / 8
    assert chance([two, three])["motion"] == pytest.approx((2 * 2 / 8 + 3 * 3 / 8) / 5 / 6)
    assert chance([two])["camera"] == 1 / 5
