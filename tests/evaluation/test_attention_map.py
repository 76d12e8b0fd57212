"""Pictures of the selection say what was recorded: which pixels are tinted, which tiles are looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vsa.attention.layout import Segment, TileLayout
from vsa.data.codecs import HaarCodec
from vsa.evaluation.attention_map import (
    KEY_COLOUR,
    QUERY_COLOUR,
    attention_overlay,
    attention_picture,
    selection_share,
    tile_map,
    token_times,
    varied_tiles,
)


@pytest.mark.parametrize("grid", [(4, 8, 8), (3, 5, 7)])
@pytest.mark.parametrize("order", ["nested", "raster"])
def test_tile_map_of_cubes_is_constant_on_each_cuboid(grid, order):
    tile = (2, 4, 4)
    layout = TileLayout.build([Segment(grid)], tile_thw=tile, partition="cube", block_order=order, device="cpu")
    tiles = tile_map(layout)
    assert tiles.shape == grid
    numbers = set()
    for t in range(0, grid[0], tile[0]):
        for h in range(0, grid[1], tile[1]):
            for w in range(0, grid[2], tile[2]):
                cuboid = tiles[t : t + tile[0], h : h + tile[1], w : w + tile[2]].unique().tolist()
                assert len(cuboid) == 1
                numbers.add(cuboid[0])
    assert numbers == set(range(layout.num_blocks))


def test_tile_map_refuses_rows_of_several_segments():
    segments = [Segment((2, 4, 4)), Segment((1, 1, 6), kind="text")]
    with pytest.raises(ValueError, match=r"\['video', 'text'\]"):
        tile_map(TileLayout.build(segments, tile_thw=(2, 4, 4), device="cpu"))


def test_selection_share_counts_heads_and_never_reads_past_the_count():
    indices = torch.tensor([[[0, 2, 99]], [[1, 2, 3]]], dtype=torch.int32)
    counts = torch.tensor([[2], [3]], dtype=torch.int32)
    assert selection_share(indices, counts, 4).tolist() == [[0.5, 0.5, 1.0, 0.5]]


def test_overlay_tints_exactly_the_selected_tiles_and_outlines_the_query():
    # tokens 2 x 2 x 2 over 4 frames of 16 x 16: tile n covers frames, rows and columns of 2, 8 and 8
    tiles = torch.arange(8).view(2, 2, 2)
    video = torch.zeros(4, 16, 16, 3, dtype=torch.uint8)
    share = torch.tensor([0, 1.0, 0, 0, 0, 0, 0.5, 0])
    picture = attention_overlay(video, tiles, share, tiles == 3, times=[0, 0, 1, 1])
    inside = picture[:, 1:7, 9:15]  # tile 1 in frames 0 and 1
    assert torch.allclose(inside[:2], 0.75 * torch.tensor(KEY_COLOUR))
    assert (inside[2:] == 0).all()
    assert torch.allclose(picture[2:, 8:, :8], 0.375 * torch.tensor(KEY_COLOUR))
    outline = (picture == torch.tensor(QUERY_COLOUR)).all(-1)
    assert outline[:2, 8, 8:].all()
    assert outline[:2, 8:, 15].all()
    assert not outline[:2, 9:15, 9:15].any()
    assert not outline[2:].any()
    assert (picture[:, 1:7, 1:7] == 0).all()


class CausalCodec:
    """One frame in the first cell and 4 in the others, as Wan's VAE."""

    stride = (4, 8, 8)

    def frames_that_fit(self, frames):
        return frames - (frames - 1) % 4

    def latent_shape(self, frames, height, width):
        return 16, 1 + (frames - 1) // 4, height // 8, width // 8


def test_frames_belong_to_the_tokens_that_the_codec_puts_them_in():
    assert token_times(HaarCodec(), 12, 1) == [0] * 4 + [1] * 4 + [2] * 4
    assert token_times(HaarCodec(), 12, 2) == [0] * 8 + [1] * 4
    assert token_times(HaarCodec(), 1, 1) == [0]
    assert token_times(CausalCodec(), 9, 1) == [0] + [1] * 4 + [2] * 4


def test_varied_tiles_finds_what_moves():
    tiles = torch.arange(4)[:, None, None].expand(4, 2, 2) * 4 + torch.arange(4).view(1, 2, 2)
    video = torch.zeros(8, 16, 16, 3, dtype=torch.uint8)
    video[0:2, 2:4, 2:4] = 200  # tile 0
    video[2:4, 10:12, 2:4] = 250  # tile 4 + 2
    video[2:4, 10:12, 10:12] = 240  # tile 4 + 3, the same frames
    video[6:8, 2:4, 10:14] = 90  # tile 12 + 1
    times = [0, 0, 1, 1, 2, 2, 3, 3]
    assert varied_tiles(video, tiles, times, 3) == [0, 6, 13]
    assert varied_tiles(video, tiles, times, 5) == [0, 6, 7, 8, 13]


def test_attention_picture(tmp_path: Path):
    layout = TileLayout.build([Segment((4, 4, 4))], tile_thw=(2, 2, 2), device="cpu")
    video = torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8)
    indices = torch.stack([torch.arange(3).expand(8, 3), torch.arange(5, 8).expand(8, 3)]).int()
    counts = torch.full((2, 8), 3, dtype=torch.int32)
    times = [0, 0, 1, 1, 2, 2, 3, 3]
    out = attention_picture(video, layout, indices, counts, tmp_path / "tiles.png", times=times, title="layer 1")
    # both tints are on it: the selected tiles, and the outline of the query
    pixels = np.asarray(Image.open(out).convert("RGB")).astype(int)
    for colour in (KEY_COLOUR, QUERY_COLOUR):
        assert (np.abs(pixels - 255 * np.array(colour)) < 3).all(-1).sum() > 100
