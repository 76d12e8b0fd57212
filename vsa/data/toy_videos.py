"""Toy data: captioned clips of one moving shape, and a scorer that measures colour, direction and shape from pixels.

T H W frames and pixels.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vsa.data.plan import hash64
from vsa.data.toy_shapes import measure_shape
from vsa.data.video_files import write_video
from vsa.errors import refuse_unwritable
from vsa.files import read_json, write_whole
from vsa.progress import progress_bar
from vsa.settings import AtLeastOne, Seed, validated

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 45, 45),
    "green": (50, 200, 60),
    "blue": (60, 85, 235),
    "yellow": (235, 215, 50),
    "purple": (195, 60, 215),
    "cyan": (60, 210, 220),
}
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # x, y
SPEEDS: dict[str, float] = {"slowly": 0.3, "quickly": 0.55}  # share of the picture crossed in one clip
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross")

_CAPTIONS = "captions.jsonl"
_MANIFEST = "toy_clips.json"

# smallest motion of a clip's shape, as a share of the frame, that counts as moving
_LEAST_MOTION = 0.04
# RGB distance from the background below which there is no foreground
_LEAST_CONTRAST = 25.0


@dataclass(frozen=True, kw_only=True)
class ToyAttributes:
    """Attributes that a caption names; shape and speed are optional."""

    colour: str
    direction: str
    shape: str | None = None
    speed: str | None = None


@validated
@dataclass(frozen=True, kw_only=True)
class ToyClips:
    """A set of toy clips: clip i is a pure function of (seed, i).

    Args:
        count: number of clips.
        size: frames, height and width.
        seed: seed of the set.
        fps: frame rate of the files.
    """

    count: AtLeastOne = 1024
    size: tuple[AtLeastOne, AtLeastOne, AtLeastOne] = (16, 128, 128)
    seed: Seed = 0
    fps: AtLeastOne = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", tuple(self.size))


def render_clip(
    seed: int, index: int, *, size: tuple[int, int, int] = (16, 128, 128)
) -> tuple[Tensor, str, ToyAttributes]:
    """One clip of a coloured shape that crosses a dark background at constant speed.

    Args:
        seed: seed of the set.
        index: number of the clip in it.
        size: frames, height and width.

    Returns:
        uint8 video `[T, H, W, 3]`, its caption ("a red circle moving left slowly") and its attributes.
    """
    draw = _stream(seed, index)
    attributes = _attributes(draw)
    T, H, W = size
    radius = min(H, W) * (0.13 + 0.04 * draw())
    sx, sy = DIRECTIONS[attributes.direction]
    reach = SPEEDS[attributes.speed or "slowly"] * (0.9 + 0.2 * draw())
    # the tip of the triangle is at 1.3 radii, so the shape never leaves the frame
    margin = 1.3 * radius + 1
    travel_x, travel_y = (s * max(min(reach * n, n - 2 * margin), 0) for s, n in ((sx, W), (sy, H)))
    x0 = _start(W, travel_x, margin, draw())
    y0 = _start(H, travel_y, margin, draw())

    phase = np.arange(T, dtype=np.float32) / max(T - 1, 1)
    dx = np.arange(W, dtype=np.float32)[None, None, :] + 0.5 - (x0 + travel_x * phase)[:, None, None]
    dy = np.arange(H, dtype=np.float32)[None, :, None] + 0.5 - (y0 + travel_y * phase)[:, None, None]
    alpha = np.clip(0.5 - _distance(attributes.shape or "circle", dx, dy, radius), 0, 1)[..., None]  # [T, H, W, 1]

    level, tilt_x, tilt_y = 12 + 24 * draw(), 16 * draw() - 8, 16 * draw() - 8
    ramp_x = np.linspace(-0.5, 0.5, W, dtype=np.float32)[None, :]
    ramp_y = np.linspace(-0.5, 0.5, H, dtype=np.float32)[:, None]
    background = (level + tilt_x * ramp_x + tilt_y * ramp_y)[None, :, :, None]
    paint = np.array(COLOURS[attributes.colour], dtype=np.float32) * (0.92 + 0.08 * draw())
    video = background + alpha * (paint - background)
    return torch.from_numpy(np.rint(np.clip(video, 0, 255)).astype(np.uint8)), caption_of(attributes), attributes


def write_toy_videos(clips: ToyClips, folder: str | Path) -> None:
    """Render toy clips as mp4 files with a `captions.jsonl`, which is written last.

    Args:
        clips: number, size and seed of the clips.
        folder: output folder: empty, or with the toy clips of an earlier call, which are replaced.
    """
    folder = Path(folder)
    refuse_unwritable(folder)
    for old in _own_files(folder):
        old.unlink()
    # written before the first clip: it marks files of an interrupted call as replaceable
    write_whole(folder / _MANIFEST, json.dumps({"toy_clips": asdict(clips)}) + "\n")
    with progress_bar("rendering toy videos", clips.count) as advance:
        for i in range(clips.count):
            video, _, _ = render_clip(clips.seed, i, size=clips.size)
            write_video(folder / _clip_name(clips, i), video, fps=clips.fps)
            advance(1)
    write_whole(folder / _CAPTIONS, _caption_lines(clips))


def _own_files(folder: Path) -> list[Path]:
    """The files of a folder of toy clips, its manifest last; all of them must come from an earlier call."""
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir()}
    own = {name for name in names if re.fullmatch(r"\.tmp-[0-9a-f]{16}\.(mp4|jsonl|json)", name)}
    if _MANIFEST in names:
        try:
            clips = ToyClips(**read_json(folder / _MANIFEST, kind={"toy_clips": dict})["toy_clips"])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{folder / _MANIFEST} does not describe toy clips: choose an empty folder") from error
        own |= {_MANIFEST, *(_clip_name(clips, i) for i in range(clips.count))}
        captions = folder / _CAPTIONS
        # compared as bytes, because edited captions may have any encoding
        if captions.is_file() and captions.read_bytes() == _caption_lines(clips).encode():
            own.add(_CAPTIONS)
    foreign = sorted(names - own)
    if foreign:
        raise ValueError(
            f"cannot write toy clips to {folder}: {foreign[0]} is not from an earlier call; choose an empty folder"
        )
    return sorted((folder / name for name in names), key=lambda path: path.name == _MANIFEST)


def _clip_name(clips: ToyClips, index: int) -> str:
    return f"toy-{clips.seed}-{index:06d}.mp4"


def _caption_lines(clips: ToyClips) -> str:
    """The text of `captions.jsonl`."""
    captions = [captions_of(clip_attributes(clips.seed, i)) for i in range(clips.count)]
    lines = [json.dumps({"video": _clip_name(clips, i), "captions": texts}) for i, texts in enumerate(captions)]
    return "\n".join(lines) + "\n"


def clip_attributes(seed: int, index: int) -> ToyAttributes:
    """The attributes of clip `index` of a set, without rendering it."""
    return _attributes(_stream(seed, index))


def caption_of(attributes: ToyAttributes) -> str:
    """The caption of a clip, such as "a red circle moving left slowly"; missing attributes are left out."""
    words = [
        "a",
        attributes.colour,
        attributes.shape or "shape",
        "moving",
        attributes.direction,
        attributes.speed or "",
    ]
    return " ".join(word for word in words if word)


def captions_of(attributes: ToyAttributes) -> tuple[str, ...]:
    """Every caption stored with a clip: the full one and one without the speed."""
    return caption_of(attributes), caption_of(ToyAttributes(**{**asdict(attributes), "speed": None}))


def parse_prompt(caption: str) -> ToyAttributes:
    """The attributes that a caption names."""
    words = re.findall(r"[a-z]+", caption.lower())
    words_by_name = {
        name: [word for word in words if word in vocabulary]
        for name, vocabulary in (("colour", COLOURS), ("direction", DIRECTIONS), ("shape", SHAPES), ("speed", SPEEDS))
    }
    for name in ("colour", "direction"):
        if len(set(words_by_name[name])) != 1:
            vocabulary = COLOURS if name == "colour" else DIRECTIONS
            raise ValueError(
                f"prompt {caption!r} must name one {name} of {', '.join(vocabulary)}, got {words_by_name[name]}"
            )
    return ToyAttributes(**{name: (words[0] if words else None) for name, words in words_by_name.items()})  # pyright: ignore


def evaluation_prompts(count: int) -> list[str]:
    """`count` prompts balanced over colour x direction, with alternating shapes and speeds."""
    prompts = []
    for i in range(count):
        colour = tuple(COLOURS)[i % len(COLOURS)]
        lap = i // len(COLOURS)
        direction = tuple(DIRECTIONS)[lap % len(DIRECTIONS)]
        shape = SHAPES[(i + lap // len(DIRECTIONS)) % len(SHAPES)]
        speed = tuple(SPEEDS)[(i + lap) % len(SPEEDS)]
        prompts.append(caption_of(ToyAttributes(colour=colour, direction=direction, shape=shape, speed=speed)))
    return prompts


def measure_clip(video: Tensor) -> tuple[str | None, str | None]:
    """Colour and direction of motion of the foreground of a clip, measured from its pixels.

    The background is the median colour; the foreground weight grows with the distance from it. The colour is the
    palette entry closest in direction to the mean foreground minus the background (so a faded shape keeps its name);
    the motion is the slope of a least-squares line through the centroids of the foreground.

    Args:
        video: uint8 `[T, H, W, 3]`.

    Returns:
        (colour, direction), each None without a foreground or without motion.
    """
    pixels = video.detach().cpu().numpy().astype(np.float32)
    T, H, W, _ = pixels.shape
    # medians over a grid of about 64 x 64 points are as good and much faster
    step = max(min(H, W) // 64, 1)
    background = np.median(pixels[:, ::step, ::step].reshape(-1, 3), axis=0)
    difference = pixels - background
    distance = np.sqrt(np.einsum("thwc,thwc->thw", difference, difference))
    # the smallest shape covers 3% of a frame, so the top percentile lies inside the shape
    peak = float(np.percentile(distance[:, ::step, ::step], 99))
    if peak < _LEAST_CONTRAST:
        return None, None
    weight = np.maximum(distance - max(0.5 * peak, _LEAST_CONTRAST), 0)
    # [T, W], [T, H], [T]
    columns, rows = weight.sum(1), weight.sum(2)
    mass = rows.sum(1)

    offset = weight.reshape(-1) @ difference.reshape(-1, 3) / mass.sum()
    towards = np.array([*COLOURS.values()], dtype=np.float32) - background
    colour = [*COLOURS][np.argmax(towards @ offset / (np.linalg.norm(towards, axis=1) + 1e-6))]

    visible = mass > 0.05 * mass.max()
    if visible.sum() < 2:
        return colour, None
    time = np.arange(T, dtype=np.float64)[visible]
    x = columns[visible] @ (np.arange(W) + 0.5) / mass[visible] / W
    y = rows[visible] @ (np.arange(H) + 0.5) / mass[visible] / H
    span = max(T - 1, 1)
    move_x, move_y = float(np.polyfit(time, x, 1)[0]) * span, float(np.polyfit(time, y, 1)[0]) * span
    if max(abs(move_x), abs(move_y)) < _LEAST_MOTION:
        return colour, None
    if abs(move_x) >= abs(move_y):
        return colour, "right" if move_x > 0 else "left"
    return colour, "down" if move_y > 0 else "up"


def score_clip(video: Tensor, caption: str) -> dict[str, bool]:
    """Whether a clip shows the colour, the direction of motion and, where it names one, the shape of its caption.

    Args:
        video: uint8 `[T, H, W, 3]`.
        caption: a prompt that names one colour and one direction.

    Returns:
        {"colour": bool, "direction": bool, "shape": bool}, without the shape when the caption leaves it open; a random
        clip scores 1 in 6, 1 in 4 and 1 in 4.
    """
    expected = parse_prompt(caption)
    colour, direction = measure_clip(video)
    scores = {"colour": colour == expected.colour, "direction": direction == expected.direction}
    return scores if expected.shape is None else {**scores, "shape": measure_shape(video) == expected.shape}


def _stream(seed: int, index: int) -> Callable[[], float]:
    """Uniform numbers in [0, 1) that belong to one clip."""
    # only Random.random() keeps its stream across Python versions
    return random.Random(hash64(f"toy {seed} {index}")).random


def _attributes(draw: Callable[[], float]) -> ToyAttributes:
    return ToyAttributes(
        colour=_pick(tuple(COLOURS), draw()),
        direction=_pick(tuple(DIRECTIONS), draw()),
        shape=_pick(SHAPES, draw()),
        speed=_pick(tuple(SPEEDS), draw()),
    )


def _distance(shape: str, dx: np.ndarray, dy: np.ndarray, r: float) -> np.ndarray:
    """Signed distance to the outline in pixels, negative inside (a lower bound outside corners)."""
    if shape == "circle":
        return np.sqrt(dx**2 + dy**2) - r
    if shape == "square":
        return np.maximum(np.abs(dx), np.abs(dy)) - 0.9 * r
    if shape == "triangle":
        side = math.sqrt(0.75) * np.abs(dx) - 0.5 * dy
        return np.maximum(dy, side) - 0.65 * r
    bar, stem = np.maximum(np.abs(dx) / 1.15, np.abs(dy) / 0.4), np.maximum(np.abs(dx) / 0.4, np.abs(dy) / 1.15)
    return (np.minimum(bar, stem) - r) * 0.4


def _start(extent: int, travel: float, margin: float, u: float) -> float:
    """Initial centre from which `travel` keeps the shape inside; the middle if the frame is too narrow for that.

    Along the motion, the path is centred up to a tenth of the frame, so that the direction is visible in every frame;
    across it, the position is free.
    """
    low = margin + max(-travel, 0)
    high = extent - margin - max(travel, 0)
    room = max(high - low, 0) if travel == 0 else min(max(high - low, 0), 0.1 * extent)
    return (low + high) / 2 + (u - 0.5) * room


def _pick(names: tuple[str, ...], u: float) -> str:
    return names[int(u * len(names))]
