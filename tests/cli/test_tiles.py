"""`vsa tiles`: what fills a grid."""

from __future__ import annotations

import pytest

from vsa.attention.layout import Segment, TileLayout
from vsa.attention.tile_table import tile_rows


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
@pytest.mark.parametrize("grid", [(21, 30, 52), (5, 9, 10)], ids=str)
def test_rows_are_those_of_layouts(grid):
    rows = tile_rows(grid, 64, 0.875, 6)
    assert [row.partition for row in rows] == ["cube", "hilbert_run"] + ["cube"] * 6
    assert [row.tile_thw for row in rows[:2]] == [(4, 4, 4)] * 2
    for row in rows:
        layout = TileLayout.build([Segment(grid)], tile_thw=row.tile_thw, partition=row.partition)
        assert row.tiles == layout.num_blocks
        assert row.topk == -(-row.tiles // 8)
        # blocks of 64 slots, whatever they hold
        assert row.fill == pytest.approx(layout.num_tokens / (row.tiles * 64))
        assert row.executed == pytest.approx(row.pairs / row.fill**2)
    assert rows[2].tiles < rows[0].tiles


def test_the_first_column_is_what_a_run_takes(command_line, training):
    status, out, err = command_line("tiles", "2", "4", "4", "--volume", "4", "--sparsity", "0.5", "--proposals", "2")
    assert (status, err) == (0, "")
    head, titles, *rows = out.splitlines()
    assert "32 tokens" in head
    assert titles.split() == ["options", "tiles", "fill", "top-k", "pairs", "executed"]
    assert rows[0].split() == ["tile_thw=[1,2,2]", "8", "100.0%", "4", "50.00%", "50.00%"]
    options = [word for word in rows[1].split() if "=" in word]
    assert options == ["tile_thw=[1,2,2]", "attention.partition=hilbert_run"]
    training("~attention.tile_thw", *options, "attention=staged", "trainer.max_steps=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0", "4", "4"], "sizes must be at least 1, got grid [0, 4, 4]"),
        (["2", "4", "4", "--sparsity", "1"], "sparsity must be in [0, 1), got 1"),
    ],
)
def test_bad_input(command_line, arguments, message):
    status, _, err = command_line("tiles", *arguments)
    assert status == 1
    assert message in err
