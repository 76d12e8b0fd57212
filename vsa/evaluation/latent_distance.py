"""A kernel distance of generated and real clips by their latents: no learned network, unbiased at any number of clips.

N clips, C T H W latent channels, frames and size, F features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.evaluation.bootstrap import DRAWS, resample_counts

CELLS = 4
"""Cells along each of time, height and width that latents are pooled to (fewer where the latents have fewer)."""

LEAST_CLIPS = 16
"""Smallest number of clips on each side for a kernel distance."""


def kernel_distance(features: Tensor, reference: Tensor, *, draws: int = DRAWS) -> tuple[float, float, float]:
    """Unbiased squared maximum mean discrepancy of two sets, with the kernel k(a, b) = (a b / F + 1)^3.

    With N features x and M features y it is the U-statistic, in float64,

        mean of k(x_i, x_j) over i != j  +  mean of k(y_i, y_j) over i != j  -  2 mean of k(x_i, y_j)

    whose expectation is 0 for two sets of one distribution, so values below 0 occur. The interval is that of a
    bootstrap over the clips, from seed 0, which leaves pairs of a clip with itself out as the value does. Clips with
    several rows of features, those of their frames, count with the mean over all pairs of their rows.
    Source: Binkowski et al., "Demystifying MMD GANs" (arXiv 1801.01401), section 4 (KID) and equation 4.

    Args:
        features: `[N, F]`, or `[N, S, F]` with S rows for each clip.
        reference: `[M, F]`, or `[M, S, F]`.
        draws: number of bootstrap draws.

    Returns:
        The distance, and the ends of its interval of 95% over other clips of the same two kinds.
    """
    check_features(features, reference)
    x, y = (z.double() if z.ndim == 3 else z.double()[:, None] for z in (features, reference))
    # a pair of a clip with itself counts nothing
    within = [_kernel(z, z).fill_diagonal_(0) for z in (x, y)]
    across = _kernel(x, y)

    def estimate(*counts: Tensor) -> Tensor:
        # [draws, N] and [draws, M]: how often each clip counts
        totals = [count.sum(1) for count in counts]
        triples = zip(counts, within, totals, strict=True)
        means = [((count @ kernel) * count).sum(1) / (n**2 - (count**2).sum(1)) for count, kernel, n in triples]
        return means[0] + means[1] - 2 * ((counts[0] @ across) * counts[1]).sum(1) / (totals[0] * totals[1])

    generator = torch.Generator().manual_seed(0)
    counts = [resample_counts(len(z), draws, generator) for z in (x, y)]
    low, high = estimate(*counts).quantile(x.new_tensor([0.025, 0.975])).tolist()
    return estimate(x.new_ones(1, len(x)), y.new_ones(1, len(y))).item(), low, high


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    """`[N, M]` means of the kernel over the rows of `[N, S, F]` and `[M, S, F]`."""
    values = (x.flatten(0, 1) @ y.flatten(0, 1).T / x.shape[2] + 1) ** 3
    return values.reshape(*x.shape[:2], *y.shape[:2]).mean((1, 3))


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
    return torch.cat([cells(part) for part in (x, x.diff(dim=2).abs())[: x.shape[2]]], 1)


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
    noise = noise_like(real, len(latents), generator)
    ours, target, ceiling = (clip_features(rows) for rows in (latents, real, noise))
    return bounded("kernel_distance", kernel_distance, ours, target, ceiling, generator)


def noise_like(real: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Gaussian noise with the mean and the deviation of each channel of latents, float64 `[count, C, T, H, W]`."""
    real = real.detach().cpu().double()
    std, mean = torch.std_mean(real, (0, 2, 3, 4), keepdim=True)
    return mean + std * torch.randn(count, *real.shape[1:], generator=generator, dtype=torch.float64)


def bounded(
    name: str,
    distance: Callable[[Tensor, Tensor], tuple[float, float, float]],
    ours: Tensor,
    real: Tensor,
    noise: Tensor,
    generator: torch.Generator,
) -> dict[str, float]:
    """A distance of generated clips to real ones as `name`, its floor as `name_real` and its ceiling as `name_noise`.

    Args:
        name: name of the metric.
        distance: the distance of two sets, and the ends of its interval.
        ours: features of generated clips.
        real: features of real clips, of which two halves give the floor.
        noise: features of noise.
        generator: source of the halves.
    """
    halves = real[torch.randperm(len(real), generator=generator)].tensor_split(2)
    pairs = {"": (ours, real), "_real": halves, "_noise": (noise, real)}
    rows = {kind: zip(("", "_low", "_high"), distance(*pair), strict=True) for kind, pair in pairs.items()}
    return {f"{name}{kind}{end}": value for kind, row in rows.items() for end, value in row}


def check_features(*sets: Tensor) -> None:
    """Raise ValueError for sets of other widths, of less than 2 rows, or with values that are not finite."""
    shapes = [list(rows.shape) for rows in sets]
    if any(len(shape) not in (2, 3) for shape in shapes) or shapes[0][-1] != shapes[1][-1]:
        raise ValueError(f"features must be [N, F] and [M, F], got {shapes[0]} and {shapes[1]}")
    for rows in sets:
        if len(rows) < 2:
            raise ValueError(f"a distance needs at least 2 rows, got {len(rows)}")
        if broken := int((~rows.isfinite()).flatten(1).any(1).sum()):
            raise ValueError(f"features of {broken} of {len(rows)} clips are not finite")


def cells(x: Tensor) -> Tensor:
    """`[N, C, T, H, W]` averaged over at most `CELLS` cells of each axis, `[N, C * cells]`."""
    return F.adaptive_avg_pool3d(x, [min(size, CELLS) for size in x.shape[2:]]).flatten(1)  # type: ignore[arg-type]


def refuse_few(count: int, what: str) -> None:
    """Raise ValueError for too few clips for a kernel distance."""
    if count < LEAST_CLIPS:
        raise ValueError(f"{count} of the needed {LEAST_CLIPS} {what}")
