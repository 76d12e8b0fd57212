"""What `scripts/gpu_step.sh` would run on a machine with GPUs parses and composes: its minutes are rare."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from scripts.compare_losses import compare
from scripts.mean_step_seconds import mean_step_seconds
from scripts.train_with_reference_ops import use_reference
from tests.docs.pages import ROOT
from tests.docs.test_commands import Parsed, composed, only_parse, settings_of  # noqa: F401 (the fixture)
from vsa.models import blocks, embeddings

PARTS = ("tests", "norm", "layer", "step", "distill", "denoise", "profile", "start", "start_wan", "pair", "ranks")
TRAINERS = {"train.py", "scripts/train_with_reference_ops.py"}


def dry_run(tmp_path: Path, *arguments: str, gpus: int = 2) -> tuple[int, list[list[str]], str]:
    """Exit status, words of the commands, and everything that the script prints, beside so many GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nfor i in $(seq {gpus}); do echo GPU; done\n")
    tool.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
    result = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_step.sh"), *arguments], env=environment, capture_output=True, text=True
    )
    assert not (tmp_path / "out").exists()
    commands = [line.split(": ", 1)[1] for line in result.stdout.splitlines() if line.startswith("+ ")]
    return result.returncode, [shlex.split(command) for command in commands], result.stdout + result.stderr


def test_its_trainings_compose(tmp_path):
    status, commands, _ = dry_run(tmp_path, "--dry-run")
    assert status == 0
    trainings = [words for words in commands if TRAINERS & set(words)]
    assert len(trainings) == 2 + 3 * 2 + 1 + 2 + 2 + 2 + 3 * 2
    for _, _, *words in trainings:
        cfg = composed(*settings_of(words))
        assert cfg.data.batch_size % (cfg.trainer.accumulate_grad_batches * cfg.trainer.devices) == 0


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
def test_its_other_commands_parse(tmp_path, only_parse):  # noqa: F811
    _, commands, _ = dry_run(tmp_path, "--dry-run")
    others = [words[1:] for words in commands if not {*TRAINERS, "pytest"} & set(words)]
    assert len(others) == 5 + 2 + 1 + 1 + 1 + 1 + 2 + 1 + 1
    for flag, *words in others:
        module, arguments = (words[0], words[1:]) if flag == "-m" else (flag[:-3].replace("/", "."), words)
        with pytest.raises(Parsed):
            only_parse(module, *arguments)
    (tests,) = (words for words in commands if "pytest" in words)
    paths = [word for word in tests if word.startswith("tests/")]
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_pair_differs_by_its_operations_alone(gpus, tmp_path):
    _, commands, _ = dry_run(tmp_path, "--dry-run", "pair", gpus=gpus)
    *runs, comparison = commands
    fused, reference = sorted(runs, key=lambda words: words[1] != "train.py")
    assert (fused[1], reference[1]) == ("train.py", "scripts/train_with_reference_ops.py")
    assert fused[3:] == reference[3:]
    assert [word.removeprefix("run_dir=") for word in (fused[2], reference[2])] == comparison[2:4]


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
    _, (_, *runs, _), _ = dry_run(tmp_path, "--dry-run", "logging")
    # they differ by the setting, and by their folders
    assert {tuple(words[3:]) for words in runs} == {tuple(runs[0][3:]), tuple(runs[1][3:])}
    assert [word for word in runs[1] if word not in runs[0]][1:] == ["trainer.log_every_n_steps=20"]
    # ten steps of 0.3 s and one of 0.5 after the first ones, and a validation
    rows = ("step,val/loss,throughput/step_seconds", "20,,9", "30,,0.3", "30,1,", "31,,0.52")
    (tmp_path / "metrics.csv").write_text("\n".join((*rows, "")))
    assert mean_step_seconds(tmp_path) == pytest.approx(0.32)
    (tmp_path / "metrics.csv").write_text("\n".join((*rows[:2], "")))
    with pytest.raises(ValueError, match="has no log line after step 20"):
        mean_step_seconds(tmp_path)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_can_be_run_alone(part, tmp_path):
    status, commands, _ = dry_run(tmp_path, "--dry-run", part)
    assert status == 0
    assert commands


def test_it_says_what_it_leaves_out_and_refuses_other_words(tmp_path):
    status, commands, output = dry_run(tmp_path, "--dry-run", "ranks", gpus=1)
    assert (status, commands) == (0, [])
    assert "left out: ranks needs two GPUs, here are 1" in output
    for word in ("--dry", "steps", "norm layer"):
        status, commands, output = dry_run(tmp_path, "--dry-run", word)
        assert (status, commands) == (2, [])
        assert f"error: unknown part {word}, expected --dry-run or one of tests norm" in output
