"""Pixel metrics against their definitions, detectors against clips that have and have not what they look for."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vsa.data.toy_videos import render_clip
from vsa.evaluation.video_metrics import (
    _load_trunk,
    black_frames,
    flicker,
    load_lpips,
    luma,
    motion,
    psnr,
    ssim,
    uniform_frames,
)

TOY_SIZE = (16, 64, 64)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def disturbed(video: Tensor, strength: int, seed: int = 1) -> Tensor:
    change = noise(*video.shape, seed=seed).int() % (2 * strength + 1) - strength
    return (video.int() + change).clamp(0, 255).to(torch.uint8)


def toy(index: int = 0) -> Tensor:
    return render_clip(0, index, size=TOY_SIZE)[0]


def test_psnr_is_its_formula():
    video = noise(3, 8, 9, 3)
    other = disturbed(video, 20)
    squares = [(int(a) - int(b)) ** 2 for a, b in zip(video.flatten(), other.flatten(), strict=True)]
    expected = 10 * math.log10(255**2 / (sum(squares) / len(squares)))
    assert psnr(video, other) == pytest.approx(expected, rel=1e-6)
    # the range is that of the data type, not what a clip happens to span
    dim = video // 4
    assert psnr(dim, disturbed(dim, 5)) > psnr(dim, disturbed(dim, 20)) > 20
    assert psnr(video, video.clone()) == math.inf


def literal_ssim(video: Tensor, other: Tensor, *, sigma: float = 1.5, k2: float = 0.03) -> float:
    """Wang et al. (2004), equations 13 to 16, pixel by pixel with a window of 11 and mirrored borders."""
    taps = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(-5, 6)]
    total = sum(taps)
    taps = [tap / total for tap in taps]
    c1, c2 = (0.01 * 255) ** 2, (k2 * 255) ** 2
    height, width = video.shape[1:3]
    mirrored_rows = [abs(i) if i < height else 2 * height - 2 - i for i in range(-5, height + 5)]
    mirrored_columns = [abs(i) if i < width else 2 * width - 2 - i for i in range(-5, width + 5)]
    values = []
    for a, b in zip(video.permute(0, 3, 1, 2).flatten(0, 1), other.permute(0, 3, 1, 2).flatten(0, 1), strict=True):
        x, y = a.tolist(), b.tolist()
        for i in range(height):
            for j in range(width):
                sums = [0.0] * 5
                for di, wi in enumerate(taps):
                    for dj, wj in enumerate(taps):
                        row, column = mirrored_rows[i + di], mirrored_columns[j + dj]
                        p, q, w = x[row][column], y[row][column], wi * wj
                        for k, term in enumerate((p, q, p * p, q * q, p * q)):
                            sums[k] += w * term
                mx, my, xx, yy, xy = sums
                structure = (2 * (xy - mx * my) + c2) / (xx - mx * mx + yy - my * my + c2)
                values.append((2 * mx * my + c1) / (mx * mx + my * my + c1) * structure)
    return sum(values) / len(values)


def test_ssim_is_its_definition():
    video = toy()[::8, 20:32, 20:33]
    other = disturbed(video, 30)
    actual = ssim(video, other)
    assert actual == pytest.approx(literal_ssim(video, other), abs=1e-5)
    # the tolerance sees another window and another constant
    assert abs(actual - literal_ssim(video, other, sigma=1.4)) > 1e-3
    assert abs(actual - literal_ssim(video, other, k2=0.031)) > 1e-3
    assert ssim(video, video.clone()) == pytest.approx(1, abs=1e-5)
    assert ssim(noise(2, 32, 32, 3), noise(2, 32, 32, 3, seed=1)) < 0.05


def test_clips_of_other_shapes_and_tiny_frames_are_refused():
    with pytest.raises(ValueError, match=r"must have the same shape, got \[2, 8, 8, 3\] and \[3, 8, 8, 3\]"):
        psnr(noise(2, 8, 8, 3), noise(3, 8, 8, 3))
    with pytest.raises(ValueError, match=r"must have the same shape"):
        ssim(noise(2, 8, 8, 3), noise(2, 8, 16, 3))
    with pytest.raises(ValueError, match="at least 6x6 pixels, got 5x8"):
        ssim(noise(2, 5, 8, 3), noise(2, 5, 8, 3))


def test_black_and_uniform_frames():
    black = torch.zeros(4, 20, 20, 3, dtype=torch.uint8)
    assert (black_frames(black), uniform_frames(black)) == (1, 1)
    # sensor noise does not make a black frame another one
    assert black_frames(noise(4, 20, 20, 3) % 20) == 1
    half = black.clone()
    half[:2] = noise(2, 20, 20, 3)
    assert (black_frames(half), uniform_frames(half)) == (0.5, 0.5)
    # 8 of 400 pixels are 2%, 9 are more
    spots = black.clone()
    spots.view(4, 400, 3)[:, :8] = 255
    assert black_frames(spots) == 1
    spots.view(4, 400, 3)[:, 8] = 255
    assert black_frames(spots) == 0
    # luma alone would call a blue picture black
    blue = torch.tensor([0, 0, 255], dtype=torch.uint8).expand(4, 20, 20, 3)
    assert luma(blue).max() < 0.1 * 255
    assert (black_frames(blue), uniform_frames(blue)) == (0, 1)
    for i in range(8):
        assert (black_frames(toy(i)), uniform_frames(toy(i))) == (0, 0)


def test_flicker_sees_what_alternates_at_every_rate():
    frames = torch.arange(16)
    bright, dark = 200, 150
    for hold in (1, 2, 4):
        alternating = torch.where((frames // hold) % 2 == 0, bright, dark).to(torch.uint8)
        video = alternating.view(16, 1, 1, 1).expand(16, 8, 8, 3)
        assert flicker(video) == pytest.approx(50 / 255, rel=1e-5), hold
    # a cut, a fade and a still
    for levels in ((frames >= 7) * 200, frames * 10, torch.full((16,), 90)):
        video = levels.to(torch.uint8).view(16, 1, 1, 1).expand(16, 8, 8, 3)
        assert flicker(video) == 0
    # one flash is taken back at 1 of the 14, 12 or 8 places that a hold of 1, 2 or 4 looks at
    flash = torch.zeros(16, 8, 8, 3, dtype=torch.uint8)
    flash[7] = 255
    assert flicker(flash) == pytest.approx(1 / 8)
    assert flicker(flash[:2]) == 0


def test_flicker_does_not_see_smooth_motion():
    # a wide bar that crosses the picture, 2 pixels a frame, with a soft edge
    x = torch.arange(64.0).view(1, 1, 64, 1) - 2 * torch.arange(16.0).view(16, 1, 1, 1)
    bar = (255 * (0.5 - (x - 16).abs() / 4 + 3).clamp(0, 1)).to(torch.uint8).expand(16, 32, 64, 3)
    assert motion(bar) > 0.01
    assert flicker(bar) == 0
    # what a mean absolute difference of frames cannot tell apart, this does
    for i in range(6):
        clip = toy(i)
        for hold in (1, 2, 4):
            dim_clip = clip.clone()
            odd = (torch.arange(16) // hold) % 2 == 1
            dim_clip[odd] = (dim_clip[odd].float() * 0.6).to(torch.uint8)
            assert flicker(dim_clip) > 2.5 * flicker(clip), (i, hold)


def test_motion_is_the_mean_change_of_luma():
    video = noise(5, 6, 7, 3)
    weights = (0.2126, 0.7152, 0.0722)
    grey = [[[sum(w * c for w, c in zip(weights, p, strict=True)) for p in r] for r in f] for f in video.tolist()]
    changes = [
        abs(p - q) for f, g in pairwise(grey) for r, s in zip(f, g, strict=True) for p, q in zip(r, s, strict=True)
    ]
    assert motion(video) == pytest.approx(sum(changes) / len(changes) / 255, rel=1e-5)
    assert motion(video[:1]) == 0
    assert motion(video[:1].expand(5, -1, -1, -1)) == 0


# LPIPS


class Trunk(nn.Module):
    """Two slices with the layer numbers of torchvision's AlexNet."""

    def __init__(self):
        super().__init__()
        self.slice1 = nn.Sequential()
        self.slice1.add_module("0", nn.Conv2d(3, 4, 3))
        self.slice2 = nn.Sequential()
        self.slice2.add_module("3", nn.Conv2d(4, 5, 3))
        self.requires_grad_(False)


def test_the_trunk_of_lpips_is_read_by_layer_number(tmp_path: Path):
    source = Trunk()
    weights = {
        "features.0.weight": source.slice1[0].weight,
        "features.0.bias": source.slice1[0].bias,
        "features.3.weight": source.slice2[0].weight,
        "features.3.bias": source.slice2[0].bias,
        "classifier.1.weight": torch.zeros(1),
    }
    torch.save(weights, tmp_path / "alexnet-x.pth")
    trunk = Trunk()
    _load_trunk(trunk, tmp_path / "alexnet-x.pth")
    for name, parameter in trunk.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name)), name
    torch.save({**weights, "features.3.bias": torch.zeros(7)}, tmp_path / "alexnet-x.pth")
    with pytest.raises(ValueError, match=r"expected features\.3\.bias of shape \[5\], got \[7\]"):
        _load_trunk(trunk, tmp_path / "alexnet-x.pth")
    del weights["features.3.bias"]
    torch.save(weights, tmp_path / "alexnet-x.pth")
    with pytest.raises(ValueError, match=r"expected features\.3\.bias of shape \[5\], got None"):
        _load_trunk(trunk, tmp_path / "alexnet-x.pth")


def test_lpips_without_weights_or_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"needs one file alexnet-\*\.pth in .*, got 0"):
        load_lpips(tmp_path)
    (tmp_path / "alexnet-owt-7be5be79.pth").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(ValueError, match=r"needs the packages lpips and torchvision \(pip install lpips\)"):
        load_lpips(tmp_path)


def test_lpips_equals_the_package_with_weights_of_its_own_loading(tmp_path: Path):
    lpips = pytest.importorskip("lpips", reason="lpips is not installed")
    from torchvision.models import alexnet

    torch.manual_seed(0)
    (tmp_path / "checkpoints").mkdir()
    torch.save(alexnet(weights=None).state_dict(), tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth")
    before = torch.hub.get_dir()
    try:
        # where torchvision looks before it downloads
        torch.hub.set_dir(tmp_path)
        whole = lpips.LPIPS(net="alex", verbose=False)
    finally:
        torch.hub.set_dir(before)
    video, other = noise(20, 64, 64, 3), noise(20, 64, 64, 3, seed=1)
    pair = [v.permute(0, 3, 1, 2).float() / 127.5 - 1 for v in (video, other)]
    state = torch.random.get_rng_state()
    distance = load_lpips(tmp_path / "checkpoints")
    assert torch.equal(state, torch.random.get_rng_state())
    with torch.no_grad():
        assert distance(video, other) == pytest.approx(float(whole(*pair).mean()), rel=1e-5)
    assert distance(video, video) == 0
