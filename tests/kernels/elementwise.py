"""What the tests of operators that compute by element share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest error, as a share of the largest value."""


def two_rows(tensors: dict[str, Any], first: list[int], device: torch.device) -> tuple[dict[str, Any], Any]:
    """Tensors whose parameters `[B, 1, C]` have a second row, and the places of tokens of which some have the first."""
    generator = torch.Generator().manual_seed(5)

    def doubled(x: Tensor) -> Tensor:
        row = torch.randn(x.shape, generator=generator).to(x)
        return torch.cat([x.detach(), row], 1).requires_grad_()

    names = [name for name in ("gate", "weight", "bias") if tensors.get(name) is not None and tensors[name].ndim == 3]
    others = [i for i in range(tensors["x"].shape[1]) if i not in first]
    order = torch.tensor([*first, *others], dtype=torch.int32, device=device)
    return tensors | {name: doubled(tensors[name]) for name in names}, (order, len(first))


def spread(places: tuple[Tensor, int], *parameters: Tensor | None) -> list[Tensor | None]:
    """Two rows `[B, 2, C]` of each parameter as one for every token, token by token."""
    order, split = places
    first = set(order[:split].tolist())
    rows = [0 if i in first else 1 for i in range(len(order))]
    return [x if x is None or x.ndim == 1 else torch.stack([x[:, i] for i in rows], 1) for x in parameters]


def dtypes(device: torch.device, triton: bool) -> list[torch.dtype]:
    """The interpreter is wrong in half precision."""
    return [torch.float32] if triton and device.type == "cpu" else list(TOLERANCE)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, exact in want.items():
        error = (got[name].double() - exact.double()).abs().max() / exact.abs().max()
        assert error <= TOLERANCE[dtype], f"{name} is off by {error}"
