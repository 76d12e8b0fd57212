"""Exact top-p of a row in registers, written as a sorted list, without a sort or a cumulative sum of sorted weights.

One or a few warps handle one row. Scores become order-preserving unsigned keys and integer weights as in `weights.py`.
Interpolation finds the key at which the sum of the weights of all keys above passes the share. Ties of that key are
kept in the order of their columns, and a prefix sum gives every kept block its position in the list.

B batch, H heads, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import capability, launch, next_power_of_2
from vsa_kernels.selection import reference, weights
from vsa_kernels.selection.op import MAX_SHARE_COLUMNS, unsupported
from vsa_kernels.selection.triton_keys import key_value, value_keys
from vsa_kernels.selection.weights import Crossing

_SCALE = tl.constexpr(2.0**weights.DIFFERENCE_BITS)
_DIFFERENCE_BITS = tl.constexpr(weights.DIFFERENCE_BITS)
_LOG2_E = tl.constexpr(weights.LOG2_E)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in weights.POWER)
# A difference whose weight is 0. Its binary exponent, 25.97, is still below 26, the limit of the 32-bit shifts.
_WEIGHTLESS = tl.constexpr(18.0)
# Most bits beyond 30 in the sum of a row of `MAX_SHARE_COLUMNS`: when every weight is the largest, 2^24.
_EXCESS_BITS = tl.constexpr(8)
# Special keys: 0 does not compete, 1 is NaN, the last key is listed whatever its score; all other scores lie between.
_NAN = tl.constexpr(1)
_FORCED = tl.constexpr(0xFFFFFFFF)
# Once at most this many entries are left between the two thresholds, they are taken one by one.
_FEW = tl.constexpr(3)
# Smallest distance of the next threshold to either of the two, as a fraction of their distance.
_NEAREST = tl.constexpr(1 / 64)


@triton.jit
def _units(below):
    """Units of 2^-24 of exp(-below), as in `weights.weight_units`; below: 0 to `_WEIGHTLESS`."""
    difference = (below * _SCALE).to(tl.int32).to(tl.uint32, bitcast=True)
    exponent = tl.umulhi(difference << 1, tl.full(below.shape, _LOG2_E, tl.uint32))
    fraction = exponent << 6
    power = _C5 - tl.umulhi(fraction, tl.full(below.shape, _C6, tl.uint32))
    power = _C4 - tl.umulhi(fraction, power)
    power = _C3 - tl.umulhi(fraction, power)
    power = _C2 - tl.umulhi(fraction, power)
    power = _C1 - tl.umulhi(fraction, power)
    power = _C0 - tl.umulhi(fraction, power)
    # to the nearest: the 7 bits between 2^-31 and 2^-24, then the whole part of the exponent
    whole = exponent >> _DIFFERENCE_BITS
    half = ((power & 0) + 64) << whole
    return (((power + half) >> 7) >> whole).to(tl.int32)


@triton.jit
def _rounded(units, excess):
    """The units without their last bits."""
    return (units + ((1 << excess) >> 1)) >> excess


@triton.jit
def _units_of_key(key, largest, excess):
    """Units of one finite key."""
    value = key_value(key)
    below = tl.where(value < largest, tl.minimum(largest - value, _WEIGHTLESS), 0.0)
    return _rounded(_units(below), excess)


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
    keys = tl.where(b_x == b_x, value_keys(b_x), tl.full((BLOCK,), _NAN, tl.uint32))
    compete = m_n
    if HAS_CANDIDATES:
        p_candidates = candidates + i_b * candidates_b + i_h * candidates_h + i_q * candidates_q
        compete = compete & (tl.load(p_candidates + o_n * candidates_n, mask=m_n, other=0) != 0)
    if HAS_ALWAYS:
        p_always = always + i_b * always_b + i_h * always_h + i_q * always_q
        forced = tl.load(p_always + o_n * always_n, mask=m_n, other=0) != 0
        compete = compete & ~forced
        keys = tl.where(compete, keys, tl.where(forced, tl.full((BLOCK,), _FORCED, tl.uint32), 0))
    else:
        keys = tl.where(compete, keys, tl.zeros((BLOCK,), tl.uint32))
    # what has no weight is as far as it can be
    b_x = tl.where(compete & (b_x == b_x), b_x, float("-inf"))
    largest = tl.max(b_x, 0)
    weightless = largest == float("-inf")
    highest = value_keys(largest)
    if weightless:
        highest = tl.max(tl.where(keys < _FORCED, keys, 0), 0)

    # infinities have no difference
    below = tl.where(b_x < largest, tl.minimum(largest - b_x, _WEIGHTLESS), tl.where(weightless, _WEIGHTLESS, 0.0))
    units = _units(below)
    # sums fit 31 bits
    upper = tl.sum(units >> 8, 0)
    excess = 0
    for i in tl.static_range(_EXCESS_BITS):
        excess += (upper >> (22 + i) > 0).to(tl.int32)
    units = _rounded(units, excess)
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

    # The keys from `high` on are inside, `inside` of their units, those from `low` on are not, `outside` in all: keys
    # above 0 compete. Without any weight the best key alone is left.
    low = tl.where(everything, 0, tl.where(total > 0, 1, highest)).to(tl.uint32)
    high = tl.where(everything, 0, highest).to(tl.uint32) + 1
    inside, outside = 0, total
    # scores are often closer to each other than weights reach
    low_value = tl.maximum(tl.min(tl.where(b_x > float("-inf"), b_x, largest), 0), largest - _WEIGHTLESS)
    high_value = largest
    # what a sum is above the limit and below it; halved where one end stays, or it would stay for good (Illinois)
    above, under = (total - limit).to(tl.float32), limit.to(tl.float32)
    side = 0
    few_units = tl.exp2(24.0 - excess.to(tl.float32)) * _FEW
    step = 0
    while high - low > 1:
        part = tl.minimum(tl.maximum(above / (above + under), _NEAREST), 1 - _NEAREST)
        middle_value = low_value * (1 - part) + high_value * part
        middle = value_keys(middle_value)
        # any threshold strictly inside is right, so the value (infinite, NaN or rounded) only has to be good
        good = (middle > low) & (middle < high) & (step < VALUE_STEPS)
        middle = tl.where(good, middle, low + ((high - low) >> 1))
        few = (outside - inside).to(tl.float32) <= tl.exp(high_value - largest) * few_units
        if few | (step >= VALUE_STEPS):
            # up to the next key that is there, and in every other step at least this one itself
            next_key = tl.max(tl.where(keys < high, keys, 0), 0)
            high = next_key + 1
            middle = tl.where(few | (step % 2 == 0), next_key, low + ((high - low) >> 1))
            # even one entry of it is too much
            if inside + _units_of_key(next_key, largest, excess) > limit:
                low = next_key
        if high - low > 1:
            mass = tl.sum(tl.where(keys >= middle, units, 0), 0)
            fits = mass <= limit
            middle_value = key_value(middle)
            if fits:
                high, high_value, inside = middle, middle_value, mass
                under = (limit - mass).to(tl.float32)
                above = tl.where(side == 1, above * 0.5, above)
                side = 1
            else:
                low, low_value, outside = middle, middle_value, mass
                above = (mass - limit).to(tl.float32)
                under = tl.where(side == 2, under * 0.5, under)
                side = 2
        step += 1

    # ties of the key low: as many as are inside, the first ones
    each = tl.where(total > 0, _units_of_key(low, largest, excess), 0)
    fitting = (limit - inside) // tl.maximum(each, 1)
    if CROSSING != "drop":
        fitting += 1
    fitting = tl.where((each > 0) & (low > 0), fitting, 0)
    # at least the best
    fitting = tl.where((low == highest) & (low > 0), tl.maximum(fitting, 1), fitting)
    if fitting > 0:
        tied = keys == low
        if tl.sum(tied.to(tl.int32), 0) > fitting:
            tied = tied & (tl.cumsum(tied.to(tl.int32), 0) <= fitting)
        keys = tl.where(tied, tl.full((BLOCK,), _FORCED, tl.uint32), keys)

    # [BLOCK]
    kept = keys >= high
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    count = tl.sum(kept.to(tl.int32), 0)
    p_indices = indices + i_row.to(tl.int64) * num_kv
    tl.store(p_indices + place, o_n, mask=kept)
    tl.store(p_indices + o_n, tl.zeros((BLOCK,), tl.int32), mask=m_n & (o_n >= count))
    tl.store(counts + i_row, count)


def select(
    scores: Tensor, shares: Tensor, crossing: Crossing, candidates: Tensor | None, always: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sorted lists of the blocks that hold a share of each row; up to the counts they equal `selection.reference`.

    Entries past the count are 0. fp64 scores and rows of more than `MAX_SHARE_COLUMNS` blocks take the reference.

    Args:
        scores: `[B, H, Nq, Nkv]` logits.
        shares: fp64 `[B|1, H|1, Nq|1]`.
        crossing: treatment of the entry that reaches the share, see `weights.Crossing`.
        candidates: bool `[B|1, H|1, Nq|1, Nkv|1]`, blocks that compete; None: all.
        always: bool of such a shape, blocks listed whatever their score; None: none.

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
    # the kernel never reads the pointer that replaces an absent mask
    candidate_mask, always_mask = (indices if x is None else _mask(x, scores) for x in (candidates, always))
    launch(
        _share_kernel,
        (B * H * Nq,),
        scores,
        shares,
        candidate_mask,
        always_mask,
        indices,
        counts,
        Nkv,
        Nq,
        H,
        *scores.stride()[:3],
        *shares.stride(),
        *candidate_mask.stride(),
        *always_mask.stride(),
        CROSSING=crossing,
        HAS_CANDIDATES=candidates is not None,
        HAS_ALWAYS=always is not None,
        **_tile(Nkv, capability(scores.device)),
    )
    return indices, counts


def _mask(mask: Tensor, scores: Tensor) -> Tensor:
    # the kernel reads rows with stride 1 or 0; a copy is as small as the mask
    mask = mask if mask.stride(-1) <= 1 else mask.contiguous()
    return mask.expand(scores.shape).view(torch.uint8)


def _tile(num_kv: int, chip: tuple[int, int]) -> dict[str, Any]:
    # constants of a launch; a key and its weight take two registers. Steps over the range of values leave about one
    # score, before the steps over the keys begin
    width = max(next_power_of_2(num_kv), 32)
    # more rows at a time hide the waits of each, so registers are kept few: 16 entries per thread, until barriers
    # between more warps would cost more than they save (measured on an H200); sm_100 spills some of 64
    warps = min(max(width // 512, 1), 4 if width < 8192 else 8)
    return {
        "BLOCK": width,
        "VALUE_STEPS": width.bit_length() + 1,
        "num_warps": warps,
        "maxnreg": 104 if width not in (1024, 2048) else 72 if chip >= (10, 0) else 64,
    }
