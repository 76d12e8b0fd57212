"""Neighborhood attention by definition: loops over the tokens of one axis, dense masks, softmax in fp64.

Shares no code with `vsa`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def axis_mask(n: int, w: int, s: int, d: int, causal: bool) -> Tensor:
    """bool `[n, n]`, which keys (columns) each query sees."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    for residue in range(d):
        # tokens that see each other at all, d apart
        group = [x for x in range(n) if x % d == residue]
        for begin in range(0, len(group), s):
            # queries of this run share a window
            run = list(range(begin, min(begin + s, len(group))))
            if causal:
                leader = min(begin + s - 1, len(group) - 1)
                window = [leader - back for back in range(w) if leader - back >= 0]
            else:
                leader = min(begin + s // 2, len(group) - 1)
                # even windows have one key more on the left
                window = [leader - w // 2 + i for i in range(w)]
                while window[0] < 0:
                    window = [i + 1 for i in window]
                while window[-1] >= len(group):
                    window = [i - 1 for i in window]
            for query in run:
                for key in window:
                    if not causal or key <= query:
                        mask[group[query], group[key]] = True
    return mask


def grid_mask(
    grid: tuple[int, ...], window: tuple[int, ...], stride: Any, dilation: Any = (1, 1, 1), causal: Any = (False,) * 3
) -> Tensor:
    """bool `[L, L]` in raster order."""
    t, h, w = (axis_mask(*axis) for axis in zip(grid, window, stride, dilation, causal, strict=True))
    mask = t[:, None, None, :, None, None] & h[None, :, None, None, :, None] & w[None, None, :, None, None, :]
    return mask.reshape(math.prod(grid), math.prod(grid))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention `[B, L, H, D]` over the keys of a dense mask `[L, S]`."""
    logits = torch.einsum("blhd,bshd->bhls", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhls,bshd->blhd", logits.masked_fill(~mask, -math.inf).softmax(-1), v)
