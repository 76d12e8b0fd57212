"""Content and caption of clip i of a world, in integer arithmetic only, so that every machine agrees.

Objects move in the world and the camera drifts over it: a caption's "moving left" is motion against the background.
The objects of a clip have different colours, and the caption names them from front to back.
B clips, T frames, H W pixels, O objects.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vsa.data.plan import hash64
from vsa.settings import AtLeastOne, Seed, validated
from vsa.transfer import copy_async

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (235, 40, 40),
    "orange": (245, 140, 20),
    "yellow": (240, 230, 40),
    "green": (40, 205, 60),
    "cyan": (40, 215, 225),
    "blue": (50, 80, 245),
    "purple": (150, 50, 235),
    "pink": (245, 70, 190),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "T", "X", "4", "7")
STEPS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # x, y
TURNS: dict[str, int] = {"clockwise": 1, "counterclockwise": -1}
MOTIONS: tuple[str, ...] = (*STEPS, *TURNS)
CAMERA: tuple[str, ...] = (*STEPS, "still")

OBJECTS = 3
"""Most objects of a clip."""
MOST_WORDS = 22
"""Words of a caption of three objects."""
SIZES = 4
TEXTURES = 4
PHOTOS = 14
"""Backgrounds: seven photographs and their mirror images."""

# places tried for the objects of a clip
_TRIALS = 128
_SINE = [round(math.sin(2 * math.pi * i / 1024) * (1 << 14)) for i in range(1024)]
_OBJECT = re.compile(
    rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) (?:moving|circling) ({'|'.join(MOTIONS)})", re.IGNORECASE
)
_DRIFT = re.compile(rf"camera (?:drifts|holds) ({'|'.join(CAMERA)})", re.IGNORECASE)


@validated
@dataclass(frozen=True, kw_only=True)
class WorldClips:
    """A set of world clips: clip i is a pure function of (seed, i) and the grid.

    Args:
        count: number of clips.
        grid: tokens along time, height and width, of a model with patches of 1 x 2 x 2 latents. With a codec of
            4 x 8 x 8 a grid t x h x w is a clip of 4t frames of 16h x 16w pixels. Grids smaller than 8 x 8 x 8 are for
            tests only, because shapes cannot be distinguished in them.
        seed: seed of the world.
    """

    count: AtLeastOne = 250_000
    grid: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (8, 16, 16)
    seed: Seed = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", tuple(self.grid))
        if min(self.grid[1:]) < 2:
            raise ValueError(f"grid must be at least 2 tokens high and wide, got {list(self.grid)}")


@dataclass(frozen=True, kw_only=True)
class WorldObject:
    """Attributes of one object that a caption names."""

    colour: str
    shape: str
    motion: str


@dataclass(frozen=True, kw_only=True)
class WorldAttributes:
    """Attributes of a clip that a caption names; objects from front to back."""

    objects: tuple[WorldObject, ...]
    camera: str


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Clips before rendering.

    Args:
        looks: int32 `[B, 1 + 4 O]`: number of the background; shape, size, colour and texture of each object, the
            shape `len(SHAPES)` where there is none.
        paths: int32 `[B, T, 2 + 2 O]`: y, x of the picture in the background and of each object's box in the picture.
    """

    looks: Tensor
    paths: Tensor

    def __len__(self) -> int:
        return len(self.looks)

    def __getitem__(self, part: slice) -> Scenes:
        return Scenes(looks=self.looks[part], paths=self.paths[part])

    def to(self, device: torch.device | str) -> Scenes:
        """The same on `device`."""
        return Scenes(looks=copy_async(self.looks, device), paths=copy_async(self.paths, device))


def stack_scenes(scenes: Sequence[Scenes]) -> Scenes:
    """Scenes of one size as one batch."""
    return Scenes(looks=torch.cat([s.looks for s in scenes]), paths=torch.cat([s.paths for s in scenes]))


def box_size(height: int, width: int) -> int:
    """Pixels of the square box that holds an object."""
    return 3 * min(height, width) // 8


def background_size(extent: int) -> int:
    """Pixels of a background along an axis on which the picture has `extent`: room for the camera to drift in."""
    return extent * 3 // 2


def world_attributes(seed: int, index: int) -> WorldAttributes:
    """The attributes of clip `index` of a world."""
    draw = _stream("attributes", seed, index)
    names = list(COLOURS)
    objects = []
    for _ in range(2 + int(draw() * 2)):
        colour = names.pop(int(draw() * len(names)))
        objects.append(WorldObject(colour=colour, shape=_pick(SHAPES, draw()), motion=_pick(MOTIONS, draw())))
    return WorldAttributes(objects=tuple(objects), camera=_pick(CAMERA, draw()))


def world_caption(attributes: WorldAttributes) -> str:
    """The caption of a clip. Every object takes the same number of words, so that the position identifies it."""
    phrases = [
        f"{'an' if o.colour == 'orange' else 'a'} {o.colour} {o.shape} "
        f"{'circling' if o.motion in TURNS else 'moving'} {o.motion}"
        for o in attributes.objects
    ]
    verb = "holds" if attributes.camera == "still" else "drifts"
    return f"{' and '.join(phrases)} as the camera {verb} {attributes.camera}"


def parse_caption(caption: str) -> WorldAttributes:
    """The attributes that a caption of `world_caption` names."""
    objects = tuple(
        WorldObject(colour=c.lower(), shape=next(s for s in SHAPES if s.lower() == shape.lower()), motion=m.lower())
        for c, shape, m in _OBJECT.findall(caption)
    )
    drift = _DRIFT.findall(caption)
    if not 1 <= len(objects) <= OBJECTS or len({o.colour for o in objects}) < len(objects) or len(drift) != 1:
        raise ValueError(
            f"expected a caption such as {world_caption(world_attributes(0, 0))!r} with 1 to {OBJECTS} objects of "
            f"different colours, got {caption!r}"
        )
    return WorldAttributes(objects=objects, camera=drift[0].lower())


def draw_scene(seed: int, index: int, size: tuple[int, int, int]) -> Scenes:
    """The scene of one clip (B = 1).

    Args:
        seed: seed of the world.
        index: number of the clip.
        size: frames, height and width.
    """
    attributes = world_attributes(seed, index)
    draw = _stream("scene", seed, index)
    T, H, W = size
    extent = np.array([H, W])
    box = box_size(H, W)
    looks = [int(draw() * PHOTOS)]
    # (y, x) at every frame, from the first on
    drift = _straight(attributes.camera, extent, 80 + int(draw() * 100), T)
    moves = []
    for o in attributes.objects:
        looks += [SHAPES.index(o.shape), int(draw() * SIZES), list(COLOURS).index(o.colour), int(draw() * TEXTURES)]
        if o.motion in TURNS:
            radius = min(H, W) * (140 + int(draw() * 50)) // 1000
            path = _circle(TURNS[o.motion], radius, int(draw() * 1024), T)
        else:
            path = _straight(o.motion, extent, 280 + int(draw() * 120), T)
        moves.append(path - drift)
    corners = _places(np.stack(moves), extent - box, box, draw)
    room = np.array([background_size(H), background_size(W)]) - extent - np.ptp(drift, axis=0)
    camera = drift - drift.min(axis=0) + np.array([int(draw() * (n + 1)) for n in room])
    absent = OBJECTS - len(moves)
    looks += [len(SHAPES), 0, 0, 0] * absent
    paths = np.concatenate([camera, *corners, np.zeros((T, 2 * absent), dtype=np.int64)], axis=1)
    return Scenes(
        looks=torch.tensor([looks], dtype=torch.int32), paths=torch.from_numpy(paths.astype(np.int32)).unsqueeze(0)
    )


def _straight(direction: str, extent: np.ndarray, permille: int, frames: int) -> np.ndarray:
    """int64 `[T, 2]` y, x of an even motion over thousandths of the picture; zeros for "still"."""
    x, y = STEPS.get(direction, (0, 0))
    travel = np.array([y, x]) * (extent * permille // 1000)
    steps = max(frames - 1, 1)
    return (2 * travel * np.arange(frames)[:, None] + steps) // (2 * steps)


def _circle(turn: int, radius: int, phase: int, frames: int) -> np.ndarray:
    """int64 `[T, 2]` y, x of one turn around the origin; the y axis points down, so clockwise angles rise."""
    angle = [(phase + turn * 1024 * t // frames) % 1024 for t in range(frames)]
    yx = np.array([(_SINE[a], _SINE[(a + 256) % 1024]) for a in angle])
    return (radius * yx + (1 << 13)) >> 14


def _places(moves: np.ndarray, room: np.ndarray, box: int, draw: Callable[[], float]) -> np.ndarray:
    """Corners of the boxes such that none leaves the frame and none hides another for long.

    Args:
        moves: int64 `[O, T, 2]` displacement of each object from its start.
        room: int64 `[2]` largest corner.
        box: size of a box.
        draw: source of random numbers.

    Returns:
        int64 `[O, T, 2]`.
    """
    low, high = -moves.min(axis=1), room - moves.max(axis=1)  # [O, 2]
    u = np.array([draw() for _ in range(_TRIALS * low.size)]).reshape(_TRIALS, *low.shape)
    starts = low + (u * (high - low + 1)).astype(np.int64)
    # eight frames are enough to find which objects meet
    some = np.arange(8) * (moves.shape[1] - 1) // 7
    trials = starts[:, :, None] + moves[:, some]  # [trials, O, T, 2]
    apart = np.abs(trials[:, :, None] - trials[:, None, :]).max(axis=-1)  # [trials, O, O, T]
    # only objects in front can hide an object
    before = np.tril(np.ones(apart.shape[1:3], dtype=bool), -1)[None, :, :, None]
    # pixels of a box that the nearest object before it leaves free, in whole numbers: floats tie elsewhere
    free = np.minimum(np.where(before, apart, box).min(axis=2), box)  # [trials, O, T]
    worst = free.sum(axis=2).min(axis=1)
    passes = (free < box * 2 // 3).any(axis=(1, 2))
    # three quarters visible are enough; beyond that, placements in which objects pass each other are preferred
    best = int(np.argmax(100 * np.minimum(worst, 6 * box) + 100 * box * passes + worst))
    return starts[best][:, None] + moves


def _stream(what: str, seed: int, index: int) -> Callable[[], float]:
    """Uniform numbers in [0, 1) that belong to one clip."""
    # only Random.random() keeps its stream across Python versions
    return random.Random(hash64("world", what, seed, index)).random


def _pick(names: Sequence[str], u: float) -> str:
    return names[int(u * len(names))]
