"""Bench of windows and of scheduled selections."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest
import torch

from tests.kernels.benching import FAST, damaged

CPU = torch.device("cpu")


@pytest.fixture
def strides(bench, monkeypatch):
    """The module of the case, with a small problem: windows that need masks, and some that need none."""
    module = importlib.import_module("scripts.bench.neighborhood")
    small = replace(
        module.CPU_WINDOWS[0], grid_thw=(3, 8, 8), window_thw=(3, 4, 4), q_tile_thw=(1, 4, 4), tile_thw=(1, 2, 4),
        strides=((1, 1, 1), (1, 4, 4)), heads=2, head_dim=8,
    )  # fmt: skip
    monkeypatch.setattr(module, "CPU_WINDOWS", (small,))
    return module


def test_neighborhood_runs_every_stride(bench, strides, tmp_path, capsys):
    out = tmp_path / "report.json"
    bench.main(["neighborhood", "--repeats", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    ours = [row for row in report["rows"] if row["op"].startswith("gather")]
    assert [(row["op"], row["pass"]) for row in ours] == [
        (f"gather{order}, stride {stride}", kind)
        for stride in ("1x1x1", "1x4x4")
        for order in ("", ", permuted")
        for kind in ("forward", "forward + backward")
    ]
    assert all(row["bound"] == 4 for row in report["rows"])
    for row in ours:
        assert row["baseline"] == "dense"
        assert row["share_of_bound"] == pytest.approx(row["speedup"] / 4, abs=1e-3)
        # blocked attention is made of whole tiles
        assert (row["masked"] == 0) == (row["stride"] == "1x4x4")
        assert (row["tile_bound"] == 4) == (row["stride"] == "1x4x4")
    output = capsys.readouterr().out
    assert "| gather, permuted, stride 1x4x4 | forward + backward |" in output
    assert "1x4x4: bound 4.00x by FLOPs, 4.00x by listed tiles, 0% of them with a fine mask" in output


def test_neighborhood_of_the_command_line(bench, strides, tmp_path, capsys):
    out = tmp_path / "report.json"
    how = ["--window", "2x8x4", "--strides", "2x8x2", "--q-tile", "3x2x2", "--kv-tile", "3x2x2"]
    bench.main(["neighborhood", *how, "--repeats", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {row.get("stride") for row in rows} == {None, "2x8x2"}
    assert {(row["window"], row["block"], row["q_block"], row["bound"]) for row in rows} == {("2x8x4", 12, 12, 3.0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "4x4x4"], "window of time must be at most its 3 tokens, got 4"),
        (["--strides", "1x5x1"], "stride of height must be at most its window 4, got 5"),
        (["--q-tile", "1x3x4"], "divide"),
        (["--shapes", "tiny"], "--shapes must be of small-6x16x16, hunyuan-30x48x80, got tiny"),
    ],
)
def test_neighborhoods_that_do_not_fit(bench, strides, options, message):
    with pytest.raises(ValueError, match=message):
        bench.main(["neighborhood", *options])


@pytest.mark.parametrize("text", ["8x8", "1x0x1", "axbxc", "-1x2x3"])
def test_a_window_is_three_numbers(bench, strides, text, capsys):
    with pytest.raises(SystemExit):
        bench.main(["neighborhood", f"--window={text}"])
    assert f"must be three positive numbers as in 18x24x24, got '{text}'" in capsys.readouterr().err


def test_a_schedule_is_the_mean_of_its_steps(bench, tmp_path, capsys):
    out = tmp_path / "report.json"
    bench.main(["dynamic_hilbert", *FAST, "--out", str(out)])
    report = json.loads(out.read_text())
    # 8 blocks: 30%, 20% and 10% of them, rounded down to one at least
    rows = {row["op"]: row for row in report["rows"]}
    assert list(rows) == [
        *("dense", "reorder of q, k, v, out", "scores of sub-blocks"),
        *("top-2", "gather, top-2", "top-1", "gather, top-1"),
        *("gather, mean of the sparse steps", "gather, mean, reordered in each"),
    ]
    assert {row["pass"] for row in rows.values()} == {"forward"}
    # 12 steps of 38 keep 2 blocks, 26 one; three of them select
    ms = {name: row["median_ms"] for name, row in rows.items()}
    mean = 12 * ms["gather, top-2"] + 26 * ms["gather, top-1"] + 3 * ms["scores of sub-blocks"]
    mean = (mean + ms["top-2"] + 2 * ms["top-1"]) / 38
    assert ms["gather, mean of the sparse steps"] == pytest.approx(mean, abs=1e-3)
    assert ms["gather, mean, reordered in each"] == pytest.approx(mean + ms["reorder of q, k, v, out"], abs=1e-3)
    assert rows["gather, mean of the sparse steps"]["sparsity"] == pytest.approx(1 - 50 / 38 / 8)
    assert rows["gather, mean of the sparse steps"]["baseline"] == "dense"
    output = capsys.readouterr().out
    assert (
        "tiny: 38 of 50 steps are sparse, 83.55% in the mean: bound 6.08x by listed blocks; 3 of them select" in output
    )


def test_a_wrong_neighborhood_stops_its_case(bench, checks, strides, monkeypatch, capsys):
    monkeypatch.setattr(strides, "run", damaged(strides.run, lambda results: {**results, "dq": results["dq"] * 1.01}))
    with pytest.raises(ValueError, match="backend gather is wrong, no speed is printed: dq"):
        bench.main(["neighborhood", "--repeats", "1"])
    monkeypatch.setattr(checks, "assert_within_budget", lambda *a: None)
    with pytest.raises(ValueError, match="does not notice a damaged input"):
        bench.main(["neighborhood", "--repeats", "1"])
    assert capsys.readouterr().out == ""


def test_the_measured_neighborhood_is_checked(bench, strides, monkeypatch):
    shape = strides.CPU_WINDOWS[0]
    p = strides.WindowProblem.of(shape, torch.float32, CPU)
    stride = (1, 1, 1)
    right = strides.block_sparse_attn
    strides.check_windows(p, p.case(stride), stride, "gather")
    # the index of another stride
    with pytest.raises(ValueError, match="stride 1x1x1: out is off by"):
        strides.check_windows(p, p.case((1, 4, 4)), stride, "gather")
    for name in ("q", "k", "v"):

        def wrong(*args, name=name, **kwargs):
            leaves = [
                x.detach() + 1.01 * (x - x.detach()) if n == name else x for n, x in zip("qkv", args[:3], strict=True)
            ]
            return right(*leaves, *args[3:], **kwargs)

        monkeypatch.setattr(strides, "block_sparse_attn", wrong)
        with pytest.raises(ValueError, match=f"d{name} is off by"):
            strides.check_windows(p, p.case(stride), stride, "gather")
    monkeypatch.setattr(strides, "block_sparse_attn", right)
    # tokens brought back in another order
    shifted_problem = replace(p, tiles=replace(p.tiles, inverse=p.tiles.inverse.roll(1)))
    with pytest.raises(ValueError, match="out is off by"):
        strides.check_windows(shifted_problem, p.case(stride), stride, "gather")
