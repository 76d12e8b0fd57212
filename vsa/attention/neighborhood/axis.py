"""The window of neighborhood attention along one axis; a key is visible if it is visible along every axis.

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
    """Keys that are visible to each query along one axis.

    Dilation splits the axis by residue: tokens x with the same x % d form a group, in which token x has position
    x // d, and tokens attend within their group only. Inside a group, `stride` neighbours share the window of their
    leader.

        not causal: the leader is the centre of the run of `stride` queries (the right one of two). Its window has
            w // 2 keys before it and w - 1 - w // 2 after it, and is shifted inside at both ends: it always has w keys.
        causal: the leader is the last query of the run; a query sees those of the leader's last w keys that are not
            after itself. No centre is needed, so that even windows are defined as odd ones are.

    Args:
        size: n, tokens of the axis.
        window: w, keys of a query; w = n with d = 1 restricts nothing.
        stride: s, neighbouring queries that share a window; s = w is blocked attention.
        dilation: d, distance of neighbouring keys.
        causal: whether later keys are hidden from a query.
        name: name of the axis in messages.

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
        """Whether every query sees every key."""
        return self.window == self.size and not self.causal

    @cached_property
    def span(self) -> tuple[Tensor, Tensor]:
        """Positions in its group of each query's first key and of the one after its last, int64 `[n]` each."""
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
"""Number of tokens of an axis, or a share of them (a float above 0 and at most 1)."""


class AxisRule(NamedTuple):
    """The settings of one axis before its length is known.

    A share refers to the m = n // d tokens of a dilation group and is rounded to whole tokens (half up), at least 1. A
    window given as a share below 1 becomes the nearest multiple of the stride, at least one stride and at most m. With
    a stride above m it is not rounded, and the stride raises an error.

    Window and stride are pairs of `tokens` or `share` and the value: rules are dictionary keys, in which 1 token and
    the share 1.0 have to differ.
    """

    name: str
    window: tuple[str, Extent]
    stride: tuple[str, Extent]
    dilation: int
    causal: bool

    def at(self, size: int) -> AxisWindow:
        """The window on an axis of `size` tokens."""
        places = max(size // self.dilation, 1)
        stride = _nearest(_tokens(self.stride, places))
        exact_window = _tokens(self.window, places)
        window = _nearest(exact_window)
        if self.window[0] == "share" and exact_window < places and stride <= places:
            window = stride * min(_nearest(exact_window / stride), places // stride)
        return AxisWindow(
            size=size, window=window, stride=stride, dilation=self.dilation, causal=self.causal, name=self.name
        )


def axis_rules(
    window_thw: Sequence[Extent], stride_thw: Sequence[Extent], dilation_thw: Sequence[int], causal_thw: Sequence[bool]
) -> tuple[AxisRule, AxisRule, AxisRule]:
    """The rules of time, height and width."""
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
    # exact as the written decimal number: 0.15 of 30 is 4.5
    kind, value = extent
    return Fraction(str(value)) * (places if kind == "share" else 1)


def _nearest(value: Fraction) -> int:
    return max(1, math.floor(value + Fraction(1, 2)))
