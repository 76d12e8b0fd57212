from __future__ import annotations

import importlib
import os

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.fixture
def triton_device() -> torch.device:
    """Where Triton kernels can run: the CPU when they are interpreted, else a GPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")


@pytest.fixture
def bench(monkeypatch):
    """`scripts.bench` with one tiny shape on a CPU, `bench.tiny`."""
    module = importlib.import_module("scripts.bench.__main__")
    problems = importlib.import_module("scripts.bench.problems")
    tiny = problems.Shape(name="tiny", grid_thw=(4, 4, 4), tile_thw=(2, 2, 2), heads=2, head_dim=8, topk=2)
    monkeypatch.setattr(problems, "CPU_SHAPES", (tiny,))
    module.tiny = tiny
    return module


@pytest.fixture
def checks(bench):
    """The checks that come before its numbers."""
    return importlib.import_module("scripts.bench.checks")
