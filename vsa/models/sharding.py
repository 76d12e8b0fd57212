"""Reading and writing of parameters, sharded over ranks or not, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Module = TypeVar("Module", bound=nn.Module)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; for a sharded tensor this is a collective that every rank must call."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def offloading(offload: bool, device_type: str) -> OffloadPolicy:
    """Where shards stay between their uses: in the memory of the host, page-locked beside a GPU, or on the device."""
    return CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()


def sharded(module: Module, mesh: DeviceMesh | None, *, offload: bool = False) -> Module:
    """The module with its parameters sharded over `mesh`, also after a forward without backward; None: unchanged."""
    if mesh is not None:
        policy = offloading(offload, mesh.device_type)
        fully_shard(module.to(mesh.device_type), mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    return module


def place(value: Tensor, like: Tensor) -> Tensor:
    """A copy of `value` with the device and sharding of `like` in its own dtype; reads only the part of this rank."""
    if not isinstance(like, DTensor):
        return value.to(like.device, copy=True)
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    part = part.to(like.device, copy=True).contiguous()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def fill(parameter: Tensor, rows: Callable[[int, int], Tensor]) -> None:
    """Copy values into this rank's part of a parameter without communication.

    Args:
        parameter: the target, sharded or not, with at least one dimension.
        rows: `rows(start, stop)` returns that range of the full tensor's first dimension on the CPU. A rank requests
            only the rows that it holds.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(rows(0, parameter.shape[0]))
        return
    mesh = parameter.device_mesh
    (count, *sizes), (first, *starts) = compute_local_shape_and_global_offset(
        parameter.shape, mesh, parameter.placements
    )
    if count:
        columns = (slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        parameter.to_local().copy_(rows(first, first + count)[(slice(None), *columns)])
