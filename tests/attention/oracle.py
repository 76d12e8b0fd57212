"""Video sparse attention by definition: one dense mask over all token pairs, in raster order and fp64.

Shares no code with `vsa`: tiles are numbered by dividing coordinates, means and masks are dense matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def cube_ids(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> list[int]:
    """Tile number of each raster token of a grid."""
    counts = [math.ceil(n / c) for n, c in zip(grid, tile, strict=True)]
    ids = []
    for t in range(grid[0]):
        for h in range(grid[1]):
            for w in range(grid[2]):
                ids.append(((t // tile[0]) * counts[1] + h // tile[1]) * counts[2] + w // tile[2])
    return ids


def grads_of(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a sum that weighs every element of `out` differently; zeros for leaves that it does not read."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True))


def video_sparse_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_coarse: Tensor,
    gate_fine: Tensor,
    *,
    tile_ids: Tensor,
    sample: Tensor,
    is_video: Tensor,
    topk: int,
    coarse_text: bool = False,
) -> Tensor:
    """Gated output of coarse and fine stage, any float dtype (computed in fp64).

    Args:
        q, k, v: `[B, L, H, D]` raster order.
        gate_coarse, gate_fine: like q.
        tile_ids: int `[L]`, number of each token's tile, unique in the row; ignored for text without `coarse_text`.
        sample: int `[L]`.
        is_video: bool `[L]`.
        topk: tiles per query tile, clamped to the tiles of the query's sample.
        coarse_text: whether text tiles take part in the coarse stage.
    """
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    tiled = is_video | coarse_text
    members = torch.stack([(tile_ids == n) & tiled for n in sorted(set(tile_ids[tiled].tolist()))])
    mean = members.double() / members.sum(1, keepdim=True)
    owner = torch.stack([sample[row][0] for row in members])
    scores = (mean @ q) @ (mean @ k).transpose(-1, -2) * scale
    scores = scores.masked_fill(owner[:, None] != owner, -math.inf)
    coarse = members.double().T @ (scores.softmax(-1) @ (mean @ v))

    batch, heads, length, _ = q.shape
    same = sample[:, None] == sample
    mask = (same & (~is_video[:, None] | ~is_video)).expand(batch, heads, length, length).clone()
    for b in range(batch):
        for h in range(heads):
            videos = [i for i, row in enumerate(members) if is_video[row].all()]
            for i in videos:
                ranked = scores[b, h, i].argsort(descending=True).tolist()
                for j in [j for j in ranked if j in videos and owner[j] == owner[i]][:topk]:
                    mask[b, h] |= members[i][:, None] & members[j]
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    fine = logits.softmax(-1) @ v
    return coarse.transpose(1, 2) * gate_coarse.double() + fine.transpose(1, 2) * gate_fine.double()
