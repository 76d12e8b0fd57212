"""What `scripts/gpu_soak.sh` does on a machine without GPUs: say what it would run and what it leaves out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def gpu_soak(*arguments: str) -> tuple[int, str]:
    result = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_soak.sh"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--dry-run", "--short", "OUT"], 3, ["left out: signals", "+ ", "gpu_kernels", "OUT/soak.json", "--short"]),
        ([], 2, ["error: this machine has no CUDA device"]),
        (["--nope"], 2, ["error: unknown option --nope"]),
    ],
)
def test_what_it_says(arguments, status, words, tmp_path):
    actual, output = gpu_soak(*arguments)
    assert actual == status, output
    assert [word for word in words if word not in output] == []
    # nothing was run
    assert not (ROOT / "OUT").exists()
