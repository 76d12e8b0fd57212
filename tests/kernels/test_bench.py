"""`scripts/bench.py` prints no speed for a wrong kernel."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_script", module)
    spec.loader.exec_module(module)
    tiny = module.Shape(name="tiny", batch=1, heads=2, tokens=64, head_dim=8, block=8, topk=2)
    monkeypatch.setattr(module, "CPU_SHAPES", (tiny,))
    return module


def test_a_right_kernel_gets_a_table_and_a_report(bench, tmp_path, capsys):
    out = tmp_path / "new" / "report.json"
    bench.main(["fine", "--repeats", "2", "--out", str(out)])
    report = json.loads(out.read_text())
    assert [(r["op"], r["pass"]) for r in report["rows"]] == [
        (op, kind) for op in ("dense", "gather") for kind in ("forward", "forward + backward")
    ]
    assert all(r["min_ms"] <= r["median_ms"] <= r["max_ms"] for r in report["rows"])
    assert report["rows"][2]["sparsity"] == 0.75
    assert "| tiny | 1 x 2 x 64 x 8 | 8 | 75.0% | float32 | gather |" in capsys.readouterr().out
    bench.main(["table", str(out)])
    assert "| tiny |" in capsys.readouterr().out


def test_a_wrong_gradient_stops_it(bench, monkeypatch, tmp_path, capsys):
    right = bench.run

    def wrong(case, backend):
        got = right(case, backend)
        return {**got, "dk": got["dk"] * 1.01} if backend == "gather" else got

    monkeypatch.setattr(bench, "run", wrong)
    with pytest.raises(ValueError, match="gather is wrong, no speed is printed: dk"):
        bench.main(["fine", "--out", str(tmp_path / "x.json")])
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_a_check_that_cannot_fail_stops_it(bench, monkeypatch):
    monkeypatch.setattr(bench, "assert_within_budget", lambda *a: None)
    with pytest.raises(ValueError, match="does not notice a wrong scale"):
        bench.main(["fine"])


def test_the_measured_problem_itself_is_checked(bench, monkeypatch):
    case = bench.problem(bench.CPU_SHAPES[0], torch.float32, torch.device("cpu"))
    right = bench.block_sparse_attn
    bench.check_measured(case, "gather")
    monkeypatch.setattr(bench, "block_sparse_attn", lambda *a, **k: (right(*a, **k)[0] + 1e-4, None))
    with pytest.raises(ValueError, match="query block 0 is off by"):
        bench.check_measured(case, "gather")
