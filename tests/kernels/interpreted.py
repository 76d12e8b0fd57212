"""What tests of Triton kernels share: what they leave out where Triton interprets them, and run on a GPU; memory that
nobody wrote."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def further(*values: Any) -> Any:
    """Values of a parametrization that are slow in the interpreter, and only there."""
    return pytest.param(*values, marks=pytest.mark.slow if INTERPRETED else ())


def fuzz(interpreted: int, on_gpus: int) -> settings:
    """Numbers of drawn examples; the device is one for all of them."""
    return settings(
        max_examples=interpreted if INTERPRETED else on_gpus,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@pytest.fixture(scope="module", autouse=True)
def poisoned_outputs():
    """Memory that nobody wrote holds NaN or the largest integer, in every module that imports it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
