"""Running means by timestep decile.

B samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.diffusion.flow_matching import decile
from vsa.transfer import copy_async


class DecileMeans:
    """Running means of per-sample values by timestep decile.

    Args:
        device: device of the sums.
        finite_only: whether values that are not finite are left out; for training, which skips the update of such a
            step.

    Attributes:
        table: float64 `[2, 10]` sums and counts by decile.
    """

    def __init__(self, device: torch.device | str = "cpu", *, finite_only: bool = False):
        self.table = torch.zeros(2, 10, dtype=torch.float64, device=device)
        self._finite_only = finite_only

    def add(self, values: Tensor, sigmas: Tensor) -> None:
        """Add values `[B]` at noise levels `[B]`."""
        values = values.detach().double().to(self.table.device)
        valid = values.isfinite() if self._finite_only else torch.ones_like(values, dtype=torch.bool)
        # a sum over all samples for every decile: adding each sample to its own has no fixed order on a GPU
        member = (copy_async(decile(sigmas), values.device) == torch.arange(10, device=values.device)[:, None]) & valid
        self.table += torch.stack([torch.where(member, values, 0).sum(1), member.sum(1)])

    def gather(self, strategy: Any) -> None:
        """Sum over all ranks, on the CPU (a collective)."""
        self.table = strategy.reduce(self.table, reduce_op="sum").cpu()

    def metrics(self, name: str) -> dict[str, float]:
        """The overall mean as `name` and those of the deciles as `name_decile_D`; empty without values."""
        sums, counts = self.table.cpu()
        if counts.sum() == 0:
            return {}
        return {name: float(sums.sum() / counts.sum()), **self.by_decile(name)}

    def by_decile(self, name: str) -> dict[str, float]:
        """Means of the deciles that have values, as `name_decile_D`."""
        sums, counts = self.table.cpu()
        return {f"{name}_decile_{d}": float(sums[d] / counts[d]) for d in range(10) if counts[d] > 0}
