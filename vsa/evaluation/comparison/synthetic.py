"""Synthetic queries, keys and values: random fields with the structure of video, and noise as a control.

L tokens in raster order, H heads, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vsa.attention.stats import sample_tokens
from vsa.attention.tiling import Grid
from vsa.evaluation.comparison.captures import Capture, Captures
from vsa.models.rope import apply_rope, axis_dims, rope_tables

WIDTHS = (1.0, 2.0, 4.0)
"""Tokens over which a field changes, by heads in turn."""
GLOBALS = 4
"""Components of a head that reach over the whole grid."""
LOGIT_STD = 3.0
"""Standard deviation of the logits of structured fields; of noise it is 1."""


def draw_captures(grid_thw: Grid, *, heads: int, head_dim: int, seed: int = 0, device: str = "cpu") -> Captures:
    """Structured fields and noise, both of one sample, float32.

    Fields: each channel is a Gaussian random field over the token grid that changes over 1, 2 or 4 tokens (by heads in
    turn); keys are an even mix of the queries' field and a second one, so similar tokens attend to each other; a few
    directions, with fields as wide as the grid, connect distant places; RoPE favours nearby tokens. Values are a smooth
    field with as much noise. They show how methods treat such structure, not how they treat a trained model.

    Args:
        grid_thw: token grid.
        heads: H.
        head_dim: D.
        seed: seed of all random numbers.
        device: device of the fields; numbers are drawn on the CPU, the same for every device.
    """
    if min(*grid_thw, heads) < 1:
        raise ValueError(f"sizes must be at least 1, got grid {tuple(grid_thw)} and {heads} heads")
    axis_dims(head_dim)
    generator = torch.Generator().manual_seed(seed)
    head_tensors = [_head(grid_thw, head_dim, WIDTHS[head % len(WIDTHS)], generator, device) for head in range(heads)]
    q, k, v = (torch.stack(some, dim=1)[None] for some in zip(*head_tensors, strict=True))
    noise = [torch.randn(q.shape, generator=generator).to(device) for _ in range(3)]
    items = [
        Capture(name="fields", grid_thw=grid_thw, q=q, k=k, v=v),
        Capture(name="noise", grid_thw=grid_thw, q=noise[0], k=noise[1], v=noise[2]),
    ]
    return Captures(items=items, source=f"synthetic, seed {seed}")


def _head(grid: Grid, dim: int, width: float, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[L, D]` of one head."""
    q, own, v = (_field(grid, dim, (width,) * 3, generator, device) for _ in range(3))
    k = (q + own) / math.sqrt(2)
    wide = _field(grid, GLOBALS, tuple(n / 2 for n in grid), generator, device)
    directions = torch.nn.functional.normalize(torch.randn(GLOBALS, dim, generator=generator), dim=1).to(device)
    # as large as the local part of a vector, in all components together
    shared = math.sqrt(dim / GLOBALS) * wide @ directions
    rope = rope_tables(grid, dim, torch.device(device))
    q, k = (apply_rope((x + shared)[None, :, None], rope)[0, :, 0] for x in (q, k))
    some = sample_tokens(len(q), 512).to(device)
    logits = q[some] @ k[some].T / math.sqrt(dim)
    scale = math.sqrt(LOGIT_STD / float(logits.std().clamp_min(1e-6)))
    noise = torch.randn(v.shape, generator=generator).to(device)
    return scale * q, scale * k, (v + noise) / math.sqrt(2)


def _field(grid: Grid, channels: int, widths: tuple[float, ...], generator: torch.Generator, device: str) -> Tensor:
    """Gaussian random field `[L, channels]` of unit variance, smooth over `widths` tokens along each axis."""
    x = torch.randn(*grid, channels, generator=generator).to(device)
    for axis, (size, width) in enumerate(zip(grid, widths, strict=True)):
        place = torch.arange(size, device=device, dtype=torch.float32)
        kernel = torch.exp(-(((place[:, None] - place) / width) ** 2))
        # rows of unit length keep the variance, at the borders too
        kernel = kernel / kernel.norm(dim=1, keepdim=True)
        x = (kernel @ x.movedim(axis, -2)).movedim(-2, axis)
    return x.flatten(0, 2)
