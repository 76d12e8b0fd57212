"""Copies to a device: the same values wherever they go, and without waiting for a GPU."""

from __future__ import annotations

import pytest
import torch

from vsa.transfer import sent, staging


def test_on_the_cpu_nothing_is_copied():
    x = torch.arange(3.0)
    assert sent(x, "cpu") is x
    assert sent(x, torch.device("cpu")) is x
    memory = staging((2, 3), "cpu")
    assert memory.shape == (2, 3)
    assert memory.dtype == torch.float32
    assert not memory.is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_same_values_without_a_wait():
    expected = torch.arange(1000.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = [sent(x, "cuda") for x in (expected, expected[::2], staging((1000,), "cuda").copy_(expected))]
        # the control: other memory waits
        with pytest.raises(RuntimeError):
            expected.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, there in zip((expected, expected[::2], expected), copies, strict=True):
        assert there.is_cuda
        assert torch.equal(there.cpu(), x)
