"""Floating point operations of one sample through a network, counted from its layers.

L video tokens, C model width, N parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Floating point operations of one sample, a multiply-add counted as two.

    The backward pass costs 2x the forward pass of linear layers and 2.5x that of attention, whose forward has 4 per
    pair of tokens and channel. Source: VSA paper section 3 and appendix C.

    Args:
        executed: executed operations, with self-attention counted over the query-key pairs that its methods visit;
            recomputation by activation checkpointing is not counted.
        self_attention: the part of `executed` in self-attention.
        selected: the part of `self_attention` in layers that select tiles.
        dense_equivalent: the VSA paper's count for the same model with dense attention,
            `6 N L + 3.5 * 4 L^2 C * layers` (training) or `2 N L + 4 L^2 C * layers` (forward); N excludes
            parameters that only a sparse method has.
    """

    executed: float
    self_attention: float
    selected: float
    dense_equivalent: float


def weighted_flops(counts: Sequence[tuple[float, FlopCount]]) -> FlopCount:
    """Weighted sum of counts."""
    names = ("executed", "self_attention", "selected", "dense_equivalent")
    return FlopCount(**{name: sum(weight * getattr(count, name) for weight, count in counts) for name in names})
