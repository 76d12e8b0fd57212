"""Distances of generated and real clips by their latents, without a learned network: a kernel distance, unbiased at any
number of clips, and a Fréchet distance for many clips.

N clips, C T H W latent channels, frames and size, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CELLS = 4
"""Cells along each of time, height and width that latents are pooled to (fewer where the latents have fewer)."""
CLIPS_PER_FEATURE = 4
"""Smallest number of clips per feature; with fewer, the covariance would be mostly noise."""

LEAST_CLIPS = 16
"""Smallest number of clips on each side for a kernel distance."""


def kernel_distance(features: Tensor, reference: Tensor, *, draws: int = 1000) -> tuple[float, float, float]:
    """Unbiased squared maximum mean discrepancy of two sets, with the kernel k(a, b) = (a b / F + 1)^3.

    With N features x and M features y it is the U-statistic, in float64,

        mean of k(x_i, x_j) over i != j  +  mean of k(y_i, y_j) over i != j  -  2 mean of k(x_i, y_j)

    whose expectation is 0 for two sets of one distribution, so values below 0 occur. The interval is that of a
    bootstrap over the clips, from seed 0, which leaves pairs of a clip with itself out as the value does.
    Source: Binkowski et al., "Demystifying MMD GANs" (arXiv 1801.01401), section 4 (KID) and equation 4.

    Args:
        features: `[N, F]`.
        reference: `[M, F]`.
        draws: number of bootstrap draws.

    Returns:
        The distance, and the ends of its interval of 95% over other clips of the same two kinds.
    """
    _check_features(features, reference)
    x, y = features.double(), reference.double()
    # a pair of a clip with itself counts nothing
    within = [((z @ z.T / z.shape[1] + 1) ** 3).fill_diagonal_(0) for z in (x, y)]
    across = (x @ y.T / x.shape[1] + 1) ** 3

    def estimate(*counts: Tensor) -> Tensor:
        # [draws, N] and [draws, M]: how often each clip counts
        totals = [count.sum(1) for count in counts]
        triples = zip(counts, within, totals, strict=True)
        means = [((count @ kernel) * count).sum(1) / (n**2 - (count**2).sum(1)) for count, kernel, n in triples]
        return means[0] + means[1] - 2 * ((counts[0] @ across) * counts[1]).sum(1) / (totals[0] * totals[1])

    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(len(z), (draws, len(z)), generator=generator) for z in (x, y)]
    counts = [torch.stack([row.bincount(minlength=len(row)) for row in rows]).double() for rows in drawn]
    low, high = estimate(*counts).quantile(x.new_tensor([0.025, 0.975])).tolist()
    return estimate(x.new_ones(1, len(x)), y.new_ones(1, len(y))).item(), low, high


def clip_features(latents: Tensor) -> Tensor:
    """Features of clips for `kernel_distance`: their content and their motion, of a fixed size.

    The latents, and the absolute differences between successive latent frames, are averaged over the cells of a grid of
    4 x 4 x 4 (`CELLS`).

    Args:
        latents: `[N, C, T, H, W]`, normalised.

    Returns:
        float64 `[N, F]` on the CPU, F = 128 C (less where there are fewer cells or frames).
    """
    x = latents.detach().cpu().double()
    # one frame has no differences
    return torch.cat([_cells(part) for part in (x, x.diff(dim=2).abs())[: x.shape[2]]], 1)


def against_real(latents: Tensor, real: Tensor) -> dict[str, float]:
    """Kernel distance of generated clips to real ones, with what it is for real clips and for noise.

    Args:
        latents: `[N, C, T, H, W]`, normalised, at least `LEAST_CLIPS`.
        real: `[M, C, T, H, W]`, normalised in the same way, at least `LEAST_CLIPS`.

    Returns:
        `kernel_distance`; `kernel_distance_real` between two halves of the real clips, drawn with seed 0 (the floor);
        `kernel_distance_noise` of Gaussian noise with the mean and standard deviation of each channel of the real clips
        (the ceiling); each also with `_low` and `_high`, the ends of its interval.
    """
    generator = torch.Generator().manual_seed(0)
    real = real.detach().cpu().double()
    std, mean = torch.std_mean(real, (0, 2, 3, 4), keepdim=True)
    noise = mean + std * torch.randn(len(latents), *real.shape[1:], generator=generator, dtype=torch.float64)
    target = clip_features(real)
    halves = target[torch.randperm(len(target), generator=generator)].tensor_split(2)
    pairs = {"": (clip_features(latents), target), "_real": halves, "_noise": (clip_features(noise), target)}
    rows = {name: zip(("", "_low", "_high"), kernel_distance(*pair), strict=True) for name, pair in pairs.items()}
    return {f"kernel_distance{name}{end}": value for name, row in rows.items() for end, value in row}


def frechet_distance(features: Tensor, reference: Tensor) -> float:
    """Squared Fréchet distance between the Gaussians fitted to two sets: |m - n|^2 + tr(A + B - 2 (A B)^(1/2)).

    m, n and A, B are means and unbiased covariances, in float64. The trace of (A B)^(1/2) is the sum of the singular
    values of A^(1/2) B^(1/2), whose roots come from eigen-decompositions of symmetric matrices. Source: Dowson and
    Landau, "The Fréchet distance between multivariate normal distributions" (1982); Heusel et al. (2017), equation 6.

    Args:
        features: `[N, F]`.
        reference: `[M, F]`.
    """
    _check_features(features, reference)
    fits = []
    for rows in (features.double(), reference.double()):
        mean = rows.mean(0)
        covariance = (rows - mean).T @ (rows - mean) / (len(rows) - 1)
        values, vectors = torch.linalg.eigh(covariance)
        # rounding can make zero eigenvalues negative
        fits.append((mean, covariance, (vectors * values.clamp_min(0).sqrt()) @ vectors.T))
    (m, a, root_a), (n, b, root_b) = fits
    spread = a.trace() + b.trace() - 2 * torch.linalg.svdvals(root_a @ root_b).sum()
    return float(((m - n).square().sum() + spread).clamp_min(0))


def _check_features(*sets: Tensor) -> None:
    shapes = [list(rows.shape) for rows in sets]
    if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][1]:
        raise ValueError(f"features must be [N, F] and [M, F], got {shapes[0]} and {shapes[1]}")
    for rows in sets:
        if len(rows) < 2:
            raise ValueError(f"a distance needs at least 2 rows, got {len(rows)}")
        if broken := int((~rows.isfinite()).any(1).sum()):
            raise ValueError(f"features of {broken} of {len(rows)} clips are not finite")


def _cells(x: Tensor) -> Tensor:
    """`[N, C, T, H, W]` averaged over at most `CELLS` cells of each axis, `[N, C * cells]`."""
    return F.adaptive_avg_pool3d(x, [min(size, CELLS) for size in x.shape[2:]]).flatten(1)  # type: ignore[arg-type]


def refuse_few(count: int, what: str) -> None:
    """Raise ValueError for too few clips for a kernel distance."""
    if count < LEAST_CLIPS:
        raise ValueError(f"{count} of the needed {LEAST_CLIPS} {what}")


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
    coarse = _cells(latents)
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
        raise ValueError(f"latents must have one shape, got {list(latents.shape)} and {list(reference.shape)}")
    return frechet_distance(latent_features(latents), latent_features(reference))
