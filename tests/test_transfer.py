"""Copies to a device and from it: the same values wherever they go, and without waiting for a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from vsa.transfer import DeviceTimestamp, PendingCopy, copy_async, staging

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_the_cpu_nothing_is_copied():
    x = torch.arange(3.0)
    assert copy_async(x, "cpu") is x
    assert copy_async(x, torch.device("cpu")) is x
    memory = staging((2, 3), "cpu")
    assert memory.shape == (2, 3)
    assert memory.dtype == torch.float32
    assert not memory.is_pinned()


def test_elements_that_share_memory_are_sent(monkeypatch):
    def pin_memory(x):
        # what torch does, in memory of the same strides
        return torch.empty_strided(x.shape, x.stride()).copy_(x)

    sent_to = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, device, non_blocking: (sent_to.append((device, non_blocking)), x)[1]
    )
    one = torch.tensor(3.0)
    assert copy_async(one.expand(4), "cuda").tolist() == [3, 3, 3, 3]
    assert sent_to == [("cuda", True)]
    # the control
    with pytest.raises(RuntimeError, match="more than one element"):
        one.expand(4).pin_memory()


@needs_gpu
def test_a_gpu_gets_the_same_values_without_a_wait():
    expected = torch.arange(1000.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sources = (expected, expected[::2], staging((1000,), "cuda").copy_(expected), expected[7].expand(5))
        copies = [copy_async(x, "cuda") for x in sources]
        # the control: other memory waits
        with pytest.raises(RuntimeError):
            expected.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, there in zip(sources, copies, strict=True):
        assert there.is_cuda
        assert torch.equal(there.cpu(), x)


def test_a_value_that_arrives_is_that_of_its_time():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    arriving = PendingCopy.of(x)
    with torch.no_grad():
        x.add_(1)
    assert arriving.read().tolist() == [1, 2]
    assert not arriving.read().requires_grad


def test_moments_of_the_cpu_are_those_of_the_host():
    first = DeviceTimestamp(torch.device("cpu"))
    time.sleep(0.05)
    second = DeviceTimestamp(torch.device("cpu"))
    assert 0.05 <= second.seconds_since(first) < 5


@needs_gpu
def test_a_gpu_is_asked_for_values_and_times_that_it_has_not_reached():
    device = torch.device("cuda")
    x = torch.zeros(3, device=device)
    # the first page-locked memory may be taken only when the GPU is idle
    PendingCopy.of(x).read()
    first = DeviceTimestamp(device)
    # about a quarter of a second
    torch.cuda._sleep(500_000_000)
    began = time.perf_counter()
    arriving, second = PendingCopy.of(x.add_(1)), DeviceTimestamp(device)
    x.add_(1)
    assert time.perf_counter() - began < 0.05
    assert arriving.read().tolist() == [1, 1, 1]
    assert 0.1 < second.seconds_since(first) < 2
