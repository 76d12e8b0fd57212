from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import triton_device  # noqa: F401


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param
