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

CONNECT = timedelta(minutes=1)
"""Time limit for hosts to connect, whose ranks have met before."""


def connect_hosts(device: torch.device, timeout: timedelta) -> dist.ProcessGroup | None:
    """Connect the ranks without their GPUs; a collective operation.

    Args:
        device: device of the rank; ranks on CPUs are connected already.
        timeout: time limit of a collective of the group.

    Returns:
        the group; None: the default group.

    Raises:
        ConnectionError: they have no common network, or it was not found within a minute.
    """
    if device.type == "cpu":
        return None
    try:
        # the time limit of a group is also that of its connection
        connected: Any = dist.new_group(backend="gloo", timeout=min(timeout, CONNECT))
        dist.destroy_process_group(connected)
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
