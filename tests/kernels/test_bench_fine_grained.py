"""`scripts.bench fine_grained`: every tile and sparsity, lists of uneven length, and no speed for a wrong kernel."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreted import INTERPRETED


@pytest.fixture
def bench():
    return importlib.import_module("scripts.bench.__main__")


@pytest.fixture
def masks(monkeypatch):
    """The module of the case with a small problem, whose last tiles are short."""
    module = importlib.import_module("scripts.bench.fine_grained")
    small = replace(
        module.CPU_MASKS[0], name="small", grid_thw=(1, 1, 150), heads=2, head_dim=16,
        q_tokens=(64, 16), kv_tokens=(32, 16), sparsities=(0.5, 0.8), skews=(0.5,), skewed_tiles=(32, 16),
    )  # fmt: skip
    monkeypatch.setattr(module, "CPU_MASKS", (small,))
    return module


def test_every_tile_and_sparsity_is_timed(bench, masks, tmp_path, capsys):
    out = tmp_path / "report.json"
    bench.main(["fine_grained", "--repeats", "1", "--out", str(out)])
    report, output = json.loads(out.read_text()), capsys.readouterr().out
    dense, *rows = report["rows"]
    *rows, first, list_order = rows
    assert dense["op"] == "dense"
    tiles = [(m, n) for m in (64, 16) for n in (32, 16) for _ in range(4)]
    assert [(r["q_block"], r["block"]) for r in rows] == tiles
    assert [r["op"] for r in rows] == ["reference", "reference: planning"] * 8
    assert [first["op"], list_order["op"]] == [f"reference, skew 50%, {how}" for how in ("longest first", "as listed")]
    for kernel, planning in zip(rows[::2], rows[1::2], strict=True):
        assert kernel["baseline"] == "dense"
        assert planning["speedup"] is None
        # groups compute the union of what their tiles keep, and whole tiles
        assert 1 - kernel["sparsity"] < kernel["computed"] == planning["computed"]
        assert kernel["share_of_bound"] == pytest.approx(kernel["speedup"] * kernel["computed"], abs=2e-3)
    assert report["checks"][0] in output
    assert "| small | 1 x 2 x 150 x 16 | 64x32 |" in output


def test_the_command_line_chooses_tiles_and_sparsities(bench, masks, tmp_path):
    out = tmp_path / "report.json"
    how = ["--q-tokens", "32", "--kv-tokens", "1", "--sparsities", "0.9"]
    bench.main(["fine_grained", *how, "--repeats", "1", "--out", str(out)])
    rows = [row for row in json.loads(out.read_text())["rows"] if row["op"] == "reference"]
    assert [(row["q_block"], row["block"]) for row in rows] == [(32, 1)]
    assert rows[0]["sparsity"] == pytest.approx(0.9, abs=0.05)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_triton_runs_on_random_masks(bench, masks, monkeypatch, capsys):
    # the small check is slow in the interpreter, and test_gathered.py makes it there
    cases = importlib.import_module("scripts.bench.cases").CASES
    monkeypatch.setitem(cases, "fine_grained", cases["fine_grained"]._replace(check=lambda *a: []))
    how = ["--q-tokens", "64", "--kv-tokens", "32", "--sparsities", "0.5"]
    tiny = replace(masks.CPU_MASKS[0], grid_thw=(1, 1, 70), heads=1, skews=())
    monkeypatch.setattr(masks, "CPU_MASKS", (tiny,))
    bench.main(["fine_grained", *how, "--repeats", "1", "--backends", "triton"])
    assert "| triton: planning | forward |" in capsys.readouterr().out


def test_lists_are_as_uneven_as_they_say(masks):
    shape = masks._shape("x", 4096, 3, 16, skewed_tiles=(32, 8))
    for skew in (0.0, 0.5, 1.0):
        length = masks.skewed(shape, skew, torch.Generator().manual_seed(0)).sum(-1).double()
        assert float(length.mean()) == pytest.approx(0.3 * 512, rel=0.01)
        assert torch.allclose(1 - length.amin(-1) / length.amax(-1), torch.tensor(skew).double(), atol=0.01)
        # long lists stand anywhere
        assert skew == 0 or not torch.equal(length, length.sort(-1).values)


def test_a_wrong_kernel_stops_the_case(bench, masks, monkeypatch, capsys):
    right = masks.gathered_attn

    def wrong(q, *args, **kwargs):
        out, lse = right(q, *args, **kwargs)
        return out * 1.001, lse

    monkeypatch.setattr(masks, "gathered_attn", wrong)
    with pytest.raises(ValueError, match="on backend reference is wrong, no speed is printed: out"):
        bench.main(["fine_grained", "--repeats", "1"])
    # of the measured problem alone
    monkeypatch.setattr(
        masks, "gathered_attn", lambda q, *a, **how: (wrong if q.shape[1] == 150 else right)(q, *a, **how)
    )
    with pytest.raises(ValueError, match=r"on backend reference: query block \d is off by"):
        bench.main(["fine_grained", "--repeats", "1"])
    monkeypatch.setattr(masks, "gathered_attn", right)
    monkeypatch.setattr(importlib.import_module("scripts.bench.checks"), "assert_within_budget", lambda *a: None)
    with pytest.raises(ValueError, match="does not notice a damaged input"):
        bench.main(["fine_grained", "--repeats", "1"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--q-tokens", "48"], "must divide 128, got '48'"),
        (["--kv-tokens", "0"], "must divide 128, got '0'"),
        (["--sparsities", "1"], "must be at least 0 and below 1, got '1'"),
        (["--sparsities", "x"], "must be at least 0 and below 1, got 'x'"),
    ],
)
def test_bad_masks_are_refused(bench, argv, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(["fine_grained", *argv])
    assert message in capsys.readouterr().err


def test_unknown_masks_are_refused(bench, masks):
    with pytest.raises(ValueError, match="--shapes must be of small, 32k-h24-d128, got tiny"):
        bench.main(["fine_grained", "--shapes", "tiny"])
