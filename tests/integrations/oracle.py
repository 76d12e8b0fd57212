"""What a transformer computes with tile attention, through its own processors: only the mask of softmax is replaced.

Shares no code with `vsa`: inside `masked_attention` the self-attention calls of an untouched model get a boolean mask
over token pairs, made by brute force from the means of q and k over the tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attention.oracle import cube_ids

Grid = tuple[int, int, int]


def tile_mask(q: Tensor, k: Tensor, valid: Tensor, grid: Grid, tile: Grid, topk: int, first: int) -> Tensor:
    """bool `[B, H, L, L]`: which token sees which.

    Args:
        q, k: `[B, H, L, D]`.
        valid: bool `[B, L]`, False at padding.
        grid: video tokens; they stand at `first` and following.
        tile: of the video.
        topk: tiles kept.
        first: position of the first video token.
    """
    batch, num_heads, length, dim = q.shape
    video = math.prod(grid)
    ids = torch.tensor(cube_ids(grid, tile))
    members = torch.zeros(int(ids.max()) + 1, length, dtype=torch.bool)
    members[ids, first + torch.arange(video)] = True
    mean = members.double() / members.sum(1, keepdim=True)
    scores = (mean @ q.double()) @ (mean @ k.double()).transpose(-1, -2) / math.sqrt(dim)
    is_video = members.any(0)
    mask = (~is_video[:, None] | ~is_video).expand(batch, num_heads, length, length).clone()
    for b in range(batch):
        for h in range(num_heads):
            for i in range(len(members)):
                for j in scores[b, h, i].argsort(descending=True)[:topk].tolist():
                    mask[b, h] |= members[i][:, None] & members[j]
    return mask & valid[:, None, None]


@contextmanager
def masked_attention(
    grid: Grid, tile: Grid, topk: int, *, text: int = 0, text_side: Literal["first", "last"] = "last"
) -> Iterator[list[float]]:
    """Calls of softmax attention over `text + grid` tokens see tiles only; the others stay as they are.

    Yields:
        share of the token pairs that each masked call kept.
    """
    length = math.prod(grid) + text
    plain, shares = F.scaled_dot_product_attention, []

    def attention(query, key, value, attn_mask=None, **rest):
        if query.shape[2] != length or key.shape[2] != length:
            return plain(query, key, value, attn_mask=attn_mask, **rest)
        valid = torch.ones(query.shape[0], length, dtype=torch.bool)
        if attn_mask is not None:
            valid &= attn_mask[:, 0, 0]
        with torch.no_grad():
            mask = tile_mask(query, key, valid, grid, tile, topk, text if text_side == "first" else 0)
        shares.append(mask.double().mean().item())
        return plain(query, key, value, attn_mask=mask, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attention)
        yield shares
