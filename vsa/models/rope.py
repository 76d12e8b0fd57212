"""Rotary position embedding over a 3-D token grid.

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from vsa_kernels.norm_rope.reference import rotate

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, each `[L, D / 2]` float32."""


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head that encode time, height and width (128 -> 44, 42, 42), as in Wan2.1.

    Args:
        head_dim: D, even and at least 6.
    """
    if head_dim < 6 or head_dim % 2:
        raise ValueError(f"attention_head_dim must be even and at least 6 for 3-D RoPE, got {head_dim}")
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


@lru_cache(maxsize=32)
def rope_tables(grid_thw: tuple[int, int, int], head_dim: int, device: torch.device, theta: float = 10000.0) -> Rope:
    """Rotation tables of a token grid in raster order, computed in float64 on the CPU and cached per device.

    Args:
        grid_thw: token grid.
        head_dim: D.
        device: device of the tables.
        theta: base of the frequencies.

    Returns:
        cos, sin `[L, D / 2]` float32; the pairs of the time axis come first, then height, then width.
    """
    # autograd cannot save cached tables that were created under inference_mode
    with torch.inference_mode(False):
        angles = []
        for axis, (size, dim) in enumerate(zip(grid_thw, axis_dims(head_dim), strict=True)):
            exponent = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
            angle = torch.outer(torch.arange(size, dtype=torch.float64, device="cpu"), theta**-exponent)
            shape = [1, 1, 1, dim // 2]
            shape[axis] = size
            angles.append(angle.view(shape).expand(*grid_thw, -1))
        table = torch.cat(angles, dim=-1).flatten(0, 2)
        return table.cos().float().to(device), table.sin().float().to(device)


@lru_cache(maxsize=32)
def sincos_table(grid_thw: tuple[int, int, int], dim: int, device: torch.device) -> Tensor:
    """Sinusoidal absolute positions of a token grid in raster order, a third of the channels per axis.

    Args:
        grid_thw: token grid.
        dim: C; channels past the last multiple of 6 stay zero.
        device: device of the table.

    Returns:
        `[L, C]` float32; wavelengths run from 2 pi to 200 pi tokens.
    """
    with torch.inference_mode(False):
        pairs = dim // 6
        frequency = 100.0 ** -(torch.arange(pairs, dtype=torch.float64, device="cpu") / max(pairs, 1))
        table = torch.zeros(*grid_thw, dim, dtype=torch.float64, device="cpu")
        for axis, size in enumerate(grid_thw):
            angle = torch.outer(torch.arange(size, dtype=torch.float64, device="cpu"), frequency)
            shape = [1, 1, 1, 2 * pairs]
            shape[axis] = size
            start = 2 * pairs * axis
            table[..., start : start + 2 * pairs] = torch.cat((angle.sin(), angle.cos()), dim=-1).view(shape)
        return table.flatten(0, 2).float().to(device)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate neighbouring channel pairs `(x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos)`, in at least float32.

    Args:
        x: `[B, L, H, D]` queries or keys.
        rope: cos, sin `[L, D / 2]`, in the token order of x.
    """
    return rotate(x, *rope)
