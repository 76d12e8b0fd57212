"""Distribution of the rows of tensors over the ranks that write them, and the safetensors file of each rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vsa.checkpoints.weight_files import DTYPES, ROWS

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """Rows of a tensor that one rank writes.

    Args:
        rows: the rows.
        first: index of the first row in the whole tensor.
        shape: shape of the whole tensor.
        written: whether this rank writes any rows.
    """

    rows: Tensor
    first: int
    shape: tuple[int, ...]
    written: bool

    @property
    def is_whole(self) -> bool:
        return tuple(self.rows.shape) == self.shape

    def copied(self) -> Part:
        """This part with a copy of the rows on the CPU."""
        return replace(self, rows=self.rows.detach().to("cpu", copy=True))


Parts = Mapping[str, Mapping[str, Part]]
"""By group ("model", "ema", "optimizer") and name; every rank has all names, including parts without rows to write."""


def share_of(first: int, count: int, holder: int, holders: int) -> tuple[int, int]:
    """First row and number of rows for one of several ranks that hold the same rows, in equal shares."""
    start, stop = (count * number // holders for number in (holder, holder + 1))
    return first + start, stop - start


def own_part(tensor: Tensor, rank: int = 0, world: int = 1) -> Part:
    """The rows of a tensor that this rank writes, without communication.

    Ranks that hold the same rows divide them, so that every byte is written once and all ranks write similar amounts.

    Args:
        tensor: tensor sharded by rows, or replicated on all ranks.
        rank: rank of this process.
        world: number of ranks that write.
    """
    shape, rows = tuple(tensor.shape), tensor.detach()
    first, count, holder, holders = 0, shape[0] if shape else 1, rank, world
    if isinstance(rows, DTensor):
        mesh, holder, holders = rows.device_mesh, 0, 1
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for size, at, placement in zip(mesh.shape, coordinate, rows.placements, strict=True):
            if placement.is_replicate():
                holder, holders = holder * size + at, holders * size
            elif not placement.is_shard(0):
                raise ValueError(f"checkpoints hold tensors that are sharded by rows, got {placement}")
        (count, *_), (first, *_) = compute_local_shape_and_global_offset(shape, mesh, rows.placements)
        rows = rows.to_local()
    if not shape or not shape[0]:
        # a scalar or an empty tensor has no rows to divide
        return Part(rows, 0, shape, written=rank == 0)
    start, number = share_of(first, count, holder, holders)
    return Part(rows.narrow(0, start - first, number), start, shape, written=number > 0)


def own_parts(tensors: Mapping[str, Mapping[str, Tensor]], rank: int = 0, world: int = 1) -> Parts:
    """The rows that this rank writes of groups of tensors, see `own_part`."""
    return {group: {name: own_part(t, rank, world) for name, t in own.items()} for group, own in tensors.items()}


def size_of(parts: Parts) -> int:
    """Total bytes of all tensors, over all ranks."""
    every = (part for group in parts.values() for part in group.values())
    return sum(part.rows.element_size() * torch.Size(part.shape).numel() for part in every)


def save_file(path: Path, parts: Mapping[str, Part]) -> str:
    """Write one rank's parts of a group of tensors as a safetensors file; returns its SHA-256.

    Tensors are copied to the CPU one at a time, whereas the library's writer needs all of them at once. A part is
    stored under the name of its tensor; the metadata contain its first row and the number of rows of the whole tensor.

    Args:
        path: file to write.
        parts: parts by name; those without rows are left out.
    """
    parts_to_write = {name: part for name, part in parts.items() if part.written}
    # in descending order of element size, so that every tensor is aligned
    names = sorted(parts_to_write, key=lambda name: (-parts_to_write[name].rows.element_size(), name))
    rows = {
        name: [parts_to_write[name].first, parts_to_write[name].shape[0]]
        for name in names
        if not parts_to_write[name].is_whole
    }
    header: dict[str, Any] = {"__metadata__": {ROWS: json.dumps(rows, separators=(",", ":"))}} if rows else {}
    end = 0
    for name in names:
        tensor = parts_to_write[name].rows
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data: Any) -> None:
            file.write(data)
            digest.update(data)

        write(len(text).to_bytes(8, "little"))
        write(text)
        for name in names:
            # not bound to a name, so that it is freed before the next tensor is copied
            write(parts_to_write[name].rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
