"""The operators where torch is the only package: other packages are neither needed nor imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"

WITHOUT = """
import sys
sys.modules["triton"] = None
import torch
from vsa_kernels.operators import OPERATORS
from vsa_kernels.testing import make_case

case = make_case([5, 3], [4, 7], batch=2, heads=2, head_dim=8, fine=True, kv_valid=True)
for name, operator in OPERATORS.items():
    for call in operator.cases(case):
        for backend in ("reference", "gather", None):
            try:
                assert all(x.isfinite().all() for x in sum(call.run(backend), ())), name
            except ValueError as error:
                assert backend == "gather" and str(error).startswith("backend must be reference, triton"), error
    try:
        # the first case of one operator calls an op itself
        *_, last = operator.cases(case)
        last.function(*last.inputs, **last.options, backend="triton")
        raise SystemExit(f"{name} ran on triton")
    except ValueError as error:
        print(name, error)
"""

ALONE = """
import sys
# parts of torch that the records and the choice of backends use, and that import triton where it is
import torch._dynamo, torch.utils.flop_counter
torchs = set(sys.modules)
import vsa_kernels
assert not [name for name in sys.modules if name.startswith("vsa_kernels") and ("triton_" in name or "hopper_" in name)]
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - torchs}))
"""


def run(code: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(KERNELS)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_every_operator_runs_without_triton_and_says_so_where_it_is_named():
    lines = run(WITHOUT)
    assert len(lines) > 10
    expected = (
        "backend triton needs the package triton, which is not installed: set backend=gather or backend=reference"
    )
    assert {line.partition(" ")[2] for line in lines} == {expected}


def test_the_package_imports_torch_alone():
    (names,) = run(ALONE)
    assert "vsa_kernels" in names.split()
    assert not {"triton", "lightning", "hydra", "omegaconf", "vsa", "diffusers"} & set(names.split())
