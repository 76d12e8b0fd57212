"""Asynchronous copies to a GPU and from it."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor


def copy_async(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on `device`; copies from the CPU to a GPU are asynchronous, through page-locked memory.

    A copy from pageable memory would block the host until the GPU has finished all queued work.
    """
    if x.device.type != "cpu" or torch.device(device).type != "cuda":
        return x.to(device)
    # page-locked memory has the strides of its source, and elements that share memory cannot be written
    return x.contiguous().pin_memory().to(device, non_blocking=True)


def staging(size: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Uninitialised float32 CPU memory, page-locked if `device` is a GPU, for copies with `copy_async`."""
    return torch.empty(size, dtype=torch.float32, pin_memory=torch.device(device).type == "cuda")


class PendingCopy(NamedTuple):
    """A tensor on its way to the host.

    Attributes:
        value: tensor on the host, valid once `arrived` is done.
        arrived: end of the copy; None if the tensor was on the host already.
    """

    value: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, x: Tensor) -> PendingCopy:
        """Begin the copy, without waiting for the device to compute `x`."""
        if not x.is_cuda:
            return cls(x.detach().clone(), None)
        value = x.detach().to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(value, arrived)

    def read(self) -> Tensor:
        """The tensor, after waiting for it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.value


class DeviceTimestamp:
    """A point in the work of a device, in the order in which the host has queued it.

    Args:
        device: a GPU, or the CPU, where it is the time of the call.
    """

    def __init__(self, device: torch.device):
        self._host = perf_counter()
        self._reached: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._reached = torch.cuda.Event(enable_timing=True)
            self._reached.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: DeviceTimestamp) -> float:
        """Seconds between two moments of one device; waits for this one."""
        if self._reached is None or earlier._reached is None:
            return self._host - earlier._host
        self._reached.synchronize()
        return earlier._reached.elapsed_time(self._reached) / 1e3
