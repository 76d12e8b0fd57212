"""Scripts that compare runs with each other, as `scripts/gpu_step.sh` uses them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from scripts.compare_losses import compare
from scripts.mean_step_seconds import mean_step_seconds
from scripts.train_with_reference_ops import use_reference
from tests.limits import HANGS
from vsa.models import blocks, embeddings


def test_reference_ops_are_asked_for_where_models_call_them(monkeypatch):
    names = dict.fromkeys(("residual_norm", "gated_residual", "linear_gelu"), embeddings) | {"norm_rope": blocks}
    for name, module in names.items():
        monkeypatch.setattr(module, name, lambda *arguments, backend=None: (arguments, backend))
    assert [getattr(module, name)("x") for name, module in names.items()] == 4 * [(("x",), None)]
    use_reference()
    assert [getattr(module, name)("x") for name, module in names.items()] == 4 * [(("x",), "reference")]


def test_losses_of_two_runs_are_compared_at_equal_steps(tmp_path):
    def run(name: str, *rows: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("\n".join(("step,train/loss,val/loss", *rows, "")))
        return tmp_path / name

    first, second = run("a", "10,2,", "20,1,0.5"), run("b", "10,3,", "20,1,0.25")
    result = compare(first, second)
    assert result["runs"]["b"] == {"train/loss": {10: 3.0, 20: 1.0}, "val/loss": {20: 0.25}}
    assert result["difference"] == {"train/loss": 0.0, "val/loss": -0.25}
    with pytest.raises(ValueError, match=r"train/loss at different steps, the last ones are \[\[20\], \[10\]\]"):
        compare(first, run("c", "10,3,0.25"))


def test_the_cost_of_log_lines_is_a_mean_over_settled_steps(tmp_path):
    # ten steps of 0.3 s and one of 0.5 after the first ones, and a validation
    rows = ("step,val/loss,throughput/step_seconds", "20,,9", "30,,0.3", "30,1,", "31,,0.52")
    (tmp_path / "metrics.csv").write_text("\n".join((*rows, "")))
    assert mean_step_seconds(tmp_path) == pytest.approx(0.32)
    (tmp_path / "metrics.csv").write_text("\n".join((*rows[:2], "")))
    with pytest.raises(ValueError, match="has no log line after step 20"):
        mean_step_seconds(tmp_path)


def test_every_part_of_the_steps_runs_once():
    script = Path(__file__).parents[2] / "scripts" / "gpu_step.sh"
    printed = subprocess.run([script, "--dry-run"], capture_output=True, text=True, check=True, timeout=HANGS).stdout
    names = Counter(re.findall(r"^\+ \[\d+ s\] ([^:]+):", printed, re.MULTILINE))
    # random latents are drawn where they are missing, and a dry run draws none
    assert {name for name, count in names.items() if count > 1} <= {"shards-latents-120m", "shards-latents-wan"}
    assert {"residual_norm", "profile-wan", "start-warm", "pair"} <= set(names)
