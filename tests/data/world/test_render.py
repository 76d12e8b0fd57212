from __future__ import annotations

import hashlib
import importlib.util

import matplotlib.path
import numpy as np
import pytest
import torch

from vsa.data.world import render as renderer
from vsa.data.world import tables
from vsa.data.world.render import render
from vsa.data.world.scenes import COLOURS, SHAPES, TEXTURES, Scenes, box_size, draw_scene, stack_scenes
from vsa.data.world.tables import OUTLINES, PHOTOGRAPHS, SHEET, photograph, world_tables

SIZE = (8, 48, 64)
DIGESTS = {(8, 48, 64): "3cea72cd334fcd77", (8, 128, 128): "607523e2b6814213"}
SCENES = stack_scenes([draw_scene(0, i, SIZE) for i in range(6)])


def covered(shape: str, size: int, x: float, y: float, box: int) -> bool:
    """Whether a shape covers a point of its box, by another library's polygons."""
    # the shape fills a square of (13 + size) sixteenths in the middle of the box
    side = box * (13 + size) / 16
    x, y = ((v - (box - side) / 2) * SHEET / side for v in (x, y))
    if shape == "circle":
        return (x - SHEET / 2) ** 2 + (y - SHEET / 2) ** 2 <= 29**2
    rings = [matplotlib.path.Path([*ring, ring[0]]).contains_point((x, y)) for ring in OUTLINES[shape]]
    return sum(rings) % 2 == 1


def shade(texture: int, i: int, j: int, box: int) -> int:
    period = max(box // 3, 2)
    rows, columns, slant = (2 * (n % period) < period for n in (i, j, i + j))
    return 176 if (False, rows, slant, rows != columns)[texture] else 256


def drawn_by_hand(scene: Scenes, size: tuple[int, int, int]) -> np.ndarray:
    """A clip pixel by pixel, back to front."""
    T, H, W = size
    box = box_size(H, W)
    photo, *objects = scene.looks[0].tolist()
    picture = world_tables(H, W).backgrounds[photo].numpy()
    video = np.zeros((T, H, W, 3), dtype=np.uint8)
    for t in range(T):
        (y0, x0), *corners = scene.paths[0, t].view(-1, 2).tolist()
        for y in range(H):
            for x in range(W):
                pixel = int(picture[y0 + y, x0 + x])
                video[t, y, x] = pixel & 255, pixel >> 8 & 255, pixel >> 16
        for n in (2, 1, 0):
            shape, scale, colour, texture = objects[4 * n : 4 * n + 4]
            if shape == len(SHAPES):
                continue
            for i in range(box):
                for j in range(box):
                    if covered(SHAPES[shape], scale, j + 0.5, i + 0.5, box):
                        paint = [c * shade(texture, i, j, box) // 256 for c in list(COLOURS.values())[colour]]
                        video[t, corners[n][0] + i, corners[n][1] + j] = paint
    return video


def test_clips_are_what_another_renderer_draws() -> None:
    size = (2, 48, 64)
    for index in range(4):
        scene = draw_scene(0, index, size)
        video, expected = render(scene, size)[0].numpy(), drawn_by_hand(scene, size)
        # centres of pixels that lie on an outline belong to either side
        assert (video != expected).any(-1).mean() < 0.002
        # the control: an object that is one pixel away
        scene.paths[:, :, 2] += 1 if int(scene.paths[..., 2].max()) < 48 - box_size(*size[1:]) else -1
        assert (render(scene, size)[0].numpy() != expected).any(-1).mean() > 0.005


def test_a_batch_is_its_clips_one_by_one_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    videos = render(SCENES, SIZE)
    assert videos.shape == (6, *SIZE, 3)
    assert videos.dtype == torch.uint8
    for i in range(6):
        assert torch.equal(render(draw_scene(0, i, SIZE), SIZE)[0], videos[i])
    for pixels in (1, 4 * 8 * 48 * 64, 5 * 8 * 48 * 64 - 1):
        monkeypatch.setattr(renderer, "_CHUNK", pixels)
        assert torch.equal(render(SCENES, SIZE), videos)
    assert len({v.numpy().tobytes() for v in videos}) == 6


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bytes() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert torch.equal(render(SCENES.to("cuda"), SIZE).cpu(), render(SCENES, SIZE))


def test_the_world_is_the_published_one() -> None:
    """Digests of clips: whoever changes them makes another world, whose losses cannot be compared with this one's."""
    for size, digest in DIGESTS.items():
        videos = render(stack_scenes([draw_scene(0, i, size) for i in range(3)]), size)
        assert hashlib.sha256(videos.numpy().tobytes()).hexdigest()[:16] == digest


def test_objects_stand_out_from_every_background() -> None:
    lookup = world_tables(48, 64)
    backgrounds = torch.stack([lookup.backgrounds & 255, lookup.backgrounds >> 8 & 255, lookup.backgrounds >> 16], -1)
    assert backgrounds.shape == (14, 72, 96, 3)
    # no photograph is flat, and a mirror image is one
    assert all(b.float().std() > 3 for b in backgrounds)
    assert torch.equal(backgrounds[0].flip(1), backgrounds[1])
    brightest, darkest = backgrounds.amax(-1).max(), min(max(rgb) for rgb in COLOURS.values()) * 176 // 256
    assert brightest < darkest


def test_shapes_are_all_different_at_the_resolution_of_the_codec() -> None:
    """Luma has cells of 4 x 4 pixels: at 128 pixels a box is 12 x 12 of them."""
    masks = world_tables(128, 128).masks[: len(SHAPES), 0].float()
    assert masks.shape == (8, 48, 48)
    coarse = torch.nn.functional.avg_pool2d(masks[:, None], 4).flatten(1)
    assert torch.pdist(coarse).min() > 0.25 * coarse.norm(dim=1).mean()
    assert world_tables(128, 128).masks[-1].sum() == 0
    shares = world_tables(128, 128).masks[: len(SHAPES)].float().mean((2, 3))
    assert (shares > 0.17).all()
    assert len({tuple(t.flatten().tolist()) for t in world_tables(128, 128).textures}) == TEXTURES


def test_photographs_are_read_without_the_package_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "skimage", None)
    monkeypatch.delitem(sys.modules, "skimage")
    assert all(photograph(name).shape[2] == 3 for name in PHOTOGRAPHS)
    assert "skimage" not in sys.modules
    monkeypatch.setitem(tables.PHOTOGRAPHS, "coffee", "0" * 64)
    with pytest.raises(
        ValueError, match=r"coffee.png is not the photograph .*: expected SHA-256 000000000000, got cc02"
    ):
        photograph("coffee")
    monkeypatch.setitem(tables.PHOTOGRAPHS, "tea", "0" * 64)
    with pytest.raises(ValueError, match=r"got no file"):
        photograph("tea")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'vsa-train\[world\]'"):
        photograph("grass")
