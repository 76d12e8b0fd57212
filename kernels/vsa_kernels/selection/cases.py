"""Calls that reach every kernel of block selection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.selection import api
from vsa_kernels.testing import Call, Case, normal


def select_topk(case: Case) -> Iterator[Call]:
    """One top-k, and one of each row; among all blocks and among candidates."""
    scores, candidates, always = _scores(case)
    num_q, num_kv = scores.shape[2:]
    rows = 1 + torch.arange(num_q, dtype=torch.int32, device=scores.device) % num_kv
    yield Call(api.select_topk, (scores, (num_kv + 1) // 2))
    yield Call(api.select_topk, (scores, (num_kv + 1) // 2), {"candidates": candidates})
    yield Call(api.select_topk, (scores, rows), {"candidates": candidates, "always": always})


def select_share(case: Case) -> Iterator[Call]:
    """Either rule of the block that crosses the share, among all blocks and among candidates."""
    scores, candidates, always = _scores(case)
    yield Call(api.select_share, (scores, 0.7), {"crossing": "keep"})
    yield Call(api.select_share, (scores, 0.3), {"crossing": "drop", "candidates": candidates, "always": always})


def mean_scores(case: Case) -> Iterator[Call]:
    """Of means in fp32, and as of half precision."""
    sides = ((case.q, case.q_blocks), (case.k, case.kv_blocks))
    means = tuple(normal(case, x.shape[0], b.num, *x.shape[2:], dtype=torch.float32).detach() for x, b in sides)
    for half in (False, True):
        yield Call(api.mean_scores, means, {"half": half})


def subblock_scores(case: Case) -> Iterator[Call]:
    """Both forms, of ragged and of equal groups, as of half precision and with candidates."""
    (B, _, H, D), device = case.q.shape, case.q.device
    q_groups, kv_groups = (Blocks.from_sizes([1 + (3 * n + num) % 6 for n in range(num)], device) for num in (7, 5))
    heads = ((q_groups, H), (kv_groups, case.k.shape[2]))
    means = tuple(normal(case, B, int(x.offsets[-1]), h, D, dtype=torch.float32).detach() for x, h in heads)
    groups = {"q_groups": q_groups, "kv_groups": kv_groups}
    candidates = torch.arange(35, device=device).view(7, 5) % 3 > 0
    yield Call(api.subblock_scores, means, {**groups, "half": True, "candidates": candidates})
    yield Call(api.subblock_scores, means, {**groups, "form": "lse"})
    equal = {name: Blocks.from_sizes([4] * num, device) for name, num in (("q_groups", 5), ("kv_groups", 4))}
    means = tuple(x[:, : 4 * n].contiguous() for x, n in zip(means, (5, 4), strict=True))
    yield Call(api.subblock_scores, means, {**equal, "half": True})
    yield Call(api.subblock_scores, means, {**equal, "half": True, "weights": torch.ones_like(means[1][0, :, 0, 0])})


def _scores(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    # with two masks of blocks
    (B, _, H, _), num_q, num_kv = case.q.shape, case.q_blocks.num, case.kv_blocks.num
    candidates, always = normal(case, 2, num_q, num_kv).detach() < 0
    return normal(case, B, H, num_q, num_kv, dtype=torch.float32).detach(), candidates, always
