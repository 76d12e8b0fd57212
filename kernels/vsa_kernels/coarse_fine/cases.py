"""Calls that reach every kernel of the VSA operator."""

from __future__ import annotations

from collections.abc import Iterator

from vsa_kernels.coarse_fine import api
from vsa_kernels.testing import Call, Case, normal


def coarse_fine_attn(case: Case) -> Iterator[Call]:
    """With the fine gate and without."""
    options = {**case.blocks, "topk": (case.kv_blocks.num + 1) // 2}
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    coarse, fine = (normal(case, *case.q.shape) for _ in range(2))
    for gate in (fine, None):
        yield Call(api.coarse_fine_attn, (*leaves, coarse, gate), options)
