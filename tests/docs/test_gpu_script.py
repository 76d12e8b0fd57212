"""What `scripts/gpu_step.sh` would run on a machine with GPUs parses and composes: its minutes are rare."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_commands import Parsed, composed, only_parse, settings_of  # noqa: F401 (the fixture)

PARTS = ("tests", "norm", "layer", "step", "distill", "denoise", "profile", "start", "ranks")


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
    trainings = [words for words in commands if "train.py" in words]
    assert len(trainings) == 2 + 2 + 3 * 2
    for words in trainings:
        cfg = composed(*settings_of(words[words.index("train.py") + 1 :]))
        assert cfg.data.batch_size % (cfg.trainer.accumulate_grad_batches * cfg.trainer.devices) == 0


def test_its_other_commands_parse(tmp_path, only_parse):  # noqa: F811
    _, commands, _ = dry_run(tmp_path, "--dry-run")
    others = [words[1:] for words in commands if "train.py" not in words and "pytest" not in words]
    assert len(others) == 5 + 2 + 1 + 1
    for flag, *words in others:
        module, arguments = (words[0], words[1:]) if flag == "-m" else (flag[:-3].replace("/", "."), words)
        with pytest.raises(Parsed):
            only_parse(module, *arguments)
    (tests,) = (words for words in commands if "pytest" in words)
    paths = [word for word in tests if word.startswith("tests/")]
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


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
