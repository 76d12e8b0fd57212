"""Flow matching in the terms of a DDPM schedule whose model predicts v, as that of CogVideoX."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def angle_of(timestep: Tensor) -> Tensor:
    """Angle fp32 `[B]` whose cosine and sine have the ratio of x0 to noise at a flow-matching timestep."""
    sigma = timestep.float() / 1000
    return torch.atan2(sigma, 1 - sigma)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def angles_of_schedule(snr_shift: float, device: torch.device) -> Tensor:
    """Angles fp32 `[1000]` of the timesteps of the class: 0 is the cleanest, 999 is noise (zero terminal SNR)."""
    betas = torch.linspace(math.sqrt(0.00085), math.sqrt(0.012), 1000, dtype=torch.float64).square()
    alphas = (1 - betas).cumprod(0)
    roots = (alphas / (snr_shift + (1 - snr_shift) * alphas)).sqrt()
    roots = (roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])
    return roots.acos().float().to(device)


def interpolated(angle: Tensor, angles: Tensor) -> Tensor:
    """Timesteps `[B]` of the class, between its whole ones, at angles `[B]`."""
    high = torch.searchsorted(angles, angle.contiguous()).clamp(1, len(angles) - 1)
    low, up = angles[high - 1], angles[high]
    return (high - 1 + ((angle - low) / (up - low))).clamp(0, len(angles) - 1)


def velocity_of(x: Tensor, v: Tensor, angle: Tensor) -> Tensor:
    """Velocity fp32, noise - x0, of flow matching.

    Args:
        x: noised latents of flow matching `[B, ...]`.
        v: prediction for the scaled latents, of the same shape.
        angle: angles `[B]`.
    """
    cos, sin = (part.view(-1, *[1] * (x.dim() - 1)) for part in (angle.cos(), angle.sin()))
    # cos x0 + sin noise, and v = cos noise - sin x0
    scaled = x.float() * (cos + sin)
    return (sin - cos) * scaled + (cos + sin) * v.float()
