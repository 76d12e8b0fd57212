"""FG-Attn by definition, in Python loops over fp64: means, masses, the smallest sets, greedy groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def runs(num_tokens: int, size: int) -> list[range]:
    """Tokens of each tile."""
    return [range(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def kept_tiles(q: Tensor, k: Tensor, q_tokens: int, kv_tokens: int, top_p: float) -> list[list[set[int]]]:
    """Kv tiles of every query tile by head, of q, k `[L, H, D]`."""
    return [_kept(q[:, h].double(), k[:, h].double(), q_tokens, kv_tokens, top_p) for h in range(q.shape[1])]


def _kept(q: Tensor, k: Tensor, q_tokens: int, kv_tokens: int, top_p: float) -> list[set[int]]:
    keys = [sum(k[i] for i in tile) / len(tile) for tile in runs(len(k), kv_tokens)]
    selections = []
    for tile in runs(len(q), q_tokens):
        query = sum(q[i] for i in tile) / len(tile)
        logits = [float(query @ key) / math.sqrt(q.shape[1]) for key in keys]
        weights = [math.exp(x - max(logits)) for x in logits]
        selection, mass = set[int](), 0.0
        for j in sorted(range(len(keys)), key=lambda j: (-weights[j], j)):
            if mass >= top_p * sum(weights) and top_p < 1:
                break
            selection.add(j)
            mass += weights[j]
        selections.append(selection)
    return selections


def greedy_groups(rows: Sequence[set[int]], size: int) -> list[list[int]]:
    """Members of each group, the leader first, then by XOR distance to it and number."""
    free, groups = list(range(len(rows))), []
    while free:
        leader = free[0]
        nearest = sorted(free[1:], key=lambda i: (len(rows[i] ^ rows[leader]), i))[: size - 1]
        groups.append([leader, *nearest])
        free = [i for i in free if i not in groups[-1]]
    return groups


def token_mask(
    rows: Sequence[set[int]], groups: Sequence[Sequence[int]], num_tokens: int, q_tokens: int, kv_tokens: int
) -> Tensor:
    """bool `[L, L]` where every tile sees what any tile of its group keeps."""
    q_tiles, kv_tiles = runs(num_tokens, q_tokens), runs(num_tokens, kv_tokens)
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for group in groups:
        for j in set().union(*(rows[i] for i in group)):
            for i in group:
                mask[q_tiles[i].start : q_tiles[i].stop, kv_tiles[j].start : kv_tiles[j].stop] = True
    return mask


def attention(q: Tensor, k: Tensor, v: Tensor, masks: Tensor) -> Tensor:
    """`[1, L, H, D]` over the keys of masks `[H, L, L]`."""
    logits = torch.einsum("blhd,bshd->bhls", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhls,bshd->blhd", logits.masked_fill(~masks, -math.inf).softmax(-1), v)


def objective(rows: Sequence[set[int]], groups: Sequence[Sequence[int]]) -> int:
    """Equation 1: the sum of the distances of all members to the first of their group."""
    return sum(len(rows[i] ^ rows[group[0]]) for group in groups for i in group)
