"""The Fréchet distance against closed forms and another formula; the features against what they have to notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.toy.frechet import latent_distance, latent_features
from vsa.data.codecs import HaarCodec
from vsa.data.toy_videos import render_clip
from vsa.evaluation.feature_distance import frechet_distance

CLIPS = 136


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample_with(mean: Tensor, root: Tensor, count: int, seed: int) -> Tensor:
    """Rows whose sample mean is `mean` and whose unbiased sample covariance is `root @ root.T`, both exactly."""
    rows = normal(count, len(mean), seed=seed)
    rows = rows - rows.mean(0)
    whiten = torch.linalg.inv(torch.linalg.cholesky(rows.T @ rows / (count - 1)))
    return rows @ whiten.T @ root.T + mean


def product_formula(x: Tensor, y: Tensor) -> float:
    """The textbook formula: the root of A B by the eigenvalues of the unsymmetric product."""
    a, b = np.cov(x.numpy().T), np.cov(y.numpy().T)
    cross = np.sqrt(np.linalg.eigvals(a @ b).astype(complex)).real.sum()
    return float(((x.mean(0) - y.mean(0)) ** 2).sum()) + np.trace(a) + np.trace(b) - 2 * cross


def test_one_dimension_is_the_difference_of_means_and_deviations():
    x, y = 1.5 + 2.0 * normal(40, 1), -0.5 + 0.7 * normal(50, 1, seed=1)
    expected = float((x.mean() - y.mean()) ** 2 + (x.std() - y.std()) ** 2)
    assert frechet_distance(x, y) == pytest.approx(expected, rel=1e-12)
    # control: deviations over N instead of N - 1
    other = float((x.mean() - y.mean()) ** 2 + (x.std(correction=0) - y.std(correction=0)) ** 2)
    assert frechet_distance(x, y) != pytest.approx(other, rel=1e-4)


def test_commuting_covariances_are_the_sum_over_their_axes():
    axes = torch.linalg.qr(normal(6, 6, seed=3)).Q
    a, b = torch.linspace(0.1, 3, 6).double(), torch.tensor([2.0, 0.0, 1.0, 5.0, 0.3, 0.7], dtype=torch.float64)
    m, n = normal(6, seed=4), normal(6, seed=5)
    x = sample_with(m, axes * a.sqrt(), 50, seed=6)
    # one axis without spread: the covariance is singular
    y = sample_with(n, axes * b.sqrt(), 30, seed=7)
    expected = float((m - n).square().sum() + (a.sqrt() - b.sqrt()).square().sum())
    assert frechet_distance(x, y) == pytest.approx(expected, rel=1e-7)
    # control: the same variances on the other's axes
    other = sample_with(n, axes * b.flip(0).sqrt(), 30, seed=7)
    assert frechet_distance(x, other) != pytest.approx(expected, rel=1e-2)


def test_general_covariances_follow_the_product_formula():
    x, y = normal(60, 8) @ normal(8, 8, seed=1), 0.3 + normal(70, 8, seed=2) @ normal(8, 8, seed=3)
    expected = product_formula(x, y)
    assert frechet_distance(x, y) == pytest.approx(expected, rel=1e-9)

    # control: tr(A^1/2 B^1/2) is the cross term only where A and B commute
    def root(rows: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(torch.cov(rows.T))
        return (vectors * values.sqrt()) @ vectors.T

    traces = float(torch.cov(x.T).trace() + torch.cov(y.T).trace() - 2 * (root(x) @ root(y)).trace())
    assert float((x.mean(0) - y.mean(0)).square().sum()) + traces != pytest.approx(expected, rel=1e-2)


def test_distance_is_zero_for_equal_sets_symmetric_and_grows():
    x, y = normal(50, 5), 1 + normal(40, 5, seed=1) @ normal(5, 5, seed=2)
    assert frechet_distance(x, x[torch.randperm(50)]) < 1e-12
    assert frechet_distance(x, y) == pytest.approx(frechet_distance(y, x), rel=1e-12)
    shift_distances = [frechet_distance(x, x + shift) for shift in (0.1, 0.5, 2.0)]
    assert shift_distances == pytest.approx([5 * shift**2 for shift in (0.1, 0.5, 2.0)], rel=1e-9)
    # of a set around its own mean, scaling by s adds (s - 1)^2 times the variance
    offsets = x - x.mean(0)
    scale_distances = [frechet_distance(offsets, scale * offsets) for scale in (1.1, 1.5, 3.0)]
    variance = float(offsets.var(0).sum())
    assert scale_distances == pytest.approx([(scale - 1) ** 2 * variance for scale in (1.1, 1.5, 3.0)], rel=1e-9)
    # fewer rows than features: the covariances are singular
    assert frechet_distance(x[:3], x[:3].flip(0)) < 1e-12


@pytest.fixture(scope="module")
def real() -> tuple[Tensor, Tensor]:
    """Two sets of toy clips as latents, normalised by one scale."""
    codec = HaarCodec()
    sets = [
        torch.stack([codec.encode(render_clip(seed, i, size=(16, 64, 64))[0]) for i in range(CLIPS)]) for seed in (1, 2)
    ]
    return sets[0] / sets[0].std(), sets[1] / sets[0].std()


def test_features_are_moments_of_channels_and_projected_cells(real: tuple[Tensor, Tensor]):
    latents = real[0]
    features = latent_features(latents)
    assert (features.shape, features.dtype) == ((CLIPS, CLIPS // 4), torch.float64)
    clip = latents[5].double()
    for channel in range(16):
        assert features[5, channel] == pytest.approx(float(clip[channel].mean()), rel=1e-9)
        assert features[5, 16 + channel] == pytest.approx(float(clip[channel].var(correction=0)) ** 0.5, rel=1e-9)
    # enough clips for all cells of a coarse latent: they come unprojected
    few = normal(200, 1, 2, 3, 4)
    cells = latent_features(few)[:, 2:]
    assert torch.equal(cells, few.flatten(1))
    # impulses of one cell each show the matrix: its columns are orthonormal
    impulses = torch.eye(64, dtype=torch.float64).reshape(64, 1, 4, 4, 4)
    matrix = latent_features(impulses)[:, 2:]
    assert matrix.shape == (64, 14)
    assert torch.allclose(matrix.T @ matrix, torch.eye(14, dtype=torch.float64), atol=1e-12)
    # cells of larger latents are means, and projected by a matrix that is the same for all clips
    coarse = F.adaptive_avg_pool3d(latents[:, :1].double(), (4, 4, 4)).flatten(1)
    channel_features = latent_features(latents[:, :1])[:, 2:]
    assert torch.allclose(channel_features, latent_features(coarse.reshape(-1, 1, 4, 4, 4))[:, 2:], atol=1e-9)
    # a sample does not depend on the others
    assert torch.equal(latent_features(latents.flip(0)), features.flip(0))


def test_distance_notices_what_goes_wrong_with_clips(real: tuple[Tensor, Tensor]):
    reference, other = real
    floor = latent_distance(other, reference)
    assert floor > 0
    blur = F.avg_pool3d(other, (1, 3, 3), 1, (0, 1, 1), count_include_pad=False)
    grey = other.clone()
    grey[:, 8:] = 0
    broken = {
        "blurred": blur,
        "without colour": grey,
        "standing still": other.mean(2, keepdim=True).expand_as(other),
        "collapsed to 16 clips": other[torch.arange(CLIPS) % 16],
        "noisy": other + 0.5 * normal(*other.shape).float(),
    }
    for name, latents in broken.items():
        assert latent_distance(latents, reference) > 1.5 * floor, name
    # control: noise that nobody sees moves nothing
    assert latent_distance(other + 0.01 * normal(*other.shape).float(), reference) < 1.05 * floor


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match=r"features must be \[N, F\] and \[M, F\], got \[4, 3\] and \[4, 2\]"):
        frechet_distance(normal(4, 3), normal(4, 2))
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        frechet_distance(normal(4, 3), normal(1, 3))
    nan = normal(4, 3)
    nan[1, 2] = torch.nan
    with pytest.raises(ValueError, match="features of 1 of 4 clips are not finite"):
        frechet_distance(nan, normal(4, 3))
    with pytest.raises(ValueError, match="2 channels needs at least 20 clips, got 19"):
        latent_features(normal(19, 2, 1, 2, 2))
    assert latent_features(normal(20, 2, 1, 2, 2)).shape == (20, 5)
    with pytest.raises(ValueError, match=r"latents must be \[N, C, T, H, W\], got \[3, 4\]"):
        latent_features(normal(3, 4))
    with pytest.raises(ValueError, match=r"must have the same shape, got \[40, 2, 1, 2, 2\] and \[41, 2, 1, 2, 2\]"):
        latent_distance(normal(40, 2, 1, 2, 2), normal(41, 2, 1, 2, 2))
