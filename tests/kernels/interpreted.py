"""What the quick tests leave out where Triton interprets its kernels, and run on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def further(*values: Any) -> Any:
    """Values of a parametrization that are slow in the interpreter, and only there."""
    return pytest.param(*values, marks=pytest.mark.slow if INTERPRETED else ())
