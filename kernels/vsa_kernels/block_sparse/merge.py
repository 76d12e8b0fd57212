"""Merging the results of attention over disjoint sets of keys, by their lse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attn(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attention over each of several disjoint sets of them.

        lse = log sum_i exp(lse_i),   out = sum_i exp(lse_i - lse) out_i

    Differentiable in every argument. Sums are in the dtype of the lse, on any device.

    Args:
        outs: `[B, L, H, D]` output of each part, in one dtype.
        lses: `[B, H, L]` natural-log lse of each part, -inf where a query has no keys in it.

    Returns:
        out `[B, L, H, D]` in the dtype of the parts, and lse `[B, H, L]`; 0 and -inf for a query without any key.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", section 3.1.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must have the same length of at least 1, got {len(outs)} and {len(lses)}")
    for out, lse in zip(outs, lses, strict=True):
        B, L, H, _ = out.shape
        if out.shape != outs[0].shape or lse.shape != (B, H, L):
            raise ValueError(
                f"every part must be an out {list(outs[0].shape)} with its lse [B, H, L], "
                f"got {list(out.shape)} with {list(lse.shape)}"
            )
    parts = torch.stack(list(lses))
    # a query without any key: 0 in the place of -inf keeps its weights at exp(-inf) and its gradients at 0
    empty = (parts == -torch.inf).all(0)
    whole = torch.logsumexp(parts.masked_fill(empty, 0), 0).masked_fill(empty, 0)
    weights = (parts - whole).exp().transpose(2, 3)[..., None]
    merged = sum(weight * out for weight, out in zip(weights, outs, strict=True))
    return merged.to(outs[0].dtype), whole.masked_fill(empty, -torch.inf)  # type: ignore[union-attr]
