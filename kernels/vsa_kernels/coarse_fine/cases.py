"""Calls that reach every kernel of the VSA operator."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vsa_kernels.coarse_fine import api
from vsa_kernels.testing import Call, Case, normal


def coarse_fine_attn(case: Case) -> Iterator[Call]:
    """With the fine gate and without; among candidates, with blocks that are always listed."""
    options = {**case.blocks, "topk": (case.kv_blocks.num + 1) // 2}
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    coarse, fine = (normal(case, *case.q.shape) for _ in range(2))
    candidates = torch.arange(case.kv_blocks.num, device=case.q.device).expand(case.q_blocks.num, -1) % 2 == 0
    for gate, masks in ((fine, {}), (None, {}), (fine, {"candidates": candidates, "always": ~candidates})):
        yield Call(api.coarse_fine_attn, (*leaves, coarse, gate), {**options, **masks})
