"""Exact top-k of a row in registers, written as a sorted list, without a mask, a sort or a second pass over memory.

One warp handles one row. Scores become order-preserving unsigned keys; a bisection on the keys finds the threshold that
splits the row into kept and dropped blocks, and a prefix sum gives every kept block its position in the list.

A row is held as one or two tiles whose widths are powers of two (1200 columns: 1024 and 256), since the padding of a
single tile would cost as much as real columns. B batch, H heads, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import launch, next_power_of_2
from vsa_kernels.selection import reference
from vsa_kernels.selection.op import unsupported
from vsa_kernels.selection.triton_keys import key_value, value_keys

# Halvings of the value range before the key range is halved: values are spread far more evenly than their bits.
_VALUE_STEPS = tl.constexpr(16)
# Key of a tie in column 0, above the number of columns.
_LAST_TIE = tl.constexpr(8192)


@triton.jit
def _load_keys(
    scores, candidates, always, FIRST: tl.constexpr, num_kv,
    HAS_CANDIDATES: tl.constexpr, HAS_ALWAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys and forced marks of the columns from FIRST on: 1 for NaN, 0 for a block that does not compete."""
    o_n = FIRST + tl.arange(0, BLOCK)
    m_n = o_n < num_kv
    # adding 0 turns -0.0 into 0.0
    b_x = tl.load(scores + o_n, mask=m_n, other=0.0).to(tl.float32) + 0.0
    # [BLOCK]
    keys = tl.where(b_x == b_x, value_keys(b_x), tl.full((BLOCK,), 1, tl.uint32))
    compete = m_n
    if HAS_CANDIDATES:
        compete = compete & (tl.load(candidates + o_n, mask=m_n, other=0) != 0)
    forced = tl.zeros((BLOCK,), tl.int1)
    if HAS_ALWAYS:
        forced = tl.load(always + o_n, mask=m_n, other=0) != 0
        compete = compete & ~forced
    return tl.where(compete, keys, tl.zeros((BLOCK,), tl.uint32)), forced


@triton.jit
def _lowest(keys):
    """The lowest key of a number, garbage if there is none."""
    # the subtraction wraps: what is no number goes last
    return tl.min(keys - 2, 0) + 2


@triton.jit
def _count(keys, threshold):
    """How many keys reach the threshold."""
    # a sum of ones becomes bit masks and population counts, which cost half as much again
    return tl.sum(tl.where(keys >= threshold, 0x10001, 0), 0) >> 16


@triton.jit
def _tie_keys(keys, low, high, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Keys among which ties of the key `low` descend with their column, and blocks below it do not compete."""
    tied = (tl.full((BLOCK,), _LAST_TIE, tl.int32) - FIRST - tl.arange(0, BLOCK)).to(tl.uint32)
    return tl.where(keys >= high, 0xFFFFFFFF, tl.where(keys >= low, tied, 0)).to(tl.uint32)


@triton.jit
def _emit(
    p_indices, capacity, keys, forced, threshold, before,
    FIRST: tl.constexpr, HAS_ALWAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the kept columns of a tile behind `before` others; returns how many there are then."""
    kept = keys >= threshold
    if HAS_ALWAYS:
        kept = kept | forced
    # [BLOCK]
    place = before - 1 + tl.cumsum(kept.to(tl.int32), 0)
    tl.store(p_indices + place, FIRST + tl.arange(0, BLOCK), mask=kept & (place < capacity))
    return before + tl.sum(kept.to(tl.int32), 0)


@triton.jit(do_not_specialize=["topk", "capacity"])
def _topk_kernel(
    scores, candidates, always, topk_per_row, indices, counts, topk, capacity, num_kv, num_q, num_heads,
    stride_b, stride_h, stride_q,
    HAS_TOPK_ROWS: tl.constexpr, HAS_CANDIDATES: tl.constexpr, HAS_ALWAYS: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    i_q = i_row % num_q
    i_h = (i_row // num_q) % num_heads
    i_b = i_row // num_q // num_heads
    p_scores = scores + i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h + i_q.to(tl.int64) * stride_q
    p_candidates = candidates + i_q.to(tl.int64) * num_kv
    p_always = always + i_q.to(tl.int64) * num_kv
    p_indices = indices + i_row.to(tl.int64) * capacity

    keys_a, forced_a = _load_keys(p_scores, p_candidates, p_always, 0, num_kv, HAS_CANDIDATES, HAS_ALWAYS, BLOCK_A)
    lowest = _lowest(keys_a)
    highest = tl.max(keys_a, 0)
    if BLOCK_B > 0:
        keys_b, forced_b = _load_keys(
            p_scores, p_candidates, p_always, BLOCK_A, num_kv, HAS_CANDIDATES, HAS_ALWAYS, BLOCK_B
        )
        lowest = tl.minimum(lowest, _lowest(keys_b))
        highest = tl.maximum(highest, tl.max(keys_b, 0))

    competing = num_kv
    num_forced = 0
    if HAS_CANDIDATES or HAS_ALWAYS:
        competing = _count(keys_a, 1)
        num_forced = tl.sum(forced_a.to(tl.int32), 0)
        if BLOCK_B > 0:
            competing += _count(keys_b, 1)
            num_forced += tl.sum(forced_b.to(tl.int32), 0)
    if HAS_TOPK_ROWS:
        limit = tl.maximum(tl.minimum(tl.load(topk_per_row + i_q), competing), 0).to(tl.int32)
    else:
        limit = tl.minimum(topk, competing)

    # More than `limit` keys reach low (or it is 1), and num_reached <= limit of them reach high. Keys above 0 compete,
    # so 1 is the threshold where all of them are kept.
    low = tl.full((), 1, tl.uint32)
    high = tl.where(limit == competing, low, highest + 1)
    num_reached = tl.where(limit == competing, limit, 0)
    low_value = key_value(lowest)
    high_value = key_value(highest)
    step = 0
    while (high - low > 1) & (num_reached != limit):
        middle_value = 0.5 * low_value + 0.5 * high_value
        middle = value_keys(middle_value)
        # any threshold strictly inside is right, so the value (infinite, NaN or rounded) only has to be good
        good = (middle > low) & (middle < high) & (step < _VALUE_STEPS)
        middle = tl.where(good, middle, low + ((high - low) >> 1))
        reached = _count(keys_a, middle)
        if BLOCK_B > 0:
            reached += _count(keys_b, middle)
        more = reached > limit
        low = tl.where(more, middle, low)
        low_value = tl.where(more, middle_value, low_value)
        high = tl.where(more, high, middle)
        high_value = tl.where(more, high_value, middle_value)
        num_reached = tl.where(more, num_reached, reached)
        step += 1

    threshold = high
    if num_reached != limit:
        # low is the key of ties: as many of them as are missing, the first ones
        keys_a = _tie_keys(keys_a, low, high, 0, BLOCK_A)
        if BLOCK_B > 0:
            keys_b = _tie_keys(keys_b, low, high, BLOCK_A, BLOCK_B)
        low = tl.full((), 1, tl.uint32)
        high = tl.full((), _LAST_TIE, tl.uint32) + 1
        # no two of these keys are equal, so some threshold is reached by just `limit` of them
        while (high - low > 1) & (num_reached != limit):
            threshold = low + ((high - low) >> 1)
            num_reached = _count(keys_a, threshold)
            if BLOCK_B > 0:
                num_reached += _count(keys_b, threshold)
            low = tl.where(num_reached > limit, threshold, low)
            high = tl.where(num_reached > limit, high, threshold)

    before = _emit(p_indices, capacity, keys_a, forced_a, threshold, 0, 0, HAS_ALWAYS, BLOCK_A)
    if BLOCK_B > 0:
        _emit(p_indices, capacity, keys_b, forced_b, threshold, before, BLOCK_A, HAS_ALWAYS, BLOCK_B)
    count = limit + num_forced
    tl.store(counts + i_row, count)
    for o_tail in range(count, capacity, BLOCK_TAIL):
        o_k = o_tail + tl.arange(0, BLOCK_TAIL)
        tl.store(p_indices + o_k, tl.zeros((BLOCK_TAIL,), tl.int32), mask=o_k < capacity)


def select(
    scores: Tensor,
    topk: int | None,
    topk_per_row: Tensor | None,
    candidates: Tensor | None,
    always: Tensor | None,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """Sorted lists of each row's best blocks; up to the counts they equal `selection.reference`.

    Entries past the count are 0. fp64 scores and rows of more than `MAX_COLUMNS` blocks take the reference.

    Args:
        scores: `[B, H, Nq, Nkv]`.
        topk: blocks to keep per row, None with `topk_per_row`.
        topk_per_row: int `[Nq]`.
        candidates: bool `[Nq, Nkv]`, blocks that compete; None: all.
        always: bool `[Nq, Nkv]`, blocks listed whatever their score; None: none.
        capacity: length of a list.

    Returns:
        int32 indices `[B, H, Nq, capacity]` and counts `[B, H, Nq]`.
    """
    if unsupported(scores) is not None:
        return reference.select(scores, topk, topk_per_row, candidates, always, capacity)
    if scores.stride(-1) != 1 and scores.shape[-1] > 1:
        scores = scores.contiguous()
    B, H, Nq, Nkv = scores.shape
    indices = scores.new_empty((B, H, Nq, capacity), dtype=torch.int32)
    counts = scores.new_empty((B, H, Nq), dtype=torch.int32)
    # the kernel never reads the pointer that replaces an absent mask
    candidate_mask, always_mask = (
        counts if x is None else x.contiguous().view(torch.uint8) for x in (candidates, always)
    )
    launch(
        _topk_kernel,
        (B * H * Nq,),
        scores,
        candidate_mask,
        always_mask,
        counts if topk_per_row is None else topk_per_row.contiguous(),
        indices,
        counts,
        0 if topk is None else max(min(topk, Nkv), 0),
        capacity,
        Nkv,
        Nq,
        H,
        *scores.stride()[:3],
        HAS_TOPK_ROWS=topk_per_row is not None,
        HAS_CANDIDATES=candidates is not None,
        HAS_ALWAYS=always is not None,
        **_tile(Nkv),
    )
    return indices, counts


def _tile(num_kv: int) -> dict[str, Any]:
    # constants of a launch: two tiles where their total width is below that of one; a thread has at least one column
    whole = max(next_power_of_2(num_kv), 32)
    rest = max(next_power_of_2(num_kv - whole // 2), 32)
    split = rest < whole // 2
    width = whole // 2 + rest if split else whole
    return {
        "BLOCK_A": whole // 2 if split else whole,
        "BLOCK_B": rest if split else 0,
        "BLOCK_TAIL": 128,
        # one warp needs no barriers, but lacks the registers for wider rows
        "num_warps": 1 if width <= 1536 else 2 if width <= 3072 else 4,
    }
