"""Calls that reach every kernel of residual connections and norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vsa_kernels.residual_norm import api
from vsa_kernels.testing import Call, Case, normal, projection, tokens


def residual_norm(case: Case) -> Iterator[Call]:
    """Of tokens and of an odd width: gated and not, with a projection and without, without an update; with frozen rows,
    and with parameters for all samples. Of tokens with two rows of parameters."""
    eps = {"eps": 1e-6}
    for x in (tokens(case), tokens(case, 999)):
        B, _, width = x.shape
        update, vector = tokens(case, width), normal(case, width)
        gate, *modulation = rows = [normal(case, B, 1, width, dtype=torch.float32) for _ in range(3)]
        narrow, layer = projection(case, width)
        for some in (gate, None):
            yield Call(api.residual_norm, (x, update, some, *modulation), eps)
            yield Call(api.residual_norm, (x, narrow, some, *modulation), {**eps, "projection": layer})
        frozen = [row.detach() for row in rows]
        for some, *parameters in (frozen, (None, *frozen[1:]), (gate, vector, vector)):
            yield Call(api.residual_norm, (x, update, some, *parameters), eps)
            yield Call(api.residual_norm, (x, None, None, *parameters), eps)
    x = tokens(case)
    gate, *modulation = two_rows(case, x, 3)
    narrow, layer = projection(case, x.shape[2])
    for parameters in (modulation, [normal(case, x.shape[2])] * 2):
        options = {**eps, "projection": layer, "places": two_places(x)}
        yield Call(api.residual_norm, (x, narrow, gate, *parameters), options)


def gated_residual(case: Case) -> Iterator[Call]:
    """Of tokens and of an odd width, with a projection, with a frozen gate, with two rows of gates."""
    for x in (tokens(case), tokens(case, 999)):
        B, _, width = x.shape
        update, gate = tokens(case, width), normal(case, B, 1, width, dtype=torch.float32)
        narrow, layer = projection(case, width)
        for some in (gate, gate.detach()):
            yield Call(api.gated_residual, (x, update, some))
            yield Call(api.gated_residual, (x, narrow, some), {"projection": layer})
        (gate,) = two_rows(case, x, 1)
        yield Call(api.gated_residual, (x, narrow, gate), {"projection": layer, "places": two_places(x)})


def two_rows(case: Case, x: torch.Tensor, number: int) -> list[torch.Tensor]:
    """Parameters `[B, 2, C]`."""
    return [normal(case, x.shape[0], 2, x.shape[2], dtype=torch.float32) for _ in range(number)]


def two_places(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Every other token, before the rest."""
    tokens = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    return torch.cat([tokens[::2], tokens[1::2]]), len(tokens[::2])
