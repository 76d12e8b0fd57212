"""Calls that reach every kernel of block pooling."""

from __future__ import annotations

from collections.abc import Iterator

from vsa_kernels.pooling import api
from vsa_kernels.testing import Call, Case


def block_mean_pool(case: Case) -> Iterator[Call]:
    """Means of queries and of keys."""
    for x, blocks in ((case.q, case.q_blocks), (case.k, case.kv_blocks)):
        yield Call(api.block_mean_pool, (x.detach().requires_grad_(), blocks))


def block_mean_and_similarity(case: Case) -> Iterator[Call]:
    """Of keys as they are, and less their mean."""
    for center in (None, case.k.float().mean(1)):
        yield Call(api.block_mean_and_similarity, (case.k, case.kv_blocks), {"center": center})
