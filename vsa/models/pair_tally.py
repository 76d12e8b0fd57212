"""Query-key pairs of passes in which q and k decide how many tiles are kept, counted without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class PairTally:
    """Pairs of all heads, layers and samples since the last `take`.

    Args:
        device: device of the network that counts.
    """

    def __init__(self, device: torch.device):
        self._pairs, self._all = torch.zeros(2, dtype=torch.int64, device=device), 0

    def add(self, listed: Tensor, all_pairs: int) -> None:
        """Add a pass.

        Args:
            listed: int64 `[layers]`, pairs of its lists.
            all_pairs: pairs of its layers with dense attention.
        """
        self._pairs[int(torch.is_grad_enabled())] += listed.sum()
        self._all += all_pairs

    def take(self) -> tuple[Tensor, int]:
        """int64 `[2]` pairs of passes without and with a backward, and how many dense attention has; starts again."""
        taken = self._pairs, self._all
        self._pairs, self._all = torch.zeros_like(self._pairs), 0
        return taken
