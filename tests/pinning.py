"""A GPU for loaders on a machine without one: memory that counts as page-locked, and the thread that prepares it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import vsa.noise
from vsa.data.plan_datamodule import PlanDataModule


class PretendedGPU:
    """Lets data modules feed a GPU; the memory is ordinary.

    Attributes:
        threads: names of the threads that page-locked a tensor or took memory for noise.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._pinned: set[int] = set()
        self.threads: list[str] = []
        patch.setattr(PlanDataModule, "_feeds_gpu", lambda data: True)
        patch.setattr(Tensor, "pin_memory", lambda x: x if x.is_pinned() else self._keep(x.clone()))
        patch.setattr(Tensor, "is_pinned", lambda x: x.untyped_storage().data_ptr() in self._pinned)
        patch.setattr(vsa.noise, "staging", self._staging)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        # optimizers ask for one that is really there
        gpu = SimpleNamespace(type="cuda")
        patch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: gpu if not check_available else None
        )
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "set_device_index", lambda index: None)

    def _staging(self, size: tuple[int, ...], device: torch.device | str) -> Tensor:
        memory = torch.empty(size)
        return self._keep(memory) if torch.device(device).type == "cuda" else memory

    def _keep(self, x: Tensor) -> Tensor:
        self._pinned.add(x.untyped_storage().data_ptr())
        self.threads.append(threading.current_thread().name)
        return x


def pinning_threads() -> list[threading.Thread]:
    """The threads of loaders that are alive."""
    return [thread for thread in threading.enumerate() if "_pin_memory_loop" in thread.name]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGPU:
    return PretendedGPU(monkeypatch)
