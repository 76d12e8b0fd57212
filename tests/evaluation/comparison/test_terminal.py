"""Results of a comparison in a terminal: every line fits, and no heading or number is cut, whatever the times are."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.evaluation.comparison.conftest import row_of
from vsa.attention.denoising import DenoisingPlan
from vsa.evaluation.comparison import terminal
from vsa.evaluation.comparison.agreement import Denoised
from vsa.evaluation.comparison.figures import HEADINGS, denoising_table, result_table
from vsa.evaluation.comparison.measure import Row
from vsa.evaluation.comparison.terminal import print_results
from vsa.pages.page import Table

NAMES = ("full", "staged stages=f score=oracle", "video_sparse pooling=conv coarse=0.5 fine=16 ordered=hilbert")
numbers = st.floats(1e-6, 1e9)


def row(name: str, *, error: float, ms: float, prediction: float, topk: int | None) -> Row:
    values = {"topk": topk, "tiles": topk and 18, "density": 0.9999, "speedup": 1 / ms, "prediction_ms": prediction}
    return row_of(name, error_l1=error, error_l2=error, ms=ms, attention_ms=ms, **values)


def printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(terminal._printed("title", table, width))
    return console.export_text().splitlines()


topks = st.sampled_from([None, 1, 100_000])
rows = st.builds(row, st.sampled_from(NAMES), error=numbers, ms=numbers, prediction=numbers, topk=topks)
runs = st.builds(
    Denoised,
    method=st.sampled_from(NAMES),
    family=st.just("full"),
    density=st.just(1.0),
    seconds=numbers,
    psnr=numbers,
    ssim=st.just(0.123),
    frames=st.just(torch.zeros(0)),
)


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=3), st.lists(runs, min_size=1, max_size=3), st.integers(60, 160))
def test_what_is_printed_fits_and_is_whole(rows, runs, width):
    for table in (result_table(rows), denoising_table(runs)):
        lines = printed(table, width)
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        headings = [heading for heading, _ in table.headings]
        columns = [place for place, heading in enumerate(headings) if place == 0 or f" {heading} " in f"{text} "]
        header = next(line for line in lines if "method" in line)
        assert header.split() == " ".join(headings[place] for place in columns).split()
        for cells in table.rows:
            values = " ".join(cells[place].text for place in columns[1:] if cells[place].text)
            assert any(" ".join(line.split()).endswith(values) for line in lines), values
        # control: it is too wide with the column that went last
        spared_columns = [headings.index(name) for name in terminal.SPARED if name in headings]
        if len(columns) < len(headings):
            last = [place for place in spared_columns if place not in columns][-1]
            widths = [max(len(cells[place].text) for cells in table.rows) for place in (*columns[1:], last)]
            names = [len(headings[place]) for place in (*columns[1:], last)]
            assert 20 + sum(3 + max(pair) for pair in zip(widths, names, strict=True)) > width


@pytest.mark.parametrize(
    ("ms", "width", "left"),
    [
        (0.25, 80, {"L2 error", "attention", "speed-up", "prediction"}),
        (123456.0, 80, {"L2 error", "attention", "speed-up", "prediction", "recall p5"}),
        (123456.0, 200, set()),
    ],
)
def test_slow_calls_leave_columns_to_the_page(ms, width, left, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    print_results([row("full", error=0.1, ms=ms, prediction=ms, topk=7)], [], DenoisingPlan())
    header = next(line for line in capsys.readouterr().out.splitlines() if line.split()[0:1] == ["method"])
    assert {heading for heading, _ in HEADINGS if heading not in header} == left
