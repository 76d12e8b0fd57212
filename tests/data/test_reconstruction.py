from __future__ import annotations

import math

import pytest
import torch

from vsa.data.codecs import HaarCodec
from vsa.data.reconstruction import decibel, describe_reconstruction, reconstruction_error


def noise(frames: int = 4, scale: float = 128, seed: int = 0) -> torch.Tensor:
    video = 128 + scale * (torch.rand(frames, 16, 16, 3, generator=torch.Generator().manual_seed(seed)) - 0.5)
    return video.to(torch.uint8)


def test_the_error_is_the_energy_of_the_bands_left_out() -> None:
    """The bands are orthonormal, so nothing but the rounding of pixels comes on top."""
    video, full = noise(), HaarCodec(768)
    for channels in (1, 16, 100):
        left_out = full.encode(video)[channels:].double().square().sum() * 127.5**2 / video.numel()
        assert reconstruction_error(video, HaarCodec(channels)) == pytest.approx(float(left_out), rel=2e-3)
    assert reconstruction_error(video, full) == 0
    # an image comes back as four frames
    assert reconstruction_error(video[:1], full) == 0


def test_decibel() -> None:
    assert decibel(255**2) == 0
    assert decibel(1) == pytest.approx(48.1308, abs=1e-4)
    assert decibel(0) == math.inf


def test_lines_for_people() -> None:
    flat = torch.full((8, 16, 16, 3), 90, dtype=torch.uint8)
    assert describe_reconstruction([], HaarCodec(16)) == []
    assert describe_reconstruction([("a.mp4", flat)], HaarCodec(16)) == [
        "the codec haar-4x8x8-c16 rebuilds the clips at inf dB PSNR, the worst of 1 measured at inf dB (a.mp4)"
    ]
    rough = noise(scale=255)
    first, second = describe_reconstruction([("a.mp4", flat), ("b.mp4", rough), ("c.mp4", noise())], HaarCodec(16))
    errors = [
        reconstruction_error(rough, HaarCodec(n)) + reconstruction_error(noise(), HaarCodec(n)) for n in (16, 24, 192)
    ]
    mean, more, most = (decibel(error / 3) for error in errors)
    worst = decibel(reconstruction_error(rough, HaarCodec(16)))
    assert first.endswith(f"at {mean:.1f} dB PSNR, the worst of 3 measured at {worst:.1f} dB (b.mp4)")
    assert second.startswith("below 25 dB fine detail is lost, and no training on these latents brings it back: ")
    assert f"{more:.1f} dB with --channels 24, " in second
    assert second.endswith(f"{most:.1f} dB with --channels 192, or a trained codec with --model")
    assert mean < more < most < 25
    # only more than there are
    assert "--channels 24" not in describe_reconstruction([("b.mp4", rough)], HaarCodec(24))[1]
    assert len(describe_reconstruction([("c.mp4", noise(scale=16))], HaarCodec(16))) == 1
