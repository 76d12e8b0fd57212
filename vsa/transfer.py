"""Asynchronous copies to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on `device`; copies from the CPU to a GPU are asynchronous, through page-locked memory.

    A copy from pageable memory would block the host until the GPU has finished all queued work.
    """
    if x.device.type != "cpu" or torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def staging(size: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Uninitialised float32 CPU memory, page-locked if `device` is a GPU, for copies with `sent`."""
    return torch.empty(size, dtype=torch.float32, pin_memory=torch.device(device).type == "cuda")
