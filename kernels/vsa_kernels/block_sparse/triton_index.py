"""Transpose of a block index: the query blocks that list each kv block, for the backward of k and v.

Three launches that do not wait for the device. `_mark` sets one bit per listed (row, column) pair in a word per 32 rows
and column, by an atomic OR, whose order does not matter; `_count` sums the bits of a column; `_list` writes 32 rows of
every column at the offsets that follow from the counts. Mask ids, or places of entries in their rows, pass through a
table with one element per pair. `long_first` orders the kv blocks by the lengths of these lists in a fourth launch.

B batch, H / Hkv heads, Nq / Nkv query / kv blocks, G groups of 32 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import cdiv, launch

# Entries of 32 rows that are read at a time (four warps), and columns per program (one warp).
_BLOCK_K = 32
_BLOCK_N = 32
# Groups and columns that are summed at a time.
_BLOCK_G = 16
_BLOCK_SUM = 256
# Kv blocks that a program of eight warps orders.
_BLOCK_ORDER = 2048


class TransposedIndex(NamedTuple):
    """Query blocks of each kv block, as one ragged list per (batch, head).

    Args:
        row_offsets: int32 `[B|1, H|1, Nkv + 1]`, kv block n has `rows[row_offsets[n] : row_offsets[n + 1]]`.
        rows: int32 `[B|1, H|1, Nq * Kmax]` query blocks, ascending for each kv block; the rest is undefined.
        ids: int32 like `rows`, the mask id of each entry or its place in its row; None without either.
    """

    row_offsets: Tensor
    rows: Tensor
    ids: Tensor | None


@triton.jit
def _ones(x):
    """Number of bits set in each uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["capacity"])
def _mark_kernel(
    kv_indices, kv_num_blocks, first, mask_ids, marks, table, capacity, num_q, num_kv, num_groups,
    FINE: tl.constexpr, PLACES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_SUM: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(0) % num_groups
    i_bh = (tl.program_id(0) // num_groups).to(tl.int64)
    o_k, o_n, o_q = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_SUM), tl.arange(0, 32)
    p_marks = marks + (i_bh * num_groups + i_g) * num_kv
    for n in range(0, num_kv, BLOCK_SUM):
        tl.store(p_marks + n + o_n, tl.zeros((BLOCK_SUM,), tl.int32), mask=n + o_n < num_kv)
    # the zeros are there before any bit
    tl.debug_barrier()
    m_q = i_g * 32 + o_q < num_q
    row = i_bh * num_q + i_g * 32 + o_q
    counts = tl.load(kv_num_blocks + row, mask=m_q, other=0)
    p_slot = row * capacity
    if FINE:
        b_first = tl.load(first + row, mask=m_q, other=0)
        counts -= b_first
        p_slot += b_first
    for k in range(0, tl.max(counts, 0), BLOCK_K):
        # [32, BLOCK_K]
        m_k = (k + o_k)[None, :] < counts[:, None]
        o_slot = p_slot[:, None] + (k + o_k)[None, :]
        column = tl.load(kv_indices + o_slot, mask=m_k, other=0)
        tl.atomic_or(p_marks + column, (1 << o_q)[:, None], mask=m_k, sem="relaxed")
        if FINE:
            b_ids = tl.load(mask_ids + o_slot, mask=m_k, other=0)
            tl.store(table + row[:, None] * num_kv + column, b_ids, mask=m_k)
        if PLACES:
            tl.store(table + row[:, None] * num_kv + column, (k + o_k)[None, :], mask=m_k)


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
    marks, counts, table, row_offsets, rows, ids, capacity, num_q, num_kv, num_groups,
    HAS_IDS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SUM: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(num_kv, BLOCK_N)
    i_g, i_tile = tl.program_id(0) % num_groups, tl.program_id(0) // num_groups % num_tiles
    i_bh = (tl.program_id(0) // num_groups // num_tiles).to(tl.int64)
    first = i_tile * BLOCK_N
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
    if i_g == 0:
        p_offsets = row_offsets + i_bh * (num_kv + 1)
        tl.store(p_offsets + o_n + 1, stop, mask=m_n)
        tl.store(p_offsets + o_n, stop - b_counts, mask=m_n & (o_n == 0))

    place = i_bh * num_q * capacity + (stop - b_counts)
    o_g = tl.arange(0, BLOCK_G)
    p_marks = marks + i_bh * num_groups * num_kv + o_n
    for g in range(0, i_g, BLOCK_G):
        # [BLOCK_G, BLOCK_N]
        m_marks = (g + o_g < i_g)[:, None] & m_n[None, :]
        above = tl.load(p_marks[None, :] + (g + o_g)[:, None] * num_kv, mask=m_marks, other=0)
        place += tl.sum(_ones(above.to(tl.uint32, bitcast=True)), 0)
    words = tl.load(p_marks + i_g * num_kv, mask=m_n, other=0).to(tl.uint32, bitcast=True)
    for _ in range(tl.max(_ones(words), 0)):
        # every column lists its lowest row
        rest = words & (words - 1)
        # the exponent of a power of two is its bit
        bit = ((words ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        some = words != 0
        tl.store(rows + place, i_g * 32 + bit, mask=some)
        if HAS_IDS:
            b_ids = tl.load(table + (i_bh * num_q + i_g * 32 + bit) * num_kv + o_n, mask=some, other=0)
            tl.store(ids + place, b_ids, mask=some)
        place += some.to(tl.int32)
        words = rest


@triton.jit
def _column_lengths(
    row_offsets, fine_offsets, o_column, num, at_b, at_h, Hkv, num_kv, GROUP: tl.constexpr, FINE: tl.constexpr
):
    """Entries of the kv blocks o_column of all batches and kv heads, over the heads of a group; 0 past the end."""
    m_column = o_column < num
    o_bh = o_column // num_kv
    o_at = o_bh // Hkv * at_b + o_bh % Hkv * GROUP * at_h + o_column % num_kv
    length = tl.zeros_like(o_column)
    for _ in range(GROUP):
        length += tl.load(row_offsets + o_at + 1, mask=m_column, other=0)
        length -= tl.load(row_offsets + o_at, mask=m_column, other=0)
        if FINE:
            length += tl.load(fine_offsets + o_at + 1, mask=m_column, other=0)
            length -= tl.load(fine_offsets + o_at, mask=m_column, other=0)
        o_at += at_h
    return length


@triton.jit(do_not_specialize=["at_b", "at_h", "B", "H", "num_kv"])
def _order_kernel(
    row_offsets, fine_offsets, order, at_b, at_h, B, H, num_kv,
    GROUP: tl.constexpr, FINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    Hkv = H // GROUP
    num = B * Hkv * num_kv
    o = tl.arange(0, BLOCK)
    entries = tl.zeros((BLOCK,), tl.int64)
    for i in range(0, B * H, BLOCK):
        o_end = (i + o) // H * at_b + (i + o) % H * at_h + num_kv
        entries += tl.load(row_offsets + o_end, mask=i + o < B * H, other=0)
        if FINE:
            entries += tl.load(fine_offsets + o_end, mask=i + o < B * H, other=0)
    # 1.5 times the mean, rounded down
    most = 3 * tl.sum(entries, 0) // (2 * num)
    # every program counts the long lists of all blocks, so that none waits for another
    longs, before = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for i in range(0, num, BLOCK):
        lengths = _column_lengths(row_offsets, fine_offsets, i + o, num, at_b, at_h, Hkv, num_kv, GROUP, FINE)
        long = (lengths > most).to(tl.int32)
        longs += long
        before += tl.where(i < first, long, 0)
    lengths = _column_lengths(row_offsets, fine_offsets, first + o, num, at_b, at_h, Hkv, num_kv, GROUP, FINE)
    long = (lengths > most).to(tl.int32)
    rank = tl.sum(before, 0) + tl.cumsum(long, 0) - long
    place = tl.where(long != 0, rank, tl.sum(longs, 0) + first + o - rank)
    tl.store(order + place, first + o, mask=first + o < num)


def transpose(
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    num_kv_blocks: int,
    *,
    first: Tensor | None = None,
    mask_ids: Tensor | None = None,
    places: bool = False,
) -> TransposedIndex:
    """The query blocks of each kv block.

    Args:
        kv_indices: int32 `[B|1, H|1, Nq, Kmax]`, distinct in a row; entries past the count are not read.
        kv_num_blocks: int32 `[B|1, H|1, Nq]`.
        num_kv_blocks: Nkv.
        first: int32 like `kv_num_blocks`, entries of a row before it are left out; requires `mask_ids`.
        mask_ids: int32 like `kv_indices`, mask id of each entry; requires `first`.
        places: whether each entry gets its place in its row, instead of a mask id.
    """
    lists, counts = kv_indices.contiguous(), kv_num_blocks.contiguous()
    first, mask_ids = (None if x is None else x.contiguous() for x in (first, mask_ids))
    B, H, Nq, capacity = lists.shape
    groups, tiles = cdiv(Nq, 32), cdiv(num_kv_blocks, _BLOCK_N)
    marks = lists.new_empty((B, H, groups, num_kv_blocks))
    column_counts = lists.new_empty((B, H, num_kv_blocks))
    row_offsets = lists.new_empty((B, H, num_kv_blocks + 1))
    rows = lists.new_empty((B, H, Nq * capacity))
    table = ids = None
    if mask_ids is not None or places:
        table, ids = lists.new_empty((B, H, Nq, num_kv_blocks)), torch.empty_like(rows)
    sizes = (Nq, num_kv_blocks, groups)
    launch(
        _mark_kernel, (B * H * groups,),
        lists, counts, first, mask_ids, marks, table, capacity, *sizes,
        FINE=mask_ids is not None, PLACES=places, BLOCK_K=_BLOCK_K, BLOCK_SUM=_BLOCK_SUM, num_warps=4,
    )  # fmt: skip
    launch(
        _count_kernel, (B * H * tiles,),
        marks, column_counts, num_kv_blocks, groups, BLOCK_G=_BLOCK_G, BLOCK_N=_BLOCK_N, num_warps=1,
    )  # fmt: skip
    launch(
        _list_kernel, (B * H * tiles * groups,),
        marks, column_counts, table, row_offsets, rows, ids, capacity, *sizes,
        HAS_IDS=ids is not None, BLOCK_G=_BLOCK_G, BLOCK_N=_BLOCK_N, BLOCK_SUM=_BLOCK_SUM, num_warps=1,
    )  # fmt: skip
    return TransposedIndex(row_offsets=row_offsets, rows=rows, ids=ids)


def long_first(columns: TransposedIndex, masked: TransposedIndex | None, batch: int, heads: int, group: int) -> Tensor:
    """Permutation int32 `[B * Hkv * Nkv]` of the kv blocks of all batches and kv heads: long lists come first.

    A list is long above 1.5 times the mean, as that of a block in every query block's list (an attention sink). Such
    a program would run on alone at the end if it started late. Both classes keep their order: blocks of one head run
    together and share its queries in the cache, and lists of about equal length are not permuted.

    Args:
        columns: full entries.
        masked: entries with a token mask, of the same shapes; None without any.
        batch: B.
        heads: H.
        group: query heads per kv head.
    """
    offsets = columns.row_offsets
    num_kv = offsets.shape[-1] - 1
    order = offsets.new_empty(batch * heads // group * num_kv)
    at = (offsets.stride(d) if offsets.shape[d] > 1 else 0 for d in (0, 1))
    launch(
        _order_kernel, (cdiv(len(order), _BLOCK_ORDER),),
        offsets, None if masked is None else masked.row_offsets, order, *at, batch, heads, num_kv,
        GROUP=group, FINE=masked is not None, BLOCK=_BLOCK_ORDER, num_warps=8,
    )  # fmt: skip
    return order
