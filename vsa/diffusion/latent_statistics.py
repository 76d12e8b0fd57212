"""Normalisation of latents: files store the output of the codec, networks see normalised latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vsa.transfer import copy_async


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentStatistics:
    """Mean and standard deviation per channel, by which latents are normalised.

    Args:
        mean: `[C]` fp32 mean of each channel.
        std: `[C]` fp32 standard deviation of each channel.
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, pair: tuple[Sequence[float], Sequence[float]]) -> LatentStatistics:
        """Statistics from a pair of lists, mean and standard deviation."""
        mean, std = (torch.tensor(values) for values in pair)
        return cls(mean=mean, std=std)

    def normalise(self, latents: Tensor) -> Tensor:
        """Normalised latents `[B, C, T, H, W]`, of zero mean and unit variance per channel, from stored ones."""
        mean, std = self._like(latents)
        return (latents - mean) / std

    def denormalise(self, latents: Tensor) -> Tensor:
        """Latents `[B, C, T, H, W]` for the codec's decoder, from normalised ones."""
        mean, std = self._like(latents)
        return latents * std + mean

    def _like(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        if latents.shape[1] != len(self.mean):
            raise ValueError(f"the latents have {latents.shape[1]} channels, their statistics {len(self.mean)}")
        shape = (1, -1, 1, 1, 1)
        return copy_async(self.mean, latents.device).view(shape), copy_async(self.std, latents.device).view(shape)
