"""Fixed local window of tiles around each query tile. Nq / Nkv query / kv tiles."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vsa.attention.layout import TileLayout
from vsa.attention.pooling import token_places
from vsa.attention.scores import tiles_inside
from vsa.attention.tiling import Grid, chain_of

Edge = Literal["clamp", "truncate"]


class Window(NamedTuple):
    """The windows of all query tiles.

    Args:
        tiles: bool `[Nq, Nkv]`, True where a kv tile is inside the window of a query tile.
        largest: largest number of kv tiles in a window.
    """

    tiles: Tensor
    largest: int


def tile_window(layout: TileLayout, window_thw: Grid, edge: Edge) -> Window:
    """Window of kv tiles around each query tile, for a row of one video in cuboid tiles; for `TileLayout.derive`.

    Args:
        layout: the layout; where its query and kv tiles differ in size, the window counts the larger ones.
        window_thw: tiles of the window along time, height, width.
        edge: clamp (the window is shifted inside the grid and always whole) or truncate (the part outside is missing).
    """
    layout.only_video("a window of tiles")
    q_tile, kv_tile = layout.tile_thw, layout.kv_tile_thw
    assert q_tile is not None
    assert kv_tile is not None
    large = chain_of((q_tile, kv_tile))[0]
    first = token_places(layout)[layout.tiles[large].offsets[:-1].long().cpu()]
    # [N, 3]
    places = first // torch.tensor(large)
    counts = places.amax(0) + 1
    size = torch.minimum(torch.tensor(window_thw), counts) if edge == "clamp" else torch.tensor(window_thw)
    start = places - torch.tensor(window_thw) // 2
    if edge == "clamp":
        start = start.clamp(min=torch.zeros_like(counts), max=counts - size)
    inside = (places[None] >= start[:, None]) & (places[None] < (start + size)[:, None])
    tiles = inside.all(-1)
    for dim, tile in enumerate((q_tile, kv_tile)):
        tiles = tiles.repeat_interleave(tiles_inside(layout, tile, large).sizes.cpu(), dim=dim)
    return Window(tiles.to(layout.device), int(tiles.sum(1).max()))
