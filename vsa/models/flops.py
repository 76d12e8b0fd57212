"""Work of one sample through a `VideoDiT`, counted from its layers.

L video tokens, S text tokens, C model width, N parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Floating point operations of one sample, a multiply-add counted as two.

    Args:
        executed: what the model does, self-attention by the pairs its methods really visit; recomputation by
            activation checkpointing is not counted.
        self_attention: the part of `executed` in self-attention.
        dense_equivalent: the VSA paper's accounting of the same model with dense attention,
            `6 N L + 3.5 * 4 L^2 C * layers` (training) or `2 N L + 4 L^2 C * layers` (forward); N leaves out
            parameters that only a sparse method has.
    """

    executed: float
    self_attention: float
    dense_equivalent: float


def linear_flops(model: nn.Module, *, num_tokens: int, text_len: int, image_len: int) -> float:
    """Forward FLOPs of every linear layer for one sample with one timestep.

    Args:
        model: a `VideoDiT`.
        num_tokens: L.
        text_len: S.
        image_len: image tokens of image-to-video models.
    """
    # tokens that pass through a layer, by the prefix or suffix of its name; the rest see every video token
    prefixes = {
        "condition_embedder.time": 1,
        "condition_embedder.text_embedder.": text_len,
        "condition_embedder.image_embedder.": image_len,
    }
    suffixes = {
        "attn2.to_k": text_len,
        "attn2.to_v": text_len,
        "attn2.add_k_proj": image_len,
        "attn2.add_v_proj": image_len,
    }

    def tokens(name: str) -> int:
        by_prefix = (n for prefix, n in prefixes.items() if name.startswith(prefix))
        by_suffix = (n for suffix, n in suffixes.items() if name.endswith(suffix))
        return next((n for found in (by_prefix, by_suffix) for n in found), num_tokens)

    return float(
        sum(
            2 * tokens(name) * module.weight.numel()
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv3d)
        )
    )


def count_flops(
    *,
    linear: float,
    self_pairs: Iterable[float],
    num_tokens: int,
    cross_len: int,
    dim: int,
    num_parameters: int,
    training: bool,
) -> FlopCount:
    """Combine linear layers and attention; the backward costs 2x a linear layer and 2.5x attention.

    Args:
        linear: forward FLOPs of the linear layers.
        self_pairs: executed query-key pairs of one head, per layer.
        num_tokens: L.
        cross_len: text and image tokens each query sees in cross-attention.
        dim: C.
        num_parameters: N.
        training: count the backward too.

    Source: VSA paper section 3 and appendix C (attention forward 4 FLOPs per pair and channel, 3.5x with backward).
    """
    pairs = list(self_pairs)
    linear_factor, attention_factor = (3.0, 3.5) if training else (1.0, 1.0)
    self_attention = attention_factor * 4 * dim * sum(pairs)
    cross_attention = attention_factor * 4 * dim * num_tokens * cross_len * len(pairs)
    dense_pairs = float(num_tokens) ** 2 * len(pairs)
    return FlopCount(
        executed=linear_factor * linear + cross_attention + self_attention,
        self_attention=self_attention,
        dense_equivalent=linear_factor * 2 * num_parameters * num_tokens + attention_factor * 4 * dim * dense_pairs,
    )
