"""Copies to a GPU that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on `device`; from the CPU to a GPU through page-locked memory.

    A copy from other memory waits for all work that the GPU still has, so that what is launched next begins late.
    """
    if x.device.type != "cpu" or torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def staging(size: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Uninitialised float32 memory of the CPU, page-locked where `sent` to this device gains by it."""
    return torch.empty(size, dtype=torch.float32, pin_memory=torch.device(device).type == "cuda")
