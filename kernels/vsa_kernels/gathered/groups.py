"""Groups of query tiles that are computed together, and the kv tiles that each group lists.

B batch, H heads, Nq / Nkv query / kv tiles, G groups, R largest number of tiles in a group, Kmax list capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks, pack

_LENGTHS = 8


@dataclass(frozen=True, kw_only=True)
class TileGroups:
    """Groups of query tiles with one list of kv tiles per group; every query tile belongs to one group.

    Args:
        members: int32 `[B, H, G, R]` query tiles of each group, padded with -1 at the end.
        kv_indices: int32 `[B, H, G, Kmax]`; the first `kv_num_blocks` entries of a row are distinct and ascending, the
            rest is never read.
        kv_num_blocks: int32 `[B, H, G]`.
        kv_members: int32 like `kv_indices`, bit r is set where member r attends to the entry; None: all members do.
        order: int32 `[B * H * G]`, permutation in which the groups are computed; None: ascending. It changes the speed
            only, not the result.
    """

    members: Tensor
    kv_indices: Tensor
    kv_num_blocks: Tensor
    kv_members: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self):
        pack(self, "members", "kv_indices", "kv_num_blocks")

    def to_dense(self, num_q: int, num_kv: int) -> Tensor:
        """Bool mask `[B, H, num_q, num_kv]` of the tiles that each query tile attends to."""
        capacity, size = self.kv_indices.shape[-1], self.members.shape[-1]
        in_list = torch.arange(capacity, device=self.members.device) < self.kv_num_blocks[..., None]
        # entries past the count go to a spare column, missing members to a spare row
        column = torch.where(in_list, self.kv_indices, num_kv).long()
        row = torch.where(self.members < 0, num_q, self.members).long().flatten(2)
        attending = torch.full_like(self.kv_indices, -1) if self.kv_members is None else self.kv_members
        bits = attending.new_zeros((*column.shape[:-1], num_kv + 1)).scatter_(-1, column, attending)
        # [B, H, G, R, Nkv]
        member = torch.arange(size, device=bits.device, dtype=bits.dtype)[:, None]
        by_member = (bits[..., None, :num_kv] >> member) & 1
        mask = torch.zeros((*row.shape[:2], num_q + 1, num_kv), dtype=torch.bool, device=bits.device)
        at = row[..., None].expand(*row.shape, num_kv)
        return mask.scatter_(2, at, by_member.flatten(2, 3).bool())[:, :, :num_q]

    def tile_index(self, num_q: int, num_kv: int) -> BlockIndex:
        """The same mask as one list per query tile `[B, H, num_q, num_kv]`, for `block_sparse_attn`."""
        return BlockIndex.from_dense(self.to_dense(num_q, num_kv))


def longest_first(kv_num_blocks: Tensor) -> Tensor:
    """Permutation int32 `[B * H * G]` that computes the groups with the longest lists first.

    The groups that start last are then short, and no program runs on alone at the end. Lengths are rounded to eighths
    of the longest list, so that groups of similar length keep their order: those of one head run together and share
    its keys and values in the cache.

    Args:
        kv_num_blocks: int32 `[B, H, G]` kv tiles of each group.

    Source: FG-Attn (arXiv 2509.16518), section 5.2: longest processing time first. The eighths are ours.
    """
    counts = kv_num_blocks.flatten()
    if not counts.numel():
        # a batch of no samples
        return counts
    length = counts * _LENGTHS // (counts.amax() + 1)
    return torch.sort(length, descending=True, stable=True).indices.int()


def full_entries(groups: TileGroups, kv_blocks: Blocks) -> Tensor:
    """Number of entries of every list before its first short kv tile, int32 `[B, H, G]`."""
    if kv_blocks.min_size == kv_blocks.max_size:
        return groups.kv_num_blocks
    tile = torch.arange(kv_blocks.num, device=kv_blocks.offsets.device)
    first_short = torch.where(kv_blocks.sizes < kv_blocks.max_size, tile, kv_blocks.num).amin()
    slot = torch.arange(groups.kv_indices.shape[-1], device=tile.device)
    full = (groups.kv_indices < first_short) & (slot < groups.kv_num_blocks[..., None])
    return full.sum(-1, dtype=torch.int32)
