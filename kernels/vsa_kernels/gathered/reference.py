"""References of gathered attention, by a dense token mask, and of greedy grouping, step by step.

B batch, L / S query / kv tokens, H heads, D head dim, Nq / Nkv query / kv tiles, G groups, R tiles per group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.block_sparse import reference
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.gathered.groups import TileGroups


def forward(
    q: Tensor, k: Tensor, v: Tensor, groups: TileGroups, q_blocks: Blocks, kv_blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `gathered_attn`."""
    index = groups.tile_index(q_blocks.num, kv_blocks.num)
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=None)
    return reference.forward(q, k, v, mask, scale)


def group(mask: Tensor, size: int) -> Tensor:
    """Members int32 `[B, H, G, size]` of `group_tiles` from a bool mask `[B, H, Nq, Nkv]`, all heads at a time."""
    batch, heads, num_q, _ = mask.shape
    rows = mask.flatten(0, 1)
    tile = torch.arange(num_q, device=mask.device)
    free = torch.ones(rows.shape[:2], dtype=torch.bool, device=mask.device)
    members = torch.full((batch * heads, -(-num_q // size), size), -1, dtype=torch.int32, device=mask.device)
    for i, num_free in enumerate(range(num_q, 0, -size)):
        # argmax returns the first free tile
        leader = free.int().argmax(-1)[:, None, None].expand(-1, 1, rows.shape[2])
        distance = (rows ^ rows.gather(1, leader)).sum(-1)
        # all ranks differ, and the leader's is the smallest, since no tile before it is free
        rank = torch.where(free, distance * num_q + tile, torch.iinfo(torch.int64).max)
        tile_indices = rank.topk(min(size, num_free), largest=False, sorted=True).indices
        members[:, i, : tile_indices.shape[1]] = tile_indices.int()
        free = free.scatter(1, tile_indices, False)
    return members.unflatten(0, (batch, heads))
