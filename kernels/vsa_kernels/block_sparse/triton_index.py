"""The transposed index: which query blocks list a kv block, for the backward of k and v.

Three launches, no atomics, no waiting for the device. `_mark` sets one bit per listed (row, column) in a word per
32 rows and column; `_count` adds up a column's bits; `_list` writes the rows of every column where the counts say.

Nq / Nkv query / kv blocks, G groups of 32 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import launch

# Entries of a row read at a time, and columns of a program: one warp each.
_BLOCK_K = 64
_BLOCK_N = 32
# Groups and columns added up at a time.
_BLOCK_G = 16
_BLOCK_SUM = 256


class TransposedIndex(NamedTuple):
    """Query blocks of each kv block, as one ragged list per (batch, head).

    Args:
        row_offsets: int32 `[B|1, H|1, Nkv + 1]`, kv block n has `rows[row_offsets[n] : row_offsets[n + 1]]`.
        rows: int32 `[B|1, H|1, Nq * Kmax]` query blocks, ascending for each kv block; the rest is undefined.
    """

    row_offsets: Tensor
    rows: Tensor


@triton.jit
def _ones(x):
    """Number of bits set in each uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["capacity"])
def _mark_kernel(
    kv_indices, kv_num_blocks, marks, capacity, num_q, num_kv, num_groups,
    BLOCK_K: tl.constexpr, BLOCK_SUM: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(0) % num_groups
    i_bh = (tl.program_id(0) // num_groups).to(tl.int64)
    # A word is four bytes of eight rows each. At step r the rows r, 8 + r, 16 + r and 24 + r set a bit: each in a byte
    # of its own, and a row lists a column once, so no two threads change the same byte in a step.
    o_byte = tl.arange(0, 4)
    o_k = tl.arange(0, BLOCK_K)
    p_marks = marks + (i_bh * num_groups + i_g) * num_kv * 4
    o_n = tl.arange(0, 4 * BLOCK_SUM)
    for n in range(0, num_kv * 4, 4 * BLOCK_SUM):
        tl.store(p_marks + n + o_n, tl.zeros((4 * BLOCK_SUM,), tl.uint8), mask=n + o_n < num_kv * 4)
    for r in range(8):
        # [4]
        o_q = i_g * 32 + o_byte * 8 + r
        row = i_bh * num_q + o_q
        counts = tl.load(kv_num_blocks + row, mask=o_q < num_q, other=0)
        # also orders the zeros above before the first step
        tl.debug_barrier()
        for k in range(0, tl.max(counts, 0), BLOCK_K):
            # [4, BLOCK_K]
            m_k = (k + o_k)[None, :] < counts[:, None]
            column = tl.load(kv_indices + row[:, None] * capacity + (k + o_k)[None, :], mask=m_k, other=0)
            p_byte = p_marks + column * 4 + o_byte[:, None]
            b_marks = tl.load(p_byte, mask=m_k, other=0)
            tl.store(p_byte, (b_marks | (1 << r)).to(tl.uint8), mask=m_k)


@triton.jit
def _count_kernel(marks, counts, num_kv, num_groups, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    num_tiles = tl.cdiv(num_kv, BLOCK_N)
    i_bh = (tl.program_id(0) // num_tiles).to(tl.int64)
    o_n = tl.program_id(0) % num_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    o_g = tl.arange(0, BLOCK_G)
    total = tl.zeros((BLOCK_N,), tl.int32)
    for g in range(0, num_groups, BLOCK_G):
        # [BLOCK_G, BLOCK_N]
        m_marks = (g + o_g < num_groups)[:, None] & (o_n < num_kv)[None, :]
        p_marks = marks + (i_bh * num_groups + g + o_g)[:, None] * num_kv + o_n[None, :]
        words = tl.load(p_marks, mask=m_marks, other=0).to(tl.uint32, bitcast=True)
        total += tl.sum(_ones(words), 0)
    tl.store(counts + i_bh * num_kv + o_n, total, mask=o_n < num_kv)


@triton.jit(do_not_specialize=["capacity"])
def _list_kernel(
    marks, counts, row_offsets, rows, capacity, num_q, num_kv, num_groups,
    BLOCK_N: tl.constexpr, BLOCK_SUM: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(num_kv, BLOCK_N)
    i_bh = (tl.program_id(0) // num_tiles).to(tl.int64)
    first = tl.program_id(0) % num_tiles * BLOCK_N
    o_n = first + tl.arange(0, BLOCK_N)
    m_n = o_n < num_kv
    p_counts = counts + i_bh * num_kv
    o_sum = tl.arange(0, BLOCK_SUM)
    earlier = tl.zeros((BLOCK_SUM,), tl.int32)
    for n in range(0, first, BLOCK_SUM):
        earlier += tl.load(p_counts + n + o_sum, mask=n + o_sum < first, other=0)
    # [BLOCK_N]
    b_counts = tl.load(p_counts + o_n, mask=m_n, other=0)
    stop = tl.sum(earlier, 0) + tl.cumsum(b_counts, 0)
    p_offsets = row_offsets + i_bh * (num_kv + 1)
    tl.store(p_offsets + o_n + 1, stop, mask=m_n)
    tl.store(p_offsets + o_n, stop - b_counts, mask=m_n & (o_n == 0))

    p_place = rows + i_bh * num_q * capacity + (stop - b_counts)
    p_marks = marks + i_bh * num_groups * num_kv + o_n
    words = tl.load(p_marks, mask=m_n, other=0).to(tl.uint32, bitcast=True)
    for g in range(num_groups):
        # the next group is on its way while this one is listed
        p_marks += num_kv
        ahead = tl.load(p_marks, mask=m_n & (g + 1 < num_groups), other=0).to(tl.uint32, bitcast=True)
        for _ in range(tl.max(_ones(words), 0)):
            # every column lists its lowest row
            rest = words & (words - 1)
            # the exponent of a power of two is its bit
            bit = ((words ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            some = words != 0
            tl.store(p_place, g * 32 + bit, mask=some)
            p_place += some.to(tl.int32)
            words = rest
        words = ahead


def transpose(kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int) -> TransposedIndex:
    """The query blocks of each kv block.

    Args:
        kv_indices: int32 `[B|1, H|1, Nq, Kmax]`, distinct in a row; entries past the count are not read.
        kv_num_blocks: int32 `[B|1, H|1, Nq]`.
        num_kv_blocks: Nkv.
    """
    kv_indices, kv_num_blocks = kv_indices.contiguous(), kv_num_blocks.contiguous()
    B, H, Nq, capacity = kv_indices.shape
    groups = triton.cdiv(Nq, 32)
    marks = kv_indices.new_empty((B, H, groups, num_kv_blocks))
    counts = kv_indices.new_empty((B, H, num_kv_blocks))
    row_offsets = kv_indices.new_empty((B, H, num_kv_blocks + 1))
    rows = kv_indices.new_empty((B, H, Nq * capacity))
    tiles = triton.cdiv(num_kv_blocks, _BLOCK_N)
    launch(
        _mark_kernel,
        (B * H * groups,),
        kv_indices,
        kv_num_blocks,
        marks.view(torch.uint8),
        capacity,
        Nq,
        num_kv_blocks,
        groups,
        BLOCK_K=_BLOCK_K,
        BLOCK_SUM=_BLOCK_SUM,
        num_warps=1,
    )
    launch(
        _count_kernel,
        (B * H * tiles,),
        marks,
        counts,
        num_kv_blocks,
        groups,
        BLOCK_G=_BLOCK_G,
        BLOCK_N=_BLOCK_N,
        num_warps=1,
    )
    launch(
        _list_kernel,
        (B * H * tiles,),
        marks,
        counts,
        row_offsets,
        rows,
        capacity,
        Nq,
        num_kv_blocks,
        groups,
        BLOCK_N=_BLOCK_N,
        BLOCK_SUM=_BLOCK_SUM,
        num_warps=1,
    )
    return TransposedIndex(row_offsets=row_offsets, rows=rows)
