"""Mean and standard deviation of latents by channel: of a sample for its index, and over the samples of indexes."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from vsa.data.index import INDEX_NAME, DatasetIndex, SampleEntry
from vsa.data.index_values import LARGEST_VALUE


def deviation_or_one(std: Tensor) -> Tensor:
    """Standard deviations with 1 for constant channels (time bands of images), which must not be scaled up."""
    return torch.where(std > 1e-6, std, torch.ones_like(std))


def pooled_statistics(indexes: Sequence[DatasetIndex]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation float64 `[C]` over the latents of all data sets."""
    mean = torch.tensor([index.latent_mean for index in indexes], dtype=torch.float64)
    std = torch.tensor([index.latent_std for index in indexes], dtype=torch.float64)
    if len(indexes) == 1:
        return mean[0], std[0]
    cells = [sum(math.prod(s.latent_shape[1:]) for s in index.samples.values()) for index in indexes]
    share = torch.tensor(cells, dtype=torch.float64)[:, None] / sum(cells)
    # a standard deviation of exactly 1 marks a constant channel
    variance = torch.where(std == 1, 0, std**2)
    pooled = (share * mean).sum(0)
    variance = (share * (variance + (mean - pooled) ** 2)).sum(0)
    return pooled, deviation_or_one(variance.sqrt())


def encoded_moments(latents: Tensor) -> str:
    """Means and standard deviations of latents `[C, t, h, w]` by channel, in the format of `About.moments`."""
    flat = latents.double().flatten(1)
    moments = torch.stack([flat.mean(1), flat.std(1, correction=0)]).float()
    return base64.b64encode(moments.numpy().astype("<f4").tobytes()).decode()


def decoded_moments(sample: SampleEntry, channels: int) -> np.ndarray:
    """Means and standard deviations float32 `[2, C]` of a sample, from its `About.moments`.

    Raises:
        ValueError: they are no such numbers; names the sample.
    """
    try:
        payload = base64.b64decode(sample.about.moments, validate=True)
    except ValueError:
        payload = b""
    if len(payload) == 8 * channels:
        values = np.frombuffer(payload, dtype="<f4").reshape(2, channels)
        if (abs(values) <= LARGEST_VALUE).all() and (values[1] >= 0).all():
            return values
    raise ValueError(f"{INDEX_NAME}: statistics of {sample.id} are not {channels} means and deviations")


def statistics_of(samples: Iterable[SampleEntry], channels: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation float64 `[C]` over the latents of the given samples, from their moments."""
    cells, moments = list[int](), list[np.ndarray]()
    for sample in samples:
        cells.append(math.prod(sample.latent_shape[1:]))
        moments.append(decoded_moments(sample, channels))
    weights = torch.tensor(cells, dtype=torch.float64)[:, None] / sum(cells)
    mean, std = torch.from_numpy(np.stack(moments).astype(np.float64)).unbind(1)
    pooled = (weights * mean).sum(0)
    return pooled, deviation_or_one((weights * (std**2 + (mean - pooled) ** 2)).sum(0).sqrt())
