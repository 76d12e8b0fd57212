"""`vsa simulate`: a row a stride."""

from __future__ import annotations

import pytest

SETTING = ("30", "48", "80", "--window", "18", "24", "24")
TILES = ("--q-tile", "4", "8", "8", "--kv-tile", "2", "8", "8")
END = ("--attention-share", "0.607", "--steps", "50", "--dense-steps", "15")


@pytest.fixture
def rows(command_line, monkeypatch):
    """`rows(*arguments)`: first line, cells of the rows, and the lines below the table."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        status, out, err = command_line("simulate", *arguments)
        assert (status, err) == (0, "")
        lines = out.splitlines()
        (rule,) = (place for place, line in enumerate(lines) if line.startswith(" ──"))
        cells = [line.split() for line in lines[rule + 1 :] if line.startswith(" ") and line.strip()]
        return lines[0], cells, [line for line in lines[1:] if line[:1].isalnum()]

    return run


def test_one_stride_with_its_bound(rows):
    head, cells, below = rows(*SETTING, *TILES, "--stride", "1", "8", "8", *END, "--paper-rounding")
    assert "115200 tokens, window 18x24x24, query tile 4x8x8, kv tile 2x8x8, static kv tiles" in head
    assert cells == [["1x8x8", "99", "87.8", "900", "9.09x", "10.26x", "11.11x", "some", "1.61x"]]
    assert below == []


def test_a_sweep(rows):
    _, cells, below = rows(*SETTING, *TILES, "--sweep")
    assert cells[0][:5] == ["1x1x1", "275", "171.6", "900", "3.27x"]
    assert cells[-1] == ["16x8x8", "81", "81.0", "900", "11.11x", "11.11x", "11.11x", "none"]
    assert below == [f"{len(cells)} of 10368 strides: each other one is coarser than one here and no faster"]


def test_no_heading_or_number_is_cut_at_80_columns(rows, command_line, monkeypatch):
    wide = rows(*SETTING, *TILES, "--sweep", *END)[1]
    monkeypatch.setenv("COLUMNS", "80")
    assert rows(*SETTING, *TILES, "--sweep", *END)[1] == wide
    status, out, _ = command_line("simulate", *SETTING, *TILES, *END)
    assert status == 0
    table = out.splitlines()[1:]
    assert max(map(len, table)) <= 80
    assert "…" not in out
    words = " ".join(table[:4]).split()
    assert {"stride", "speed-up", "FLOPs", "mask", "end"} <= set(words)


def test_tilings_and_windows_reach_the_simulator(rows):
    head, cells, _ = rows(*SETTING, *TILES, "--one-d")
    assert "runs of 256 query and 128 kv tokens" in head
    assert cells[0][4] == "2.94x"
    assert rows(*SETTING, *TILES, "--tiling", "dynamic")[1][0][4] == "5.11x"
    small = ("1", "1", "12", "--window", "1", "1", "4", "--kv-tile", "1", "1", "2")
    # worst and mean of 6 tiles
    assert rows(*small)[1][0][1:3] == ["3", "2.7"]
    assert rows(*small, "--dilation", "1", "1", "3")[1][0][1:3] == ["6", "6.0"]
    assert rows(*small, "--causal", "0", "0", "1")[1][0][1:3] == ["3", "2.5"]


def test_without_tiles_the_best_one(rows):
    assert "query tile 2x4x8, kv tile 2x4x8" in rows(*SETTING, "--stride", "16", "8", "8")[0]
    assert "query tile 4x8x8, kv tile 4x8x8" in rows(*SETTING, "--q-tile", "4", "8", "8")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("30", "48", "80", "--window", "18", "24", "81"), "window of width must be at most its 80 tokens, got 81"),
        ((*SETTING, "--stride", "1", "25", "1"), "stride of height must be at most its window 24, got 25"),
        (
            (*SETTING, "--dilation", "2", "1", "1"),
            "dilation 2 of time does not fit: window 18 * 2 is above its 30 tokens",
        ),
        ((*SETTING, *TILES[:-2], "0", "8"), "kv_tile of height must be at least 1, got 0"),
        (
            (*SETTING, "--stride", "1", "8", "8", "--sweep"),
            "expected one of --sweep and --stride, got both (--stride 1 8 8)",
        ),
        ((*SETTING, "--dense-steps", "15"), "need an --attention-share"),
        ((*SETTING, *END[:3], "10", *END[4:]), "got 15 of 10"),
        ((*SETTING, *END[:2], "--steps", "0"), "steps at least 1, got 0 of 0"),
    ],
)
def test_bad_input(command_line, arguments, message):
    status, _, err = command_line("simulate", *arguments)
    assert status == 1
    assert message in err


def test_bounds_are_refused_before_a_sweep(command_line, monkeypatch):
    def sweep(*_, **__):
        raise AssertionError("a sweep was begun")

    monkeypatch.setattr("vsa.attention.neighborhood.simulation_table.sweep_strides", sweep)
    status, _, err = command_line("simulate", *SETTING, "--sweep", "--attention-share", "1.5")
    assert status == 1
    assert "attention_share must be in [0, 1], got 1.5" in err
