"""Integer softmax weights of a row, in which a share (top-p) is measured.

After the difference of a score to the largest of its row, all arithmetic is on integers, so that every backend and
device gets the same weights, and their sums do not depend on the order. These values are rounded:

- the difference, computed in the scores' dtype (at least fp32), towards 0 to a multiple of 2^-26;
- the weight `exp(score - largest)`, to the nearest unit of 2^-24 (the exponential is exact to 2^-29), so that an
  entry more than 17.3 below the largest has weight 0;
- all weights of a row whose sum would need 31 bits, to the nearest multiple of the power of two that makes the sum
  fit: a unit is then still below 2^-29 of the row.

B batch, H heads, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Crossing = Literal["keep", "drop", "exceed"]
"""Set of entries that holds a share of its row: the smallest whose sum is at least the share (keep), the largest whose
sum is at most the share (drop), or the smallest whose sum is above the share (exceed)."""
CROSSINGS = get_args(Crossing)

DIFFERENCE_BITS = 26
"""Bits of the fraction of a difference of two scores."""
FARTHEST = 20.0
"""Difference beyond which every weight is 0, so that differences fit 31 bits."""
LOG2_E = 3098164009
"""log2(e) in units of 2^-31."""
POWER = (2147483645, 1488521945, 515877823, 119165869, 20572593, 2739202, 234782)
"""2^-f of a fraction f, in units of 2^-31: the polynomial of degree 6 with the least error, 1.4e-9, whose signs
alternate."""


def weight_units(scores: Tensor, compete: Tensor) -> Tensor:
    """Integer softmax weights int64 `[B, H, Nq, Nkv]` of the scores, in one unit per row.

    The weight is 0 for entries that do not compete, for NaN and for -inf. Where scores are +inf, only these have
    weight, all the same.

    Args:
        scores: `[B, H, Nq, Nkv]` logits of any float dtype.
        compete: bool, broadcasts to the scores, entries of the softmax; the others have weight 0.
    """
    logits = (scores if scores.dtype == torch.float64 else scores.float()).masked_fill(~compete, -math.inf)
    logits = logits.masked_fill(logits.isnan(), -math.inf)
    largest = logits.amax(-1, keepdim=True)
    # inf - inf is NaN: the largest entries differ by 0 from themselves
    below = (largest - logits).masked_fill(logits == largest, 0).clamp(max=FARTHEST)
    exponent = ((below * 2**DIFFERENCE_BITS).long() * LOG2_E) >> 31
    fraction = (exponent << 6) & 0xFFFFFFFF
    power = torch.full_like(fraction, POWER[-1])
    for coefficient in POWER[-2::-1]:
        power = coefficient - ((fraction * power) >> 32)
    whole = exponent >> DIFFERENCE_BITS
    # 2^-31 / 2^whole to the nearest 2^-24
    units = (power + (64 << whole)) >> (7 + whole)
    units = units.masked_fill((whole > 24) | (logits == -math.inf), 0)
    shift = _excess_bits(units)
    return (units + ((1 << shift) >> 1)) >> shift


def _excess_bits(units: Tensor) -> Tensor:
    # the sum of the upper parts fits 32 bits in rows of up to 2^15 entries; 2^22 of them are 2^30 units
    upper = (units >> 8).sum(-1, keepdim=True)
    return ((upper >> torch.arange(22, 62, device=units.device)) > 0).sum(-1, keepdim=True)


def within_share(ranked: Tensor, shares: Tensor | float, crossing: Crossing) -> Tensor:
    """Bool mask of the first entries of each row that hold a share of its weight; all entries for a share of 1 or more.

    A row whose weights are all 0 keeps nothing for a share below 1.

    Args:
        ranked: integer weights `[..., Nkv]`, not negative, best entries first.
        shares: a number, or fp64 that broadcasts to `[..., 1]`.
        crossing: treatment of the entry that reaches the share, see `Crossing`.
    """
    reached = ranked.cumsum(-1)
    total = reached[..., -1:]
    target = total.double() * shares
    if crossing == "keep":
        inside = reached - ranked < target
    else:
        inside = ((reached if crossing == "drop" else reached - ranked) <= target) & (total > 0)
    if isinstance(shares, Tensor):
        return inside | (shares >= 1)
    return torch.ones_like(inside) if shares >= 1 else inside
