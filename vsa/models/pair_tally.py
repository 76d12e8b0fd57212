"""Query-key pairs of passes in which q and k decide how many tiles are kept, counted without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PairTally:
    """Pairs of all heads, layers and samples since the last `take`.

    Args:
        device: device of the network that counts.
    """

    def __init__(self, device: torch.device):
        self._pairs, self._all = torch.zeros(3, dtype=torch.int64, device=device), 0

    def add(self, slots: Sequence[Tensor], layers: int, all_pairs: int) -> None:
        """Add a pass.

        Args:
            slots: pairs of each layer in each row, int64 scalars, below 0 where a layer did not report any.
            layers: number of layers.
            all_pairs: pairs of its layers with dense attention.
        """
        if len(slots) < layers:
            raise ValueError(
                f"{layers} layers must report their pairs, got {len(slots)}: expected ctx.layer(index) of each"
            )
        listed = torch.stack(tuple(slots))
        self._pairs[int(torch.is_grad_enabled())] += listed.sum()
        self._pairs[2] += (listed < 0).sum()
        self._all += all_pairs

    def take(self) -> tuple[Tensor, int]:
        """int64 `[3]` pairs of passes without and with a backward and the number of layers that did not report any, and
        how many pairs dense attention has; starts again."""
        taken = self._pairs, self._all
        self._pairs, self._all = torch.zeros_like(self._pairs), 0
        return taken
