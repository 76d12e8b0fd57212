from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vsa.data.text import HashedNgramEncoder
from vsa.data.world.scenes import (
    CAMERA,
    COLOURS,
    MOST_WORDS,
    MOTIONS,
    OBJECTS,
    PHOTOS,
    SHAPES,
    SIZES,
    TEXTURES,
    WorldAttributes,
    WorldClips,
    WorldObject,
    background_size,
    box_size,
    draw_scene,
    parse_caption,
    stack_scenes,
    world_attributes,
    world_caption,
)

SIZE = (16, 64, 96)
LOOKS = [[7, 0, 3, 5, 1, 6, 0, 1, 3, 8, 0, 0, 0]]
PATHS = [[8, 21, 0, 43, 15, 53, 0, 0], [15, 21, 13, 43, 32, 53, 0, 0]]
CAPTION = "a blue circle moving down and an orange 4 moving down as the camera drifts down"
MANY = [world_attributes(5, i) for i in range(600)]


def test_a_scene_is_a_pure_function_of_seed_and_clip() -> None:
    one, again = draw_scene(3, 7, SIZE), draw_scene(3, 7, SIZE)
    assert torch.equal(one.looks, again.looks)
    assert torch.equal(one.paths, again.paths)
    assert not torch.equal(draw_scene(4, 7, SIZE).paths, one.paths)
    # numbers of one machine, read on another: whoever changes the world changes these
    assert one.looks.tolist() == LOOKS
    assert one.paths[0, [0, -1]].tolist() == PATHS
    assert world_caption(world_attributes(3, 7)) == CAPTION


def test_attributes_are_uniform_and_colours_differ_within_a_clip() -> None:
    assert all(len({o.colour for o in a.objects}) == len(a.objects) in (2, 3) for a in MANY)
    objects = [o for a in MANY for o in a.objects]
    for names, values in (
        (COLOURS, [o.colour for o in objects]),
        (SHAPES, [o.shape for o in objects]),
        (MOTIONS, [o.motion for o in objects]),
        (CAMERA, [a.camera for a in MANY]),
    ):
        counts = Counter(values)
        assert set(counts) == set(names)
        # five standard deviations of a binomial count
        mean = len(values) / len(names)
        assert all(abs(n - mean) < 5 * mean**0.5 for n in counts.values())


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_caption_says_what_the_clip_shows(seed: int, index: int) -> None:
    attributes = world_attributes(seed, index)
    caption = world_caption(attributes)
    assert parse_caption(caption) == attributes
    assert len(caption.split()) <= MOST_WORDS


@pytest.mark.parametrize(
    "caption",
    [
        "a red circle moving left slowly",
        "as the camera drifts up",
        "a red circle moving left and a red 4 moving up as the camera drifts up",
        "a crimson circle moving left as the camera drifts up",
    ],
)
def test_other_captions_are_refused_with_an_example(caption: str) -> None:
    with pytest.raises(ValueError, match=r"such as 'an? .* camera .*' with 1 to 3 objects .*, got '"):
        parse_caption(caption)


def test_the_place_of_a_word_says_which_object_it_is_about() -> None:
    """Colours of two objects swapped: other tokens; and every token alone gives its word and its place away."""
    encoder = HashedNgramEncoder(max_tokens=24)
    red, blue = WorldObject(colour="red", shape="T", motion="up"), WorldObject(colour="blue", shape="4", motion="left")
    swapped_objects = [
        WorldObject(colour=a.colour, shape=b.shape, motion=b.motion) for a, b in ((red, blue), (blue, red))
    ]
    texts = [
        world_caption(WorldAttributes(objects=(a, b), camera="up")) for a, b in ((red, blue), swapped_objects[::-1])
    ]
    one, other = (encoder.encode(text) for text in texts)
    assert not torch.equal(one, other)
    for text, tokens in zip(texts, (one, other), strict=True):
        words = text.lower().split()
        assert len(tokens) == len(words)
        vocabulary = sorted(set(words))
        rows = torch.cat([encoder.encode(" ".join([word] * 24)) for word in vocabulary])
        nearest = torch.cdist(tokens, rows).argmin(1)
        assert [(vocabulary[n // 24], n % 24) for n in nearest.tolist()] == [(w, i) for i, w in enumerate(words)]


def test_words_and_places_can_be_read_by_a_linear_map() -> None:
    """Cross-attention reads tokens through linear maps: one finds the place of any word of the world."""
    encoder = HashedNgramEncoder(max_tokens=24)
    words = sorted({w for a in MANY for w in world_caption(a).lower().split()})
    tokens = torch.stack([encoder.encode(" ".join([word] * 24)) for word in words])  # [words, 24, E]
    inputs = tokens.flatten(0, 1)
    places = torch.eye(24).repeat(len(words), 1)
    # a map that never saw this word: every eighth is kept out of the fit
    fit_rows = (torch.arange(len(words)) % 8 != 0).repeat_interleave(24)
    weights = torch.linalg.lstsq(
        torch.cat([inputs, torch.ones(len(inputs), 1)], 1)[fit_rows], places[fit_rows]
    ).solution
    predictions = (torch.cat([inputs, torch.ones(len(inputs), 1)], 1) @ weights).argmax(1)
    right = (predictions == places.argmax(1)).float()
    assert right[fit_rows].mean() > 0.95


@given(st.integers(0, 10**6), st.tuples(st.integers(1, 33), st.integers(4, 20), st.integers(4, 20)))
def test_nothing_leaves_the_picture_or_the_background(index: int, cells: tuple[int, int, int]) -> None:
    T, H, W = cells[0], 8 * cells[1], 8 * cells[2]
    scene = draw_scene(1, index, (T, H, W))
    objects = world_attributes(1, index).objects
    box = box_size(H, W)
    paths, looks = scene.paths[0].numpy(), scene.looks[0].tolist()
    assert paths.shape == (T, 2 + 2 * OBJECTS)
    assert 0 <= looks[0] < PHOTOS
    assert (paths >= 0).all()
    for axis, extent in ((0, H), (1, W)):
        assert paths[:, axis].max() <= background_size(extent) - extent
        for n in range(len(objects)):
            assert paths[:, 2 + 2 * n + axis].max() <= extent - box
    for n in range(OBJECTS):
        shape, size, colour, texture = looks[1 + 4 * n : 5 + 4 * n]
        assert (shape == len(SHAPES)) == (n >= len(objects))
        assert 0 <= size < SIZES
        assert 0 <= colour < len(COLOURS)
        assert 0 <= texture < TEXTURES


def test_objects_move_against_the_background_as_the_caption_says() -> None:
    T, H, W = 32, 128, 128
    motions = set()
    for index in range(40):
        paths = draw_scene(2, index, (T, H, W)).paths[0].numpy().astype(np.int64)
        attributes = world_attributes(2, index)
        camera = paths[:, :2]
        direction = tuple(np.sign(camera[-1] - camera[0]).tolist())
        names = {(0, -1): "left", (0, 1): "right", (-1, 0): "up", (1, 0): "down", (0, 0): "still"}
        assert names[direction] == attributes.camera
        for n, o in enumerate(attributes.objects):
            # where an object is in the world: in the picture, and the picture in the world
            world = paths[:, 2 + 2 * n : 4 + 2 * n] + camera
            y, x = (world - world.mean(0)).T
            area = float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum()) / 2
            if abs(area) > 0.005 * H * W:
                # y points down: positive is clockwise on the screen
                assert o.motion == ("clockwise" if area > 0 else "counterclockwise")
            else:
                assert names[tuple(np.sign(np.trunc((world[-1] - world[0]) / 2)).astype(int).tolist())] == o.motion
            motions.add(o.motion)
    assert motions == set(MOTIONS)


def test_objects_pass_before_each_other_and_are_still_seen() -> None:
    T, H, W = 32, 128, 128
    box = box_size(H, W)
    passes, free = [], []
    for index in range(100):
        paths = draw_scene(6, index, (T, H, W)).paths[0].numpy()
        corners = [paths[:, 2 + 2 * n : 4 + 2 * n] for n in range(len(world_attributes(6, index).objects))]
        apart = [
            np.min([np.abs(corners[a] - corners[b]).max(1) for a in range(b)], axis=0) for b in range(1, len(corners))
        ]
        passes.append(any((row < 0.67 * box).any() for row in apart))
        free += [np.minimum(row / box, 1).mean() for row in apart]
    assert np.mean(passes) > 0.7
    assert np.mean(np.array(free) > 0.6) > 0.95
    assert min(free) > 0.4


def test_scenes_are_sliced_and_stacked() -> None:
    both = stack_scenes([draw_scene(0, i, SIZE) for i in (4, 9)])
    assert len(both) == 2
    assert torch.equal(both[1:].paths, draw_scene(0, 9, SIZE).paths)


def test_a_grid_too_small_for_objects_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 tokens high and wide, got \[8, 1, 8\]"):
        WorldClips(grid=(8, 1, 8))
    with pytest.raises(ValueError, match="count=0"):
        WorldClips(count=0)
