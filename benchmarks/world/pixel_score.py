"""Score of world clips from their pixels: colours, shapes and motions of objects, drift of the camera.

Objects are distinguished from the background and from each other by their colour. The shape is the mask of the world
that fits an object best in the frames where most of it is visible, without pixels that other objects cover. The motion
is the straight or round path that fits the positions of this mask best, relative to the drift of the background.
T frames, H W pixels, P size of an object's box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.data.world.scenes import (
    CAMERA,
    COLOURS,
    MOTIONS,
    SHAPES,
    STEPS,
    TURNS,
    box_size,
    parse_caption,
)
from vsa.data.world.tables import object_masks

ATTRIBUTES = ("colour", "shape", "motion", "camera", "all")
"""Scored attributes: colour, shape and motion of each object; the camera, and all together, once per clip."""

# shorter side, in pixels, to which clips are scaled
_SIDE = 128
# objects are brighter and more colourful than any background
_LEAST_LIGHT, _LEAST_CHROMA = 120.0, 60.0
# smallest share of a box that the colour of an object covers, without its rim
_LEAST_COVER = 0.05
# smallest intersection over union of an object with the mask of its shape
_LEAST_FIT = 0.5
# number of frames that determine the shape
_BEST_FRAMES = 6
# smallest motions of objects and camera as shares of the frame; those of the world are twice as large
_LEAST_TRAVEL, _LEAST_RADIUS, _LEAST_DRIFT = 0.12, 0.07, 0.04
# smallest share of an object's motion that its path has to explain
_LEAST_EXPLAINED = 0.7


@dataclass(frozen=True, kw_only=True)
class SeenObject:
    """An object of one colour; shape or motion is None if it cannot be determined."""

    shape: str | None
    motion: str | None


def score_clip(video: Tensor, caption: str) -> dict[str, list[bool]]:
    """Score of a clip: whether it shows the attributes that its caption names.

    With n objects in the caption, a colour is right if it is among the n most visible ones; a shape or a motion is
    right if it is that of the object of the named colour.

    Args:
        video: uint8 `[T, H, W, 3]`.
        caption: caption of `vsa.data.world.scenes.world_caption`.

    Returns:
        One value per object by attribute, and a single one for `camera` and `all`.
    """
    scene = parse_caption(caption)
    by_colour, camera = measure_clip(video, len(scene.objects))
    pairs = [(expected, by_colour.get(expected.colour)) for expected in scene.objects]
    scores = {
        "colour": [actual is not None for _, actual in pairs],
        "shape": [actual is not None and actual.shape == expected.shape for expected, actual in pairs],
        "motion": [actual is not None and actual.motion == expected.motion for expected, actual in pairs],
        "camera": [camera == scene.camera],
    }
    return {**scores, "all": [all(value for values in scores.values() for value in values)]}


def score_clips(
    videos: Tensor | Sequence[Tensor], captions: Sequence[str], device: torch.device | str | None = None
) -> dict[str, float]:
    """Share of right values of each attribute over the clips, measured on `device` (default: where they are)."""
    rows = [
        score_clip(video.to(device or video.device), caption) for video, caption in zip(videos, captions, strict=True)
    ]
    values = {name: [value for row in rows for value in row[name]] for name in ATTRIBUTES}
    return {name: sum(right) / len(right) for name, right in values.items()}


def chance(captions: Sequence[str]) -> dict[str, float]:
    """Chance level: expected scores of clips that belong to other captions with as many objects."""
    counts = [len(parse_caption(caption).objects) for caption in captions]
    # averaged over objects, so that clips of three objects have more weight
    colour = sum(n * n for n in counts) / sum(counts) / len(COLOURS)
    return {
        "colour": colour,
        "shape": colour / len(SHAPES),
        "motion": colour / len(MOTIONS),
        "camera": 1 / len(CAMERA),
        "all": sum((n / len(COLOURS) / len(SHAPES) / len(MOTIONS)) ** n for n in counts) / len(counts) / len(CAMERA),
    }


def measure_clip(video: Tensor, objects: int) -> tuple[Mapping[str, SeenObject], str]:
    """The most visible objects of a clip by colour, and the motion of the camera.

    Args:
        video: uint8 `[T, H, W, 3]`.
        objects: number of objects.
    """
    pixels = _smaller(video)
    labels = _labels(pixels)  # [T, H, W]
    T, H, W = labels.shape
    box = box_size(H, W)
    drift = _drift(pixels, labels)
    cover = _inner_area(labels) / box**2  # [colours]
    visible = [c for c in cover.argsort(descending=True)[:objects].tolist() if cover[c] >= _LEAST_COVER]
    objects_by_colour = {}
    for colour in visible:
        shape, places = _follow(labels, colour, box)
        motion = None
        if places is not None:
            motion = _motion(places.cpu() + drift * (torch.arange(T) / max(T - 1, 1))[:, None], H, W)
        objects_by_colour[list(COLOURS)[colour]] = SeenObject(shape=shape, motion=motion)
    return objects_by_colour, _direction(drift, H, W, _LEAST_DRIFT) or "still"


def _smaller(video: Tensor) -> Tensor:
    """float32 `[T, 3, H, W]` at about `_SIDE` pixels."""
    pixels = video.detach().permute(0, 3, 1, 2).float()
    return F.avg_pool2d(pixels, max(min(pixels.shape[2:]) // _SIDE, 1))


def _labels(pixels: Tensor) -> Tensor:
    """int64 `[T, H, W]` number of the colour of each pixel, -1 in the background."""
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32, device=pixels.device)
    chroma = pixels - pixels.mean(1, keepdim=True)
    axes = F.normalize(palette - palette.mean(1, keepdim=True), dim=1)
    nearest = torch.einsum("tchw,kc->tkhw", chroma, axes).argmax(1)
    light = pixels.amax(1)
    stands_out = (light >= _LEAST_LIGHT) & (light - pixels.amin(1) >= _LEAST_CHROMA)
    return torch.where(stands_out, nearest, -1)


def _inner_area(labels: Tensor) -> Tensor:
    """float32 `[colours]`: most pixels in a frame that have a colour with their four neighbours."""
    inner = labels[:, 1:-1, 1:-1]
    # rims between two objects have colours of neither
    same = inner >= 0
    for shifted in (labels[:, :-2, 1:-1], labels[:, 2:, 1:-1], labels[:, 1:-1, :-2], labels[:, 1:-1, 2:]):
        same &= inner == shifted
    frames = [torch.bincount(frame[there], minlength=len(COLOURS)) for frame, there in zip(inner, same, strict=True)]
    return torch.stack(frames).amax(0).float()


def _follow(labels: Tensor, colour: int, box: int) -> tuple[str | None, Tensor | None]:
    """Shape of the object of a colour, and x, y of its box in each frame, float32 `[T, 2]` (NaN where it is hidden)."""
    own = labels == colour
    # pixels that say whether the object is there
    open_ = own | (labels < 0)
    area = own.sum((1, 2))
    clear = area >= 0.3 * area.max()
    best = area.argsort(descending=True)[:_BEST_FRAMES]
    masks = object_masks(box).to(labels.device)  # [shapes, sizes, P, P]
    # every second place is near enough to tell shapes apart
    fits, _ = _fit(own[best], open_[best], masks.flatten(0, 1), stride=2)
    fits = fits.mean(0).view(masks.shape[:2])
    shape, size = divmod(int(fits.argmax()), masks.shape[1])
    if fits.max() < _LEAST_FIT:
        return None, None
    _, places = _fit(own, open_, masks[shape, size][None])
    return SHAPES[shape], torch.where(clear[:, None], places[:, 0], torch.nan)


def _fit(own: Tensor, open_: Tensor, masks: Tensor, *, stride: int = 1) -> tuple[Tensor, Tensor]:
    """How well masks fit an object, each at its best place near the middle of what is seen.

    Args:
        own: bool `[N, H, W]`, the object.
        open_: bool `[N, H, W]`, where no other object is.
        masks: float32 `[M, P, P]`.
        stride: pixels between the places that are tried.

    Returns:
        float32 `[N, M]` intersection over union, and float32 `[N, M, 2]` x, y of the mask's corner.
    """
    N, H, W = own.shape
    P = masks.shape[-1]
    reach = P // 3
    weight = own.float()
    mass = weight.sum((1, 2)).clamp(min=1)
    x = (weight.sum(1) * torch.arange(W, device=own.device)).sum(1) / mass
    y = (weight.sum(2) * torch.arange(H, device=own.device)).sum(1) / mass
    # corners of the windows that are searched, in the padded picture
    pad = P // 2 + reach
    windows = []
    for i, (left, top) in enumerate(zip(x.int().tolist(), y.int().tolist(), strict=True)):
        both = F.pad(torch.stack([weight[i], open_[i].float()]), (pad,) * 4)
        windows.append(both[:, top : top + P + 2 * reach, left : left + P + 2 * reach])
    crops = torch.stack(windows)  # [N, 2, P + 2 reach, P + 2 reach]
    hits = F.conv2d(crops.flatten(0, 1)[:, None], masks[:, None], stride=stride).unflatten(0, (N, 2))  # [N, 2, M, S, S]
    inside, union = hits[:, 0], hits[:, 1] + crops[:, :1].sum((2, 3), keepdim=True) - hits[:, 0]
    fit, place = (inside / union.clamp(min=1)).flatten(2).max(2)  # [N, M]
    down, right = place // hits.shape[-1] * stride, place % hits.shape[-1] * stride
    return fit, torch.stack([x.long()[:, None] - pad + right, y.long()[:, None] - pad + down], -1).float()


def _drift(pixels: Tensor, labels: Tensor) -> Tensor:
    """float32 `[2]`: x, y that the camera moves by over the whole clip."""
    T, _, H, W = pixels.shape
    apart = T // 2
    if apart == 0:
        return torch.zeros(2)
    luma = (pixels * pixels.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1)
    starts = list(range(0, T - apart, max((T - apart) // 4, 1)))[:4]
    pairs = [(luma[[i, i + apart]], _background(labels[[i, i + apart]])) for i in starts]
    most_x, most_y = W * 12 // 100, H * 12 // 100
    steps = [(x, 0) for x in range(-most_x, most_x + 1)] + [(0, y) for y in range(-most_y, most_y + 1) if y]
    likeness = [sum(_likeness(frames, background, x, y) for frames, background in pairs) for x, y in steps]
    x, y = steps[int(np.argmax(likeness))]
    return torch.tensor([x, y], dtype=torch.float32) * (max(T - 1, 1) / apart)


def _background(labels: Tensor) -> Tensor:
    """bool `[N, H, W]`: neither objects nor the rim that a codec blurs around them."""
    objects = (labels >= 0).float()
    wide = F.max_pool2d(objects, (1, 9), stride=1, padding=(0, 4))
    return F.max_pool2d(wide, (9, 1), stride=1, padding=(4, 0)) == 0


def _likeness(two: Tensor, background: Tensor, x: int, y: int) -> float:
    """Correlation of the backgrounds of two frames when the camera has moved by x, y in between."""
    _, H, W = two.shape
    first = (slice(max(y, 0), H + min(y, 0)), slice(max(x, 0), W + min(x, 0)))
    second = (slice(max(-y, 0), H + min(-y, 0)), slice(max(-x, 0), W + min(-x, 0)))
    both = background[0][first] & background[1][second]
    if both.sum() < 16:
        return -1.0
    a, b = two[0][first][both], two[1][second][both]
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-6))


def _motion(places: Tensor, height: int, width: int) -> str | None:
    """The motion that explains places in the world, float32 `[T, 2]` x, y (NaN where unknown); None: no motion does."""
    T = len(places)
    visible = ~places[:, 0].isnan()
    if visible.sum() < max(T // 4, 4):
        return None
    xy = places[visible].double()
    time = torch.arange(T, dtype=torch.float64)[visible]
    spread = float((xy - xy.mean(0)).square().sum())
    if spread == 0:
        return None
    line = time / max(T - 1, 1)
    angle = 2 * torch.pi * time / T
    nought, one = torch.zeros_like(time), torch.ones_like(time)
    # columns of the x and of the y coordinate: where a path lies, and how it moves
    paths = {
        "x": ([line], [nought]),
        "y": ([nought], [line]),
        **{
            name: ([angle.cos(), -turn * angle.sin()], [turn * angle.sin(), angle.cos()])
            for name, turn in TURNS.items()
        },
    }
    fits = {}
    for name, (xs, ys) in paths.items():
        columns = torch.cat([torch.stack([one, nought, *xs], 1), torch.stack([nought, one, *ys], 1)])
        target = torch.cat([xy[:, 0], xy[:, 1]])
        weights = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
        fits[name] = (float((columns @ weights - target).square().sum()), weights[2:])
    name = min(fits, key=lambda key: fits[key][0])
    rest, how = fits[name]
    if rest > (1 - _LEAST_EXPLAINED) * spread:
        return None
    if name in TURNS:
        return name if float(how.norm()) >= _LEAST_RADIUS * min(height, width) else None
    move = torch.tensor([float(how[0]), 0.0] if name == "x" else [0.0, float(how[0])])
    return _direction(move, height, width, _LEAST_TRAVEL)


def _direction(move: Tensor, height: int, width: int, least: float) -> str | None:
    """Name of a motion along an axis, None where it is shorter than a share of the picture."""
    share = move / torch.tensor([width, height])
    axis = int(share.abs().argmax())
    if abs(share[axis]) < least:
        return None
    step = [0, 0]
    step[axis] = 1 if share[axis] > 0 else -1
    return next(name for name, direction in STEPS.items() if list(direction) == step)
