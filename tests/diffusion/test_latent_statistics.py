import pytest
import torch

from vsa.diffusion.latent_statistics import LatentStatistics


def test_channels_have_zero_mean_and_unit_variance_and_come_back():
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(6, 3, 4, 5, 5, generator=generator) * torch.tensor([0.5, 1, 4]).view(3, 1, 1, 1) + 2
    axes = (0, 2, 3, 4)
    statistics = LatentStatistics.of((latents.mean(axes).tolist(), latents.std(axes).tolist()))
    normal = statistics.normalise(latents)
    torch.testing.assert_close(normal.mean(axes), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std(axes), torch.ones(3))
    torch.testing.assert_close(statistics.denormalise(normal), latents)


def test_one_value_is_not_spread_over_all_channels():
    statistics = LatentStatistics.of(([0.5], [2.0]))
    for change in (statistics.normalise, statistics.denormalise):
        with pytest.raises(ValueError, match="the latents have 3 channels, their statistics 1"):
            change(torch.zeros(1, 3, 2, 2, 2))
