"""Groups of query tiles that fill a program of 128 rows, from the kv tiles that each query tile keeps.

B batch, H heads, Nq / Nkv query / kv tiles, G groups, R tiles of a group, Kmax list capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, TileGroups, group_tiles, longest_first

Merge = Literal["xor", "consecutive"]
Attend = Literal["union", "tile"]


def plan_groups(
    index: BlockIndex,
    num_kv: int,
    size: int,
    *,
    merge: Merge = "xor",
    attend: Attend = "union",
    samples: Sequence[int] = (),
    backend: str | None = None,
) -> TileGroups:
    """Groups of query tiles with the union of their tiles' lists, longest lists first; never waits for the device.

    Args:
        index: lists `[B, H, Nq, Kmax]` of the kv tiles that each query tile keeps.
        num_kv: Nkv, number of kv tiles.
        size: R, tiles per group.
        merge: xor (similar rows, see `group_tiles`) or consecutive (runs of `size` tiles).
        attend: union (every query of a group attends to all kv tiles of the group) or tile (a query attends to the kv
            tiles of its own tile; the others are computed and masked). The paper computes the union and states neither.
        samples: number of query tiles of each sample of the row, which no group crosses; empty: one sample.
        backend: backend of `group_tiles`.

    Source: FG-Attn (arXiv 2509.16518), section 5.2.
    """
    mask = index.to_dense(num_kv)
    members = _members(mask, size, merge, samples or (mask.shape[2],), backend)
    # [B, H, G, R, Nkv]
    rows = mask.gather(2, members.clamp(min=0).long().flatten(2)[..., None].expand(-1, -1, -1, num_kv))
    rows = rows.unflatten(2, members.shape[2:]) & (members >= 0)[..., None]
    union = BlockIndex.from_dense(rows.any(3))
    attending = None
    # a group of one tile lists only its own kv tiles
    if attend == "tile" and size > 1:
        member = torch.arange(size, device=mask.device, dtype=torch.int32)[:, None]
        attending = (rows.int() << member).sum(3, dtype=torch.int32).gather(-1, union.kv_indices.long())
    return TileGroups(
        members=members,
        kv_indices=union.kv_indices,
        kv_num_blocks=union.kv_num_blocks,
        kv_members=attending,
        order=longest_first(union.kv_num_blocks),
    )


def _members(mask: Tensor, size: int, merge: Merge, samples: Sequence[int], backend: str | None) -> Tensor:
    """Members int32 `[B, H, G, size]` of the groups, sample after sample."""
    parts, first = [], 0
    for rows in mask.split(list(samples), dim=2):
        if merge == "xor" and size > 1:
            group = group_tiles(rows, size, backend=backend)
        else:
            groups = -(-rows.shape[2] // size)
            tile = torch.arange(groups * size, device=mask.device, dtype=torch.int32).view(groups, size)
            group = torch.where(tile < rows.shape[2], tile, -1).expand(*rows.shape[:2], groups, size)
        parts.append(torch.where(group < 0, -1, group + first))
        first += rows.shape[2]
    return torch.cat(parts, dim=2)
