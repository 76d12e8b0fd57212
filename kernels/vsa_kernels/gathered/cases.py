"""Calls that reach every kernel of gathered attention and of grouping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex
from vsa_kernels.gathered import api, longest_first
from vsa_kernels.gathered.groups import TileGroups
from vsa_kernels.testing import Call, Case, normal


def gathered_attn(case: Case) -> Iterator[Call]:
    """Groups of some sizes whose members attend to all of a list or to a part, of heads side by side and not."""
    D = case.q.shape[3]
    apart = tuple(torch.cat([x, x], -1)[..., :D] for x in (case.k, case.v))
    for size in _group_sizes(case):
        members = api.group_tiles(_listed(case, case.q_blocks.num), size, backend="reference")
        index = BlockIndex.from_dense(_listed(case, members.shape[2]))
        groups = TileGroups(
            members=members, kv_indices=index.kv_indices, kv_num_blocks=index.kv_num_blocks,
            order=longest_first(index.kv_num_blocks),
        )  # fmt: skip
        for some in (groups, replace(groups, kv_members=torch.full_like(groups.kv_indices, -1))):
            for keys in ((case.k, case.v), apart):
                yield Call(api.gathered_attn, (case.q, *keys, some), case.blocks)


def group_tiles(case: Case) -> Iterator[Call]:
    """Groups of one tile and of several."""
    for size in _group_sizes(case):
        yield Call(api.group_tiles, (_listed(case, case.q_blocks.num), size))


def _group_sizes(case: Case) -> set[int]:
    # whole groups of 128 tokens, and groups that are never whole
    return {1, 3, min(8, max(1, 128 // case.q_blocks.max_size))}


def _listed(case: Case, num_rows: int) -> Tensor:
    """A random mask `[B, H, rows, kv blocks]`, no row of which is empty."""
    mask = normal(case, case.q.shape[0], case.q.shape[2], num_rows, case.kv_blocks.num).detach() < 0
    return mask | (torch.arange(case.kv_blocks.num, device=mask.device) == 0)
