"""A Fréchet distance of many clips by their latents, without a learned network.

N clips, C T H W latent channels, frames and size, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vsa.evaluation.feature_distance import frechet_distance
from vsa.evaluation.latent_distance import cells

CLIPS_PER_FEATURE = 4
"""Smallest number of clips per feature; with fewer, the covariance would be mostly noise."""


def refuse_too_few(clips: int, channels: int) -> None:
    """Raise ValueError for too few clips to have a feature besides those of the channels."""
    least = CLIPS_PER_FEATURE * (2 * channels + 1)
    if clips < least:
        raise ValueError(f"a latent distance of {channels} channels needs at least {least} clips, got {clips}")


def latent_features(latents: Tensor) -> Tensor:
    """Features of clips for `latent_distance`: N/4 numbers per clip.

    They are the mean and the standard deviation of every channel over time, height and width (2 C numbers: colour,
    contrast, blur and noise), and N/4 - 2 C numbers for the content by position and time: the latents averaged over the
    cells of a grid of 4 x 4 x 4 (`CELLS`) and multiplied by a fixed matrix of orthonormal columns, the Q of a Gaussian
    matrix drawn with seed 0.

    Args:
        latents: `[N, C, T, H, W]`, normalised.

    Returns:
        float64 `[N, F]` on the CPU, F = N/4 rounded down (less where the grid has fewer cells).
    """
    if latents.ndim != 5:
        raise ValueError(f"latents must be [N, C, T, H, W], got {list(latents.shape)}")
    clips, channels = latents.shape[:2]
    refuse_too_few(clips, channels)
    count = clips // CLIPS_PER_FEATURE - 2 * channels
    latents = latents.detach().cpu().double()
    flat = latents.flatten(2)
    coarse = cells(latents)
    if coarse.shape[1] > count:
        gaussian = torch.randn(coarse.shape[1], count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        coarse = coarse @ torch.linalg.qr(gaussian).Q
    return torch.cat([flat.mean(2), flat.std(2, correction=0), coarse], 1)


def latent_distance(latents: Tensor, reference: Tensor) -> float:
    """Squared Fréchet distance between the features of two sets of clips; see `latent_features`.

    Distances with another number of clips or another latent shape are not comparable. By sampling, two sets of one
    distribution have a distance above 0: compare with the distance of two independent real sets.

    Args:
        latents: `[N, C, T, H, W]`, normalised.
        reference: the same shape, normalised with the same statistics.
    """
    if latents.shape != reference.shape:
        raise ValueError(f"latents must have the same shape, got {list(latents.shape)} and {list(reference.shape)}")
    return frechet_distance(latent_features(latents), latent_features(reference))
