"""Calls that reach every kernel of norm and rotation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vsa_kernels.norm_rope import api
from vsa_kernels.testing import Call, Case, normal, projection, tokens


def norm_rope(case: Case) -> Iterator[Call]:
    """With rotation and without, of tokens and of projected ones."""
    _, L, H, D = case.q.shape
    weight, angle = normal(case, H * D), 3 * normal(case, L, D // 2, dtype=torch.float32).detach()
    narrow, layer = projection(case, H * D)
    options = {"num_heads": H, "eps": 1e-6}
    for tables in ((angle.cos(), angle.sin()), ()):
        yield Call(api.norm_rope, (tokens(case), weight, *tables), options)
        yield Call(api.norm_rope, (narrow, weight, *tables), {**options, "projection": layer})
