from __future__ import annotations

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")]),
    ]
)
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def ieee_fp32():
    """diffusers embeds patches with a convolution, which cuDNN would round to tf32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Problems this small run faster without threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
