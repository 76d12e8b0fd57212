"""What the tests of operators that compute by element share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest error, as a share of the largest value."""


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def dtypes(device: torch.device, triton: bool) -> list[torch.dtype]:
    """The interpreter is wrong in half precision."""
    return [torch.float32] if triton and device.type == "cpu" else list(TOLERANCE)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, exact in want.items():
        error = (got[name].double() - exact.double()).abs().max() / exact.abs().max()
        assert error <= TOLERANCE[dtype], f"{name} is off by {error}"
