"""Floating point operations of one sample through a network, counted from its layers.

L video tokens, S text tokens, C model width, N parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Floating point operations of one sample, a multiply-add counted as two.

    Args:
        executed: executed operations, with self-attention counted over the query-key pairs that its methods visit;
            recomputation by activation checkpointing is not counted.
        self_attention: the part of `executed` in self-attention.
        dense_equivalent: the VSA paper's count for the same model with dense attention,
            `6 N L + 3.5 * 4 L^2 C * layers` (training) or `2 N L + 4 L^2 C * layers` (forward); N excludes
            parameters that only a sparse method has.
    """

    executed: float
    self_attention: float
    dense_equivalent: float


def weighted_flops(counts: Sequence[tuple[float, FlopCount]]) -> FlopCount:
    """Weighted sum of counts."""
    names = ("executed", "self_attention", "dense_equivalent")
    return FlopCount(**{name: sum(weight * getattr(count, name) for weight, count in counts) for name in names})


def count_flops(
    model: Any, pairs: Sequence[float], *, num_tokens: int, text_len: int, image_len: int, training: bool
) -> FlopCount:
    """Count linear layers and attention of one sample with one timestep.

    The backward pass costs 2x the forward pass of linear layers and 2.5x that of attention.

    Args:
        model: a `Network`.
        pairs: executed query-key pairs of one head in self-attention, per layer.
        num_tokens: L.
        text_len: S.
        image_len: image tokens of image-to-video models.
        training: count the backward pass as well.

    Source: VSA paper section 3 and appendix C (attention forward 4 FLOPs per pair and channel, 3.5x with backward).
    """

    linear = linear_flops(model, num_tokens=num_tokens, text_len=text_len, image_len=image_len)
    roles = model.parameter_roles()
    num_parameters = sum(p.numel() for name, p in model.named_parameters() if roles[name] != "gate")
    linear_factor, attention_factor = (3.0, 3.5) if training else (1.0, 1.0)
    self_attention = attention_factor * 4 * model.dim * sum(pairs)
    cross_attention = attention_factor * 4 * model.dim * num_tokens * (text_len + image_len) * len(pairs)
    dense_attention = attention_factor * 4 * model.dim * (float(num_tokens) ** 2 * len(pairs))
    return FlopCount(
        executed=linear_factor * linear + cross_attention + self_attention,
        self_attention=self_attention,
        dense_equivalent=linear_factor * 2 * num_parameters * num_tokens + dense_attention,
    )


def linear_flops(model: Any, *, num_tokens: int, text_len: int, image_len: int = 0, part: str = "") -> float:
    """Operations of the forward pass of the linear layers for one sample with one timestep.

    Args:
        model: a `Network`.
        num_tokens: L.
        text_len: S.
        image_len: image tokens of image-to-video models.
        part: count only layers whose name contains this text.
    """

    sizes = {"num_tokens": num_tokens, "text_len": text_len, "image_len": image_len}
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv3d)]
    return float(sum(2 * model.rows(name, **sizes) * layer.weight.numel() for name, layer in layers if part in name))
