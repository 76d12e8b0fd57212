"""`make test` runs the Triton kernels in Triton's interpreter, by a second pytest with TRITON_INTERPRET=1: the choice
is made when triton is imported. These tests notice when that run would test nothing.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from vsa_kernels.dispatch import resolve_backend

from tests.kernels.interpreted import INTERPRETED

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(INTERPRETED, reason="looked at by the run without TRITON_INTERPRET=1")
@pytest.mark.parametrize("target", ["test", "test-all"])
def test_make_runs_the_kernels_interpreted(target):
    # what make would run, without running it
    recipe = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^(?=.*TRITON_INTERPRET=1 ).*pytest.* tests/kernels", recipe, re.MULTILINE), recipe


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_kernels_are_interpreted(triton_device):
    from triton.runtime.interpreter import InterpretedFunction
    from vsa_kernels.block_sparse import triton_bwd, triton_fwd

    kernels = (triton_fwd._fwd_kernel, triton_bwd._dq_kernel, triton_bwd._dkv_kernel)
    assert all(isinstance(kernel, InterpretedFunction) for kernel in kernels)
    assert triton_device.type == "cpu"
    assert resolve_backend("triton", triton_device, torch.float32, 64) == "triton"
