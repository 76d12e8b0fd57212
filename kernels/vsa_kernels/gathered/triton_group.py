"""Greedy grouping of query tiles on the GPU: one program per head of a sample, without waiting for the host.

Rows of the mask are packed into words of 32 kv tiles, and equal words of all query tiles are adjacent in memory. A
distance is the number of set bits of an XOR. The rank of a tile combines its distance and its number in one integer, so
that a minimum finds the next tile.

B batch, H heads, Nq / Nkv query / kv tiles, G groups, R tiles of a group, W words of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import cdiv, launch, next_power_of_2

_WORD = 32
# above every rank
_TAKEN = tl.constexpr(2147483647)


@triton.jit
def _count_bits(x):
    """Bits of every int32 of x."""
    # shifts of a negative number keep its sign, which the masks remove
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit(do_not_specialize=["num_q", "num_words", "num_groups"])
def _group_kernel(
    words, members, num_q, num_words, num_groups, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    p_words = words + i_bh * num_words * num_q
    p_members = members + i_bh * num_groups * SIZE
    o_q = tl.arange(0, BLOCK)
    # [BLOCK], 0 where a tile is in no group yet, else above every rank
    taken = tl.where(o_q < num_q, 0, _TAKEN)
    for i in range(num_groups):
        leader = tl.min(o_q | taken, 0)
        distance = tl.zeros([BLOCK], tl.int32)
        for w in range(num_words):
            b_words = tl.load(p_words + w * num_q + o_q, mask=o_q < num_q, other=0)
            distance += _count_bits(b_words ^ tl.load(p_words + w * num_q + leader))
        rank = (distance * BLOCK + o_q) | taken
        for r in tl.static_range(0, SIZE):
            # the leader's own rank is the smallest: distance 0, and no tile before it is free
            smallest = tl.min(rank, 0)
            tl.store(p_members + i * SIZE + r, tl.where(smallest == _TAKEN, -1, smallest % BLOCK))
            rank = tl.where(rank == smallest, _TAKEN, rank)
            taken = tl.where((o_q == smallest % BLOCK) & (smallest != _TAKEN), _TAKEN, taken)


def group(mask: Tensor, size: int) -> Tensor:
    """Members int32 `[B, H, G, size]` of `group_tiles` from a bool mask `[B, H, Nq, Nkv]`."""
    B, H, num_q, _ = mask.shape
    words = pack_bits(mask).transpose(2, 3).contiguous()
    num_groups = cdiv(num_q, size)
    members = words.new_empty((B, H, num_groups, size))
    block = max(16, next_power_of_2(num_q))
    launch(
        _group_kernel, (B * H,), words, members, num_q, words.shape[2], num_groups,
        SIZE=size, BLOCK=block, num_warps=max(1, min(16, block // 128)),
    )  # fmt: skip
    return members


def pack_bits(mask: Tensor) -> Tensor:
    """int32 `[..., W]`: bit b of word w is entry `32 * w + b` of a bool mask `[..., N]`; missing entries are 0."""
    padded = torch.nn.functional.pad(mask.view(torch.uint8), (0, -mask.shape[-1] % _WORD))
    place = torch.arange(8, device=mask.device, dtype=torch.uint8)
    packed = (padded.unflatten(-1, (-1, 8)) << place).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int32)
