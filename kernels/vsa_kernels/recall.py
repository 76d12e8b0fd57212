"""What the backward knows of the recall: the attention mass of every selected block, and an estimate of what was left.

In the backward the probabilities are exact, so the mass of each (query block, kv block) pair costs one float. One
random unselected kv block per query block, the probe, is looked at and left out of everything else: with n unselected
blocks, n * sum over the probe of exp(s - lse) is on average the ratio of unselected to selected mass of a query row.

B batch, H heads, Nq / Nkv query / kv blocks, Kmax list capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.checks import check_device
from vsa_kernels.selection.api import list_capacity


class MissedShare(NamedTuple):
    """Share of the full attention's mass that the selection leaves out.

    Args:
        per_head: fp32 `[B, H]`.
        overall: fp32 scalar, from the ratio of all rows of all heads.
    """

    per_head: Tensor
    overall: Tensor


@dataclass(frozen=True, kw_only=True)
class RecallBuffer:
    """Caller-allocated; each backward of `coarse_fine_attn(..., recall=)` overwrites it. A forward alone does not.

    Two calls whose backward is still to come need two buffers.

    Args:
        record: fp32 `[B, H, Nq, Kmax + 1]`, see `mass` and `ratio`.
        probe: int32 `[B, H, Nq]` unselected kv block that was looked at, -1 where all are selected.
        seed: int64 scalar on the device, read by the backward: the same seed and selection give the same probes.
        weights: fp32 `[Nq]`, share of each query block in the tokens.
    """

    record: Tensor
    probe: Tensor
    seed: Tensor
    weights: Tensor

    @classmethod
    def allocate(
        cls, q_blocks: Blocks, kv_blocks: Blocks, *, batch: int, heads: int, topk: int, seed: int = 0
    ) -> RecallBuffer:
        """An empty buffer (mass 0, no probe) on the device of the blocks.

        Args:
            q_blocks: of the calls.
            kv_blocks: of the calls.
            batch: B.
            heads: H, query heads.
            topk: largest of the calls.
            seed: see `reseed`.
        """
        device, rows = q_blocks.offsets.device, (batch, heads, q_blocks.num)
        sizes = q_blocks.sizes.float()
        return cls(
            record=torch.zeros(*rows, list_capacity(topk, kv_blocks.num) + 1, device=device),
            probe=torch.full(rows, -1, dtype=torch.int32, device=device),
            seed=torch.full((), seed, dtype=torch.int64, device=device),
            weights=sizes / sizes.sum(),
        )

    @property
    def mass(self) -> Tensor:
        """fp32 `[B, H, Nq, Kmax]`: share of the selected mass in each listed kv block, in the order of the list.

        The mean over the query block's rows; a row of the list sums to 1, entries past its count are 0.
        """
        return self.record[..., :-1]

    @property
    def ratio(self) -> Tensor:
        """fp32 `[B, H, Nq]`: unselected to selected mass, mean over the query block's rows, from the probe alone."""
        return self.record[..., -1]

    def reseed(self, seed: int) -> None:
        """Other probes from the next backward on: a new seed at every step. Does not wait for the device."""
        self.seed.fill_(seed)

    def missed_share(self) -> MissedShare:
        """R / (1 + R), where R is the mean of the ratio over the query rows.

        R is unbiased over the seeds. The exact R / (1 + R) is at least the mean of the rows' own shares, and equal to
        it where all rows have one ratio; the noise of an R from few probes lowers it on average.
        """
        ratio = (self.ratio * self.weights).sum(-1)
        # in this form an infinite ratio is a share of 1
        return MissedShare(1 / (1 + 1 / ratio), 1 / (1 + 1 / ratio.mean()))

    def check(self, q: Tensor, num_q: int, capacity: int) -> None:
        """Raises a ValueError where a call with queries q `[B, L, H, D]` cannot fill the buffer."""
        B, _, H, _ = q.shape
        record = self.record
        if record.shape[:3] != (B, H, num_q) or record.shape[3] <= capacity:
            raise ValueError(
                f"recall must hold [{B}, {H}, {num_q}] rows of at least {capacity} blocks, "
                f"got {list(record.shape[:3])} of {record.shape[3] - 1}"
            )
        expected = {"record": torch.float32, "probe": torch.int32, "seed": torch.int64}
        for name, dtype in expected.items():
            x = getattr(self, name)
            if x.dtype != dtype:
                raise ValueError(f"recall.{name} must be {dtype}, got {x.dtype}")
            check_device(f"recall.{name}", x, "q", q)
        if self.probe.shape != record.shape[:3] or self.seed.numel() != 1:
            raise ValueError(
                f"recall.probe and recall.seed must be {list(record.shape[:3])} and one number, "
                f"got {list(self.probe.shape)} and {list(self.seed.shape)}"
            )
