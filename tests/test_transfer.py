"""Copies to a device and from it: the same values wherever they go, and without waiting for a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from vsa.transfer import Arriving, Moment, sent, staging

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_the_cpu_nothing_is_copied():
    x = torch.arange(3.0)
    assert sent(x, "cpu") is x
    assert sent(x, torch.device("cpu")) is x
    memory = staging((2, 3), "cpu")
    assert memory.shape == (2, 3)
    assert memory.dtype == torch.float32
    assert not memory.is_pinned()


@needs_gpu
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


def test_a_value_that_arrives_is_that_of_its_time():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    arriving = Arriving.of(x)
    with torch.no_grad():
        x.add_(1)
    assert arriving.read().tolist() == [1, 2]
    assert not arriving.read().requires_grad


def test_moments_of_the_cpu_are_those_of_the_host():
    first = Moment(torch.device("cpu"))
    time.sleep(0.05)
    second = Moment(torch.device("cpu"))
    assert 0.05 <= second.seconds_since(first) < 5


@needs_gpu
def test_a_gpu_is_asked_for_values_and_times_that_it_has_not_reached():
    device = torch.device("cuda")
    x = torch.zeros(3, device=device)
    first = Moment(device)
    # about a quarter of a second
    torch.cuda._sleep(500_000_000)
    began = time.perf_counter()
    arriving, second = Arriving.of(x.add_(1)), Moment(device)
    x.add_(1)
    assert time.perf_counter() - began < 0.05
    assert arriving.read().tolist() == [1, 1, 1]
    assert 0.1 < second.seconds_since(first) < 2
