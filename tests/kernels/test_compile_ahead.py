"""Compilation ahead: another program finds the kernels of recorded launches in the cache."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction
from vsa_kernels import linear_gelu, norm_rope
from vsa_kernels.compile_ahead import Compilation, Pointer, _mark, _specialised, compile_ahead, recorded_launches
from vsa_kernels.dispatch import resolve_backend

ROOT = Path(__file__).parents[2]


def output(tmp_path: Path, mode: str, stage: str) -> Any:
    """What `ahead.py` prints, with a cache in `tmp_path`."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT / "kernels"), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("ahead.py")), mode, "--stage", stage]
    process = subprocess.run(command, capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize(("stage", "number"), [("few", 4), pytest.param("operator", 17, marks=pytest.mark.slow)])
def test_a_program_finds_its_kernels_in_the_cache(tmp_path, stage, number):
    assert output(tmp_path, "compile", stage) == [number, True]
    bf16, fp16 = output(tmp_path, "launch", stage)
    assert len(bf16) == number
    assert all(found for _, found in bf16), bf16
    # a control; fp32 partial sums are added by the same kernel
    assert {name for name, found in fp16 if found} <= {"_add_partials_kernel"}, fp16
    assert not all(found for _, found in fp16)


@pytest.fixture
def compiling(monkeypatch, tmp_path):
    """A cache of its own, and no interpreter in other processes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_a_kernel_that_does_not_compile_is_named(compiling):
    entry = pickle.dumps(("vsa_kernels.linear_gelu.triton_bias_gelu", "_no_such_kernel", [], []))
    compilation = compile_ahead([entry], (9, 0), 1)
    assert compilation is not None
    with pytest.raises(RuntimeError, match="not compiled ahead: _no_such_kernel: AttributeError"):
        compilation.wait()
    # it would be tried again
    assert not _mark([entry], (9, 0)).exists()


OWN = """
import os, pathlib, time
import triton
import triton.language as tl

@triton.jit
def own_kernel(x, n: tl.constexpr):
    tl.store(x, n)

if os.environ.get("SLEEPS"):
    pathlib.Path(os.environ["SLEEPS"]).write_text(f"{os.getpid()}\\n")
    time.sleep(200)
"""


@pytest.fixture
def own(compiling, monkeypatch, tmp_path):
    """An entry of a module that is on the path of this program alone, beside one that hides another module."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "module_of_a_test.py").write_text(OWN)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "queue.py").write_text("raise SystemExit('the module of the current folder')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*(entry for entry in sys.path if entry), tmp_path / "modules"])
    return pickle.dumps(("module_of_a_test", "own_kernel", [Pointer(torch.float32, 0)], [("n", 1)]))


def test_modules_are_those_of_the_program(own, tmp_path):
    compilation = compile_ahead([own], (9, 0), 1)
    assert compilation is not None
    compilation.wait()
    assert [path.name for path in tmp_path.rglob("*.cubin")] == ["own_kernel.cubin"]
    # a second program has nothing to do, and one for another chip, or with another version, all of it
    assert compile_ahead([own], (9, 0), 1) is None
    marks = {_mark([own], (9, 0)), _mark([own], (8, 0)), _mark([own, own], (9, 0))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vsa_kernels.compile_ahead.source_hash", lambda package: "another")
        marks.add(_mark([own], (9, 0)))
    assert len(marks) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_compilation_is_stopped_with_its_processes(own, monkeypatch, tmp_path):
    monkeypatch.setenv("SLEEPS", str(tmp_path / "begun"))
    compilation = compile_ahead([own], (9, 0), 1)
    assert compilation is not None
    until, begun = time.monotonic() + 100, tmp_path / "begun"
    while not (begun.exists() and begun.read_text().endswith("\n")):
        assert time.monotonic() < until
        time.sleep(0.1)
    worker = Path("/proc", begun.read_text().strip(), "stat")
    assert worker.exists()
    compilation.stop()
    assert compilation.ended
    # gone, or dead and not yet collected
    while worker.exists() and ") Z " not in worker.read_text():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_other_kernels_are_not_launched_while_launches_are_recorded():
    from vsa_kernels.partial_sums import _add_partials_kernel

    run = JITFunction.run
    with recorded_launches((9, 0)), pytest.raises(RuntimeError, match="not launched while launches are recorded"):
        _add_partials_kernel.run(grid=(1,), warmup=False)
    assert JITFunction.run is run


def test_nothing_is_started_for_nothing(compiling, monkeypatch):
    monkeypatch.setattr(Compilation, "__init__", None)
    assert compile_ahead([], (9, 0), 1) is None


def test_launches_of_public_operations_are_recorded_once():
    x = torch.empty(2, 40, 32, device="meta", dtype=torch.bfloat16)
    weight, bias, table = (torch.empty(n, device="meta", dtype=x.dtype) for n in ((64, 32), (64,), (40, 16)))
    for parameter in (weight, bias):
        parameter.requires_grad_()
    with recorded_launches((9, 0)) as launches:
        for _ in range(2):
            hidden = linear_gelu(x, weight, bias)
            out = norm_rope(hidden, bias, table.float(), table.float(), num_heads=2, eps=1e-6)
            assert out.shape == (2, 40, 2, 32)
            out.sum().backward()
    names = [pickle.loads(entry)[1] for entry in launches]
    # the gradients of a weight and of a bias are sums of different numbers of parts, but one kernel
    assert names == [
        "_bias_gelu_kernel", "_norm_rope_kernel", "_norm_rope_grad_kernel", "_add_partials_kernel",
        "_bias_gelu_grad_kernel",
    ]  # fmt: skip
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


def test_a_gpu_is_meant_in_the_block_alone():
    def resolved() -> str:
        return resolve_backend(None, torch.device("meta"), torch.bfloat16, 64)

    with recorded_launches((9, 0)):
        assert resolved() == "triton"
    assert resolved() == "gather"
    with recorded_launches((7, 5)):
        assert resolved() == "gather"


@pytest.mark.parametrize(
    ("number", "stands_for"), [(1, 1), (32, 16), (0, 16), (3, 17), (-5, 17), (1 << 40, (1 << 32) + 16), (True, True)]
)
def test_integers_are_told_apart_as_triton_does(number, stands_for):
    assert _specialised(number) == stands_for


def test_the_alignment_of_a_view_is_kept():
    x = torch.empty(4, 32, device="meta", dtype=torch.bfloat16)
    assert _specialised(x[1:]) == Pointer(torch.bfloat16, 0)
    assert _specialised(x[:, 3:]) == Pointer(torch.bfloat16, 6)
