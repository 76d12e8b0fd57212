"""Which implementation of an op runs: a pure function of the name asked for and the device."""

from __future__ import annotations

import torch

BLOCK_SPARSE_BACKENDS = ("reference", "gather")
"""Implementations of `block_sparse_attn` by name."""


def resolve_backend(name: str | None, device: torch.device) -> str:
    """The backend of one `block_sparse_attn` call.

    None picks the fastest one for the device, today `gather` on every device. A named backend is taken as it is and
    never falls back to another one.

    Args:
        name: backend asked for, None for the automatic choice.
        device: where q, k and v live.

    Raises:
        ValueError: `name` is no known backend.
    """
    if name is None:
        return "gather"
    if name not in BLOCK_SPARSE_BACKENDS:
        known = ", ".join(BLOCK_SPARSE_BACKENDS)
        raise ValueError(f"backend must be one of {known} or None (automatic for {device.type}), got {name!r}")
    return name
