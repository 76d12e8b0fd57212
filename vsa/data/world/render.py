"""Rendering of scenes by gathers and integer arithmetic only, so that every device and batch size gives equal bytes.

B clips, T frames, H W pixels, P size of an object's box.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vsa.data.world.scenes import OBJECTS, Scenes
from vsa.data.world.tables import WorldTables, world_tables

# number of pixels rendered at a time; each takes about 20 bytes of working memory
_CHUNK = 1 << 25
# marks the pixels of a box that an object covers, above the 24 bits of a colour
_COVERED = 1 << 24


@torch.no_grad()
def render(scenes: Scenes, size: tuple[int, int, int]) -> Tensor:
    """Render clips on the device of their scenes.

    Args:
        scenes: B clips.
        size: frames, height and width.

    Returns:
        uint8 `[B, T, H, W, 3]`.
    """
    T, H, W = size
    device = scenes.looks.device
    tables = world_tables(H, W, str(device))
    packed = torch.empty(len(scenes), T, H, W, dtype=torch.int32, device=device)
    some = max(_CHUNK // (T * H * W), 1)
    for first in range(0, len(scenes), some):
        part = slice(first, first + some)
        _draw(scenes[part], tables, packed[part])
    # the bytes of a packed pixel are R, G, B, 0
    return packed.view(torch.uint8).view(*packed.shape, 4)[..., :3]


def _draw(scenes: Scenes, tables: WorldTables, canvas: Tensor) -> None:
    """Render into a canvas, int32 `[B, T, H, W]`."""
    B, T, H, W = canvas.shape
    looks, paths = scenes.looks.long(), scenes.paths.long()
    pixels = torch.arange(max(H, W), device=canvas.device)
    _, rows, columns = tables.backgrounds.shape
    row = looks[:, None, :1] * rows + paths[..., 0:1] + pixels[:H]  # [B, T, H]
    column = paths[..., 1:2] + pixels[:W]  # [B, T, W]
    torch.take(tables.backgrounds, row[..., None] * columns + column[:, :, None], out=canvas)

    P = tables.textures.shape[-1]
    frame = torch.arange(B * T, device=canvas.device).view(B, T, 1, 1) * (H * W)
    box = frame + pixels[:P, None] * W + pixels[:P]  # [B, T, P, P]
    flat = canvas.view(-1)
    # the first object is in front
    for number in reversed(range(OBJECTS)):
        shape, size, colour, texture = looks[:, 1 + 4 * number : 5 + 4 * number].unbind(1)
        y, x = paths[..., 2 + 2 * number : 4 + 2 * number].unbind(-1)
        place = box + (y * W + x)[..., None, None]
        # within an object no pixel is written twice
        sprite = _sprite(tables, shape, size, colour, texture)[:, None]
        flat[place] = torch.where(sprite >= _COVERED, sprite - _COVERED, flat[place])


def _sprite(tables: WorldTables, shape: Tensor, size: Tensor, colour: Tensor, texture: Tensor) -> Tensor:
    """Packed pixels of a box, int32 `[B, P, P]`, marked where the object covers them."""
    paint = tables.colours[colour][:, :, None, None] * tables.textures[texture][:, None] >> 8  # [B, 3, P, P]
    red, green, blue = paint.unbind(1)
    return (red + (green << 8) + (blue << 16) + _COVERED) * tables.masks[shape, size]
