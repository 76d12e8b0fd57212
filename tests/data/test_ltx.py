"""LTX-Video's VAE against diffusers' own class, on random weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.data.test_wan import as_pixels, clip
from vsa.data.clip_rules import ClipRules
from vsa.data.codecs import LtxVAE, WanVAE, check_frames, vae_kind
from vsa.data.encode_options import EncodeOptions

MEAN, STD = torch.linspace(-1, 1, 8), torch.linspace(0.5, 3, 8)


def make_ltx_vae(*, timed: bool = False, **options: Any) -> Any:
    """An AutoencoderKLLTXVideo of 8 channels: as of LTX-Video 0.9.0, or one that is told a timestep and adds noise."""
    from diffusers import AutoencoderKLLTXVideo

    torch.manual_seed(0)
    widths, layers, noise = (4, 4, 4, 4), (1, 1, 1, 1, 1), (timed,) * 5
    sizes: dict[str, Any] = {"block_out_channels": widths, "decoder_block_out_channels": widths}
    sizes |= {"layers_per_block": layers, "decoder_layers_per_block": layers}
    timing: dict[str, Any] = {"timestep_conditioning": timed, "decoder_inject_noise": noise}
    vae = AutoencoderKLLTXVideo(latent_channels=8, **sizes, **timing, **options).eval()
    vae.latents_mean.copy_(MEAN)
    vae.latents_std.copy_(STD)
    for name, scale in vae.named_parameters():
        if "per_channel_scale" in name:
            torch.nn.init.constant_(scale, 0.5)
    return vae


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "timed"])
def timed(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def folder(timed: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ltx")
    make_ltx_vae(timed=timed).save_pretrained(place / "vae")
    return place


@pytest.fixture(scope="module")
def codec(folder: Path) -> Any:
    return vae_kind(str(folder))(str(folder))


@torch.no_grad()
def test_latents_and_clips_are_those_of_diffusers(codec: LtxVAE, timed: bool) -> None:
    assert (type(codec), codec.id, codec.channels, codec.stride) == (LtxVAE, "ltx-vae-8x32x32-c8", 8, (8, 32, 32))
    own = make_ltx_vae(timed=timed)
    for frames in (1, 17):
        video = clip(frames, 64, 96)
        expected = own.encode(as_pixels(video)).latent_dist
        latents = codec.encode(video)
        assert latents.shape == codec.latent_shape(frames, 64, 96) == (8, 1 + (frames - 1) // 8, 2, 3)
        torch.testing.assert_close(latents, expected.mode()[0], atol=1e-5, rtol=0)
        # a draw from the posterior is something else
        assert (latents - expected.sample()[0]).abs().max() > 1e-2
        before = torch.get_rng_state()
        decoded = codec.decode(latents)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(0)
        pixels = own.decode(latents[None], torch.zeros(1) if timed else None).sample[0].permute(1, 2, 3, 0)
        assert decoded.shape == video.shape
        assert (decoded.float() - ((pixels + 1) * 127.5).clamp(0, 255)).abs().max() <= 0.5 + 1e-3
        assert decoded.float().std() > 1
        # controls: another timestep, and other noise
        torch.manual_seed(0)
        later = own.decode(latents[None], torch.ones(1) if timed else None).sample[0].permute(1, 2, 3, 0)
        again = own.decode(latents[None], torch.zeros(1) if timed else None).sample[0].permute(1, 2, 3, 0)
        assert torch.equal(later, pixels) == torch.equal(again, pixels) == (not timed)


def test_statistics_are_the_buffers_and_the_scale_of_the_pipeline(codec: LtxVAE, tmp_path: Path) -> None:
    from diffusers import LTXPipeline

    assert codec.statistics is not None
    for values, expected in zip(codec.statistics, (MEAN, STD), strict=True):
        torch.testing.assert_close(values, expected)
    make_ltx_vae(scaling_factor=0.5).save_pretrained(tmp_path)
    mean, std = LtxVAE(str(tmp_path)).statistics or (MEAN, STD)
    latents = torch.randn(1, 8, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    expected = LTXPipeline._normalize_latents(latents, MEAN, STD, 0.5)  # pyright: ignore
    torch.testing.assert_close((latents - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1), expected)


def test_sizes_are_whole_cells_which_the_models_take_one_by_one(codec: LtxVAE) -> None:
    assert ClipRules(size=(96, 160)).untrainable(codec) == []
    assert ClipRules().plan(Path("x.mp4"), codec, frames=9, height=100, width=190).size == (9, 96, 160)
    # the control: patches of 2 x 2 cells
    wan = SimpleNamespace(id="wan-vae-4x32x32-c16", stride=(8, 32, 32), frames_that_fit=codec.frames_that_fit)
    assert ClipRules(size=(96, 160)).untrainable(wan) == [(96, 160)]  # type: ignore[arg-type]
    assert ClipRules().plan(Path("x.mp4"), wan, frames=9, height=100, width=190).size == (9, 64, 128)  # type: ignore[arg-type]


def test_lengths_and_sizes_that_do_not_fit(codec: LtxVAE) -> None:
    assert [codec.frames_that_fit(n) for n in (0, 1, 8, 9, 16, 17, 97, 100)] == [0, 1, 1, 9, 9, 17, 97, 97]
    with pytest.raises(ValueError, match="cannot encode 16 frames; the nearest valid lengths are 9 and 17"):
        check_frames(codec, 16)
    for shape in ((8, 32, 32), (9, 32, 48), (0, 32, 32)):
        with pytest.raises(ValueError, match=r"does not fit the codec: frames 1 \+ a multiple of 8, .* stride 32x32"):
            codec.encode(clip(*shape))
    with pytest.raises(ValueError, match=r"must be \[8, t, h, w\]"):
        codec.decode(torch.zeros(16, 1, 1, 1))
    with pytest.raises(ValueError, match="image conditions need Wan's VAE, got codec ltx-vae"):
        EncodeOptions(image_condition=True).check(codec)


def test_folders_that_are_no_vae_of_ltx(tmp_path: Path) -> None:
    make_ltx_vae().save_pretrained(tmp_path / "vae")
    weights, config = (tmp_path / "vae" / name for name in ("diffusion_pytorch_model.safetensors", "config.json"))
    good, described = load_file(weights), json.loads(config.read_text())
    before = LtxVAE(str(tmp_path)).hash
    save_file({**good, "latents_std": STD * 2}, weights, {"format": "pt"})
    assert LtxVAE(str(tmp_path)).hash != before
    for tensors, message in (
        ({**good, "latents_std": STD * 0}, r"vae has latents_std\[0\]=0.0: expected a number from 1e-09"),
        ({k: t for k, t in good.items() if k != "latents_mean"}, r"vae have no tensor latents_mean$"),
    ):
        save_file(tensors, weights, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            LtxVAE(str(tmp_path))
    with pytest.raises(ValueError, match=r"describes AutoencoderKLLTXVideo, expected AutoencoderKLWan$"):
        WanVAE(str(tmp_path))
    config.write_text(
        json.dumps({**described, "patch_size": None} | {"latent_channels": 8}).replace("patch_size_t", "x")
    )
    with pytest.raises(ValueError, match=r"config.json has no patch_size_t$"):
        LtxVAE(str(tmp_path))
    config.write_text(json.dumps({**described, "_class_name": "AutoencoderKL"}))
    with pytest.raises(ValueError, match=r"AutoencoderKL, expected AutoencoderKLWan or AutoencoderKLLTXVideo$"):
        vae_kind(str(tmp_path))
