"""Pictures say what the numbers say: which pixels are tinted, which rows are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vsa.attention.layout import Segment, TileLayout
from vsa.training.figures import (
    KEY_COLOUR,
    QUERY_COLOUR,
    attention_overlay,
    attention_picture,
    contact_sheet,
    loss_curve,
    read_metric,
    selection_share,
    tile_map,
    varied_tiles,
)


def write_metrics(path: Path, rows: list[tuple]) -> Path:
    path.write_text(
        "\n".join([",".join(map(str, row)) for row in [("step", "train/loss", "val/loss", "lr"), *rows]]) + "\n"
    )
    return path


def is_png_with_ink(path: Path) -> bool:
    pixels = np.asarray(Image.open(path).convert("L"))
    return path.suffix == ".png" and pixels.std() > 1


def test_read_metric_leaves_out_empty_cells(tmp_path: Path):
    metrics = write_metrics(tmp_path / "metrics.csv", [(10, 2.0, "", 0.1), (20, "", 1.5, ""), (30, 1.0, "", 0.1)])
    steps, values = read_metric(metrics, "train/loss")
    assert steps.tolist() == [10, 30]
    assert values.tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match=r"metrics\.csv has no column loss, it has step, train/loss"):
        read_metric(metrics, "loss")
    write_metrics(metrics, [(10, "abc", "", "")])
    with pytest.raises(ValueError, match=r"metrics\.csv, column train/loss: .*abc"):
        read_metric(metrics, "train/loss")


@pytest.mark.parametrize(
    "rows",
    [[(s, 3 / s, 2 / s if s % 4 == 0 else "", 0.1) for s in range(1, 40)], [(1, 0.0, "", 0.1)], []],
    ids=["curve", "one zero row", "empty"],
)
def test_loss_curve_is_a_png(tmp_path: Path, rows):
    out = loss_curve(write_metrics(tmp_path / "metrics.csv", rows), tmp_path / "new" / "loss.png", title="run")
    assert is_png_with_ink(out)
    assert [p.name for p in out.parent.iterdir()] == ["loss.png"]


def test_contact_sheet(tmp_path: Path):
    videos = torch.randint(0, 256, (3, 5, 16, 24, 3), dtype=torch.uint8)
    prompts = ["a red circle moving left", "b" * 90, ""]
    assert is_png_with_ink(contact_sheet(videos, prompts, tmp_path / "sheet.png"))
    with pytest.raises(ValueError, match="2 prompts and 3 clips"):
        contact_sheet(videos, prompts[:2], tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()


@pytest.mark.parametrize("grid", [(4, 8, 8), (3, 5, 7)])
@pytest.mark.parametrize("order", ["nested", "raster"])
def test_tile_map_of_cubes_is_constant_on_each_cuboid(grid, order):
    tile = (2, 4, 4)
    layout = TileLayout.build([Segment(grid)], tile_thw=tile, partition="cube", block_order=order, device="cpu")
    tiles = tile_map(layout)
    assert tiles.shape == grid
    seen = set()
    for t in range(0, grid[0], tile[0]):
        for h in range(0, grid[1], tile[1]):
            for w in range(0, grid[2], tile[2]):
                cuboid = tiles[t : t + tile[0], h : h + tile[1], w : w + tile[2]].unique().tolist()
                assert len(cuboid) == 1
                seen.add(cuboid[0])
    assert seen == set(range(layout.num_blocks))


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
    picture = attention_overlay(video, tiles, share, query=3)
    inside = picture[:, 1:7, 9:15]  # tile 1 in frames 0 and 1
    assert torch.allclose(inside[:2], 0.75 * torch.tensor(KEY_COLOUR))
    assert (inside[2:] == 0).all()
    assert torch.allclose(picture[2:, 8:, :8], 0.375 * torch.tensor(KEY_COLOUR))
    outlined = (picture == torch.tensor(QUERY_COLOUR)).all(-1)
    assert outlined[:2, 8, 8:].all()
    assert outlined[:2, 8:, 15].all()
    assert not outlined[:2, 9:15, 9:15].any()
    assert not outlined[2:].any()
    assert (picture[:, 1:7, 1:7] == 0).all()


def test_varied_tiles_finds_what_moves():
    tiles = torch.arange(4)[:, None, None].expand(4, 2, 2) * 4 + torch.arange(4).view(1, 2, 2)
    video = torch.zeros(8, 16, 16, 3, dtype=torch.uint8)
    video[0:2, 2:4, 2:4] = 200  # tile 0
    video[2:4, 10:12, 2:4] = 250  # tile 4 + 2
    video[2:4, 10:12, 10:12] = 240  # tile 4 + 3, the same frames
    video[6:8, 2:4, 10:14] = 90  # tile 12 + 1
    assert varied_tiles(video, tiles, 3) == [0, 6, 13]
    assert varied_tiles(video, tiles, 5) == [0, 6, 7, 8, 13]


def test_attention_picture(tmp_path: Path):
    layout = TileLayout.build([Segment((4, 4, 4))], tile_thw=(2, 2, 2), device="cpu")
    video = torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8)
    indices = torch.stack([torch.arange(3).expand(8, 3), torch.arange(5, 8).expand(8, 3)]).int()
    counts = torch.full((2, 8), 3, dtype=torch.int32)
    out = attention_picture(video, layout, indices, counts, tmp_path / "tiles.png", title="layer 1")
    assert is_png_with_ink(out)
    with pytest.raises(ValueError, match=r"0\.\.7, got \[8\]"):
        attention_picture(video, layout, indices, counts, tmp_path / "bad.png", queries=[8])
    assert not (tmp_path / "bad.png").exists()
