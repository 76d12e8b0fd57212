"""Default methods of a comparison: every kind, at sizes that fit the grid, and no row that says nothing."""

from __future__ import annotations

import math
import re

import pytest

from vsa.attention.layout import Segment
from vsa.config import config_folder
from vsa.evaluation.comparison.methods import parse_methods
from vsa.evaluation.comparison.usual import PRESETS, usual_methods, usual_on

LAYER = {"dim": 24, "num_heads": 1, "head_dim": 24, "layer_idx": 0}

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


@pytest.mark.parametrize("tile", [(4, 4, 4), (1, 2, 2), (1, 1, 3)], ids=str)
def test_the_usual_methods_are_every_kind(tile):
    methods = parse_methods(usual_methods((8, 16, 16), tile_thw=tile), tile_thw=tile)
    assert methods[0].label == "full"
    names = {method.label.partition(" ")[0] for method in methods}
    files = {path.stem for path in (config_folder() / "attention").glob("*.yaml")}
    assert names == (files | {"sliding_tile"}) - set(PRESETS)
    assert set(PRESETS) <= files
    said = (
        (config_folder().parent / "docs" / "reports.md")
        .read_text()
        .partition("Without `--method`")[2]
        .partition(", which")[0]
    )
    assert set(re.findall(r"`(\w+)`", said)) == set(PRESETS)
    budgets = {method.sparsity for method in methods if method.family == "staged stages=f score=oracle"}
    assert budgets == {0.5, 0.75, 0.875}
    labels = {method.label for method in methods}
    assert labels >= {"staged stages=l", "staged stages=c_l"}
    assert labels >= {f"staged stages={stages} sparsity=0.75" for stages in ("c_f_l", "c_fl")}
    assert "pooled_tail order=2 sparsity=0.75" in labels


def test_small_grids_have_small_blocks_and_no_row_twice():
    methods, notes = usual_on((2, 8, 8))
    labels = [method.label for method in methods]
    for name in ("dynamic_hilbert tokens=8 sub_tokens=2", "sparge q_tokens=8 kv_tokens=4", "fine_grained q_tokens=16"):
        assert any(label.startswith(name) for label in labels), name
    counts = {}
    for method in methods[1:]:
        layer = method.make(**LAYER)
        layout = layer.layout([Segment((2, 8, 8))])
        if layer.selects:
            counts.setdefault(method.family, []).append(method.kept(layout))
            assert counts[method.family][-1] < layout.num_video_tiles
        elif not method.predicts:
            assert layer.pairs(layout, 1) < 128**2
    assert counts["video_sparse"] == [2, 1]
    assert counts["dynamic_hilbert tokens=8 sub_tokens=2"] == [8, 4, 2]
    assert notes == [
        "left out on 2x8x8, where they compute all pairs or as many tiles as another row: strided_window, "
        "staged stages=l, staged stages=c_l, 6 rows of sparsity=0.875"
    ]
    # one tile, and of the groups one that is not whole
    few, notes = usual_on((1, 2, 2))
    assert "video_sparse" not in {method.family for method in few}
    assert [method.label for method in few][:3] == ["full", "spatial_temporal", "compressed_kv"]
    assert len(notes) == 1


@pytest.mark.parametrize("grid", [(14, 30, 53), (21, 45, 80)], ids=str)
def test_paper_shapes_have_published_blocks_and_windows(grid):
    methods, notes = usual_on(grid)
    assert notes == []
    assert {"dynamic_hilbert", "sparge tau", "fine_grained top_p"} <= {m.family.partition("=")[0] for m in methods}
    (sliding,) = (method for method in methods if method.label.startswith("sliding_tile"))
    window, tile = sliding.config["window_thw"], sliding.config["tile_thw"]
    assert tile == sliding.config["stride_thw"] == [4, 4, 4]
    assert all(side // 4 % 2 == 1 and side % 4 == 0 for side in window)
    assert 0.05 < math.prod(window) / math.prod(grid) < 0.1


def test_rows_with_text_leave_out_what_takes_none():
    methods, notes = usual_on((4, 8, 8), text_in_rows=True)
    assert methods
    assert all(method.make(**LAYER).takes_text for method in methods)
    others = {method.label for method in usual_on((4, 8, 8))[0]} - {method.label for method in methods}
    start, _, named = notes[-1].partition(": ")
    assert start == "left out, since they take rows of one video and these hold text"
    assert others <= set(named.split(", "))
    assert "spatial_temporal" in others
    assert "video_sparse" not in others
