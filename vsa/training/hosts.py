"""What the hosts of the ranks tell each other while their GPUs compute.

A collective of GPUs ends when they have done all that is queued before it, so a host that needs its result waits, and
afterwards its GPU waits for the host.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist


def connect_hosts(timeout: timedelta) -> dist.ProcessGroup:
    """Connect the ranks without their GPUs; a collective operation.

    Raises:
        ConnectionError: they have no common network, or it was not found.
    """
    try:
        group: Any = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConnectionError(
            f"the hosts of the ranks cannot connect ({reason}): GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
    return group


def hosts_of(strategy: Any) -> dist.ProcessGroup | None:
    """The group for collectives of CPU tensors; None: the default group."""
    return getattr(strategy, "hosts", None)


def largest(value: int, trainer: L.Trainer) -> int:
    """Largest value of all ranks; a collective operation that does not wait for GPUs."""
    if trainer.world_size == 1:
        return value
    table = torch.tensor(int(value), device="cpu")
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=hosts_of(trainer.strategy))
    return int(table)
