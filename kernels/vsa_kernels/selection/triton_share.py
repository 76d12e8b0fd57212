"""Exact top-p of a row in registers, written as a sorted list: no sort, no cumulative sum of sorted weights.

One or a few warps handle one row. Scores become unsigned keys of the same order and, by `weights.py`, whole units of
weight. Halving finds the key at which the sum of the units of all keys above passes the share; ties of that key follow
by their column, and a prefix sum gives every kept block its place in the list.

B batch, H heads, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import launch
from vsa_kernels.selection import reference, weights
from vsa_kernels.selection.op import MAX_SHARE_COLUMNS, unsupported
from vsa_kernels.selection.triton_keys import key_value, value_keys
from vsa_kernels.selection.weights import Crossing

_SCALE = tl.constexpr(2.0**weights.DIFFERENCE_BITS)
_DIFFERENCE_BITS = tl.constexpr(weights.DIFFERENCE_BITS)
_FARTHEST = tl.constexpr(weights.FARTHEST)
_LOG2_E = tl.constexpr(weights.LOG2_E)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in weights.POWER)
# Bits by which the units of a row of `MAX_SHARE_COLUMNS` can exceed 30: all of them the largest, 2^24.
_EXCESS_BITS = tl.constexpr(8)


@triton.jit
def _exponential(below):
    """Units of 2^-24 of exp(-below), as in `weights.weight_units`; below: 0 to `FARTHEST`."""
    difference = (below * _SCALE).to(tl.int32).to(tl.uint32, bitcast=True)
    exponent = tl.umulhi(difference << 1, tl.full(below.shape, _LOG2_E, tl.uint32))
    fraction = exponent << 6
    power = _C5 - tl.umulhi(fraction, tl.full(below.shape, _C6, tl.uint32))
    power = _C4 - tl.umulhi(fraction, power)
    power = _C3 - tl.umulhi(fraction, power)
    power = _C2 - tl.umulhi(fraction, power)
    power = _C1 - tl.umulhi(fraction, power)
    power = _C0 - tl.umulhi(fraction, power)
    # the 7 bits between 2^-31 and 2^-24
    shift = tl.minimum(exponent >> _DIFFERENCE_BITS, 24) + 7
    units = (power + ((power & 0) + 1 << (shift - 1))) >> shift
    return tl.where(exponent >> _DIFFERENCE_BITS > 24, 0, units).to(tl.int32)


@triton.jit
def _mass(keys, units, threshold):
    """Units of the keys that reach the threshold."""
    return tl.sum(tl.where(keys >= threshold, units, 0), 0)


@triton.jit
def _share_kernel(
    scores, shares, candidates, always, indices, counts, num_kv, num_q, num_heads,
    stride_b, stride_h, stride_q, shares_b, shares_h, shares_q,
    candidates_b, candidates_h, candidates_q, candidates_n, always_b, always_h, always_q, always_n,
    CROSSING: tl.constexpr, HAS_CANDIDATES: tl.constexpr, HAS_ALWAYS: tl.constexpr, BLOCK: tl.constexpr,
    VALUE_STEPS: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    i_q = (i_row % num_q).to(tl.int64)
    i_h = ((i_row // num_q) % num_heads).to(tl.int64)
    i_b = (i_row // num_q // num_heads).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < num_kv
    p_scores = scores + i_b * stride_b + i_h * stride_h + i_q * stride_q
    # adding 0 turns -0.0 into 0.0
    b_x = tl.load(p_scores + o_n, mask=m_n, other=0.0).to(tl.float32) + 0.0
    compete = m_n
    if HAS_CANDIDATES:
        p_candidates = candidates + i_b * candidates_b + i_h * candidates_h + i_q * candidates_q
        compete = compete & (tl.load(p_candidates + o_n * candidates_n, mask=m_n, other=0) != 0)
    forced = tl.zeros((BLOCK,), tl.int1)
    if HAS_ALWAYS:
        p_always = always + i_b * always_b + i_h * always_h + i_q * always_q
        forced = tl.load(p_always + o_n * always_n, mask=m_n, other=0) != 0
        compete = compete & ~forced
    # 1 for NaN, 0 for a block that does not compete
    keys = tl.where(b_x == b_x, value_keys(b_x), tl.full((BLOCK,), 1, tl.uint32))
    keys = tl.where(compete, keys, tl.zeros((BLOCK,), tl.uint32))
    highest = tl.max(keys, 0)
    largest = key_value(highest)

    weighty = compete & (b_x > float("-inf"))
    # infinities have no difference
    below = tl.where(weighty & (keys < highest), largest - b_x, 0.0)
    units = tl.where(weighty, _exponential(tl.minimum(below, _FARTHEST)), 0)
    # sums fit 31 bits
    upper = tl.sum(units >> 8, 0)
    excess = 0
    for i in tl.static_range(_EXCESS_BITS):
        excess += (upper >> (22 + i) > 0).to(tl.int32)
    units = (units + ((1 << excess) >> 1)) >> excess
    total = tl.sum(units, 0)

    share = tl.load(shares + i_b * shares_b + i_h * shares_h + i_q * shares_q)
    # NaN is no share, either
    share = tl.where(share > 0, tl.minimum(share, 1.0), 0.0)
    wanted = total.to(tl.float64) * share
    # a sum is inside the share where it is at most the limit
    limit = wanted.to(tl.int32)
    if CROSSING == "keep":
        limit -= (limit.to(tl.float64) == wanted).to(tl.int32)
    everything = (share == 1.0) | ((total > 0) & (limit >= total))

    # The keys from `high` on are inside, `reached` of their units, those from `low` on are not: keys above 0 compete.
    # Without any weight the best key alone is left.
    low = tl.where(everything, 0, tl.where(total > 0, 1, highest)).to(tl.uint32)
    high = tl.where(everything, 0, highest).to(tl.uint32) + 1
    reached = 0
    # scores are often closer to each other than weights reach
    low_value = tl.maximum(tl.min(tl.where(weighty, b_x, largest), 0), largest - _FARTHEST)
    high_value = largest
    step = 0
    while high - low > 1:
        middle_value = 0.5 * low_value + 0.5 * high_value
        middle = value_keys(middle_value)
        # any threshold strictly inside is right, so the value (infinite, NaN or rounded) only has to be good
        good = (middle > low) & (middle < high) & (step < VALUE_STEPS)
        middle = tl.where(good, middle, low + ((high - low) >> 1))
        if step >= VALUE_STEPS:
            # up to the next key that is there, and in every other step this one itself
            next_key = tl.max(tl.where(keys < high, keys, 0), 0)
            high = next_key + 1
            middle = tl.where(step % 2 == 0, next_key, low + ((high - low) >> 1))
        mass = _mass(keys, units, middle)
        inside = mass <= limit
        high = tl.where(inside, middle, high)
        high_value = tl.where(inside, middle_value, high_value)
        reached = tl.where(inside, mass, reached)
        low = tl.where(inside, low, middle)
        low_value = tl.where(inside, low_value, middle_value)
        step += 1

    # ties of the key low: as many as are inside, the first ones
    tied = (keys == low) & (low > 0)
    each = tl.max(tl.where(tied, units, 0), 0)
    fitting = (limit - reached) // tl.maximum(each, 1)
    if CROSSING != "drop":
        fitting += 1
    fitting = tl.where(each > 0, fitting, 0)
    # at least the best
    fitting = tl.where(low == highest, tl.maximum(fitting, 1), fitting)
    if tl.sum(tied.to(tl.int32), 0) > fitting:
        tied = tied & (tl.cumsum(tied.to(tl.int32), 0) <= fitting)
    kept = (keys >= high) | tied | forced

    # [BLOCK]
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    count = tl.sum(kept.to(tl.int32), 0)
    p_indices = indices + i_row.to(tl.int64) * num_kv
    tl.store(p_indices + place, o_n, mask=kept)
    tl.store(p_indices + o_n, tl.zeros((BLOCK,), tl.int32), mask=m_n & (o_n >= count))
    tl.store(counts + i_row, count)


def select(
    scores: Tensor, shares: Tensor, crossing: Crossing, candidates: Tensor | None, always: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sorted lists of the blocks that hold a share of each row, equal to `selection.reference` up to every row's count.

    Entries past the count are 0. fp64 scores and rows of more than `MAX_SHARE_COLUMNS` blocks take the reference.

    Args:
        scores: `[B, H, Nq, Nkv]` logits.
        shares: fp64 `[B|1, H|1, Nq|1]`.
        crossing: what happens to the entry that reaches the share.
        candidates: bool `[B|1, H|1, Nq|1, Nkv|1]`, blocks that compete; None: all.
        always: bool of such a shape, blocks on top of them; None: none.

    Returns:
        int32 indices `[B, H, Nq, Nkv]` and counts `[B, H, Nq]`.
    """
    if unsupported(scores, MAX_SHARE_COLUMNS) is not None:
        return reference.select_share(scores, shares, crossing, candidates, always)
    if scores.stride(-1) != 1 and scores.shape[-1] > 1:
        scores = scores.contiguous()
    B, H, Nq, Nkv = scores.shape
    indices = scores.new_empty((B, H, Nq, Nkv), dtype=torch.int32)
    counts = scores.new_empty((B, H, Nq), dtype=torch.int32)
    shares = shares.expand(scores.shape[:3])
    # a pointer that is never read stands in for what is absent
    allowed, forced = (indices if x is None else x.expand(scores.shape).view(torch.uint8) for x in (candidates, always))
    launch(
        _share_kernel,
        (B * H * Nq,),
        scores,
        shares,
        allowed,
        forced,
        indices,
        counts,
        Nkv,
        Nq,
        H,
        *scores.stride()[:3],
        *shares.stride(),
        *allowed.stride(),
        *forced.stride(),
        CROSSING=crossing,
        HAS_CANDIDATES=candidates is not None,
        HAS_ALWAYS=always is not None,
        **_tile(Nkv),
    )
    return indices, counts


def _tile(num_kv: int) -> dict[str, Any]:
    # constants of a launch; a key and its units are two registers, and one warp needs no barriers. Halvings of the
    # range of values leave about one score, before those of the keys that are there
    width = max(triton.next_power_of_2(num_kv), 32)
    return {"BLOCK": width, "VALUE_STEPS": width.bit_length() + 1, "num_warps": min(max(width // 1024, 1), 8)}
