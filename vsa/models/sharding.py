"""Parameters that may be spread over ranks: reading and writing them one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU, gathered when it is sharded (a collective then: call it on every rank)."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True)


@torch.no_grad()
def fill(parameter: Tensor, rows: Callable[[int, int], Tensor]) -> None:
    """Copy values into this rank's part of a parameter; nothing is communicated.

    Args:
        parameter: the target, sharded or not, with at least one dimension.
        rows: `rows(start, stop)` gives that range of the full tensor's first dimension on the CPU. A rank asks only
            for the rows it holds.
    """
    count = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        parameter.copy_(rows(0, count))
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(isinstance(p, Shard) and p.dim != 0 for p in placements):
        value = rows(0, count).to(mesh.device_type)
        parameter.to_local().copy_(distribute_tensor(value, mesh, placements, src_data_rank=None).to_local())
        return
    # the rows of this rank, found by sharding their numbers in the same way
    numbers = torch.arange(count, device=mesh.device_type)
    mine = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()
    if len(mine):
        start, stop = int(mine[0]), int(mine[-1]) + 1
        assert stop - start == len(mine), "the rows of a rank are contiguous"
        parameter.to_local().copy_(rows(start, stop))
