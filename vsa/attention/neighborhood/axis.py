"""The window of neighborhood attention along one axis; several axes are joined by "and".

n tokens of an axis, w window, s stride, d dilation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

AXES = ("time", "height", "width")


@dataclass(frozen=True, kw_only=True)
class AxisWindow:
    """Which keys each query sees along one axis.

    Dilation splits the axis by residue: tokens x with the same x % d form a group, in which token x has the place
    x // d, and only tokens of one group see each other. Inside a group, `stride` neighbours share the window of their
    leader.

        not causal: the leader is the centre of the stride's run (the right one of two), its window has w // 2 keys
            before it and w - 1 - w // 2 behind it, and is pushed inside at both ends: always exactly w keys.
        causal: the leader is the last of the run; a query sees the leader's last w keys up to itself.

    Args:
        size: n.
        window: w, keys of a query; n with d = 1 restricts nothing.
        stride: s, neighbouring queries that share a window; w is blocked attention.
        dilation: d, distance of neighbouring keys.
        causal: no query sees a later key.
        name: of the axis, for messages.

    Raises:
        ValueError: w above n, s above w, w * d above n, or one of them below 1.

    Source: Hassani et al., "Generalized Neighborhood Attention" (arXiv 2504.16922), section 3; rules for causal axes
    with a stride as in NATTEN.
    """

    size: int
    window: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False
    name: str = "axis"

    def __post_init__(self):
        n, w, s, d = self.size, self.window, self.stride, self.dilation
        for option in ("size", "window", "stride", "dilation"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} of {self.name} must be at least 1, got {getattr(self, option)}")
        if w > n:
            raise ValueError(f"window of {self.name} must be at most its {n} tokens, got {w}")
        if s > w:
            raise ValueError(f"stride of {self.name} must be at most its window {w}, got {s}")
        if w * d > n:
            raise ValueError(f"dilation {d} of {self.name} does not fit: window {w} * {d} is above its {n} tokens")

    @property
    def is_whole(self) -> bool:
        """Every query sees every key."""
        return self.window == self.size and not self.causal

    @cached_property
    def span(self) -> tuple[Tensor, Tensor]:
        """Places in its group of the first key of each query and of the one behind its last, int64 `[n]` each."""
        w, s = self.window, self.stride
        token = torch.arange(self.size, device="cpu")
        place, residue = token // self.dilation, token % self.dilation
        # tokens of each query's group
        length = torch.div(self.size - residue + self.dilation - 1, self.dilation, rounding_mode="floor")
        if self.causal:
            leader = torch.minimum(place // s * s + s - 1, length - 1)
            return (leader - w + 1).clamp(min=0), place + 1
        leader = torch.minimum(place // s * s + s // 2, length - 1)
        first = torch.minimum((leader - w // 2).clamp(min=0), length - w)
        return first, first + w

    def sees(self) -> Tensor:
        """bool `[n, n]`, True where the query of the row sees the key of the column."""
        first, stop = self.span
        key = torch.arange(self.size, device="cpu")
        place, residue = key // self.dilation, key % self.dilation
        return (residue[:, None] == residue) & (place >= first[:, None]) & (place < stop[:, None])


Extent = int | float
"""Tokens of an axis, or a float above 0 and at most 1: a share of them."""


class AxisRule(NamedTuple):
    """The settings of one axis before its length is known.

    A share counts the m = n // d tokens that dilation leaves of n, to whole ones (a half up), at least 1. A window that
    is a share below 1 is the multiple of the stride nearest to it, at least one stride and at most m; with a stride
    above m it stays what it is, and the stride is refused.

    Window and stride are pairs of `tokens` or `share` and its value: rules are keys, and 1 token equals the share 1.0.
    """

    name: str
    window: tuple[str, Extent]
    stride: tuple[str, Extent]
    dilation: int
    causal: bool

    def at(self, size: int) -> AxisWindow:
        """The window on an axis of `size` tokens.

        Raises:
            ValueError: see `AxisWindow`.
        """
        places = max(size // self.dilation, 1)
        stride = _nearest(_tokens(self.stride, places))
        wanted = _tokens(self.window, places)
        window = _nearest(wanted)
        if self.window[0] == "share" and wanted < places and stride <= places:
            window = stride * min(_nearest(wanted / stride), places // stride)
        return AxisWindow(
            size=size, window=window, stride=stride, dilation=self.dilation, causal=self.causal, name=self.name
        )


def axis_rules(
    window_thw: Sequence[Extent], stride_thw: Sequence[Extent], dilation_thw: Sequence[int], causal_thw: Sequence[bool]
) -> tuple[AxisRule, AxisRule, AxisRule]:
    """Rules of time, height and width.

    Raises:
        ValueError: a stride above the window, both tokens or both shares.
    """
    rules = []
    for name, window, stride, dilation, causal in zip(
        AXES, window_thw, stride_thw, dilation_thw, causal_thw, strict=True
    ):
        if type(window) is type(stride) and stride > window:
            raise ValueError(f"stride of {name} must be at most its window {window}, got {stride}")
        rules.append(AxisRule(name, _extent(window), _extent(stride), dilation, causal))
    return rules[0], rules[1], rules[2]


def _extent(value: Extent) -> tuple[str, Extent]:
    return ("share" if isinstance(value, float) else "tokens", value)


def _tokens(extent: tuple[str, Extent], places: int) -> Fraction:
    # the decimal number as it is written: 0.15 of 30 is 4.5
    kind, value = extent
    return Fraction(str(value)) * (places if kind == "share" else 1)


def _nearest(value: Fraction) -> int:
    return max(1, math.floor(value + Fraction(1, 2)))
