"""Bootstrap over clips: how far a number moves with other clips of the same kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DRAWS = 1000
"""Number of resamples of an interval."""


def resample_counts(count: int, draws: int, generator: torch.Generator) -> Tensor:
    """float64 `[draws, count]`: how often each of `count` items is drawn in each of `draws` resamples."""
    drawn = torch.randint(count, (draws, count), generator=generator)
    return torch.zeros(draws, count, dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())


def mean_interval(values: Sequence[float], *, draws: int = DRAWS) -> tuple[float, float]:
    """Ends of the 95% interval of a mean: quantiles of the means of resamples, drawn with replacement from seed 0.

    Args:
        values: values of at least two independent items; of differences for a paired comparison.
        draws: number of resamples.
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs at least 2 values, got {len(values)}")
    counts = resample_counts(len(values), draws, torch.Generator().manual_seed(0))
    means = counts @ torch.tensor(values, dtype=torch.float64) / len(values)
    low, high = means.quantile(means.new_tensor([0.025, 0.975])).tolist()
    return low, high
