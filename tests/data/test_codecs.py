from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vsa.data.codecs import DctCodec, EmbeddedCodec, HaarCodec, WanVAE, check_frames, dct_bands, dct_order, settings_of

FULL = HaarCodec(768)


def clip(t: int, h: int, w: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (t, h, w, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("full", [FULL, DctCodec(768)])
@given(t=st.integers(1, 3), h=st.integers(1, 3), w=st.integers(1, 4), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_all_channels_reconstruct_every_clip_exactly(full: EmbeddedCodec, t: int, h: int, w: int, seed: int) -> None:
    video = clip(4 * t, 8 * h, 8 * w, seed)
    latents = full.encode(video)
    assert latents.shape == (768, t, h, w)
    assert torch.equal(full.decode(latents), video)


def test_dropping_one_channel_is_noticed() -> None:
    video = clip(4, 8, 8)
    assert not torch.equal(HaarCodec(767).decode(HaarCodec(767).encode(video)), video)


def test_bands_are_orthonormal_and_keep_the_norm() -> None:
    gram = FULL.basis.double() @ FULL.basis.double().T
    torch.testing.assert_close(gram, torch.eye(768, dtype=torch.float64), atol=1e-6, rtol=0)
    video = clip(8, 16, 24)
    pixels = video.double() / 127.5 - 1
    torch.testing.assert_close(FULL.encode(video).double().square().sum(), pixels.square().sum(), rtol=1e-5, atol=0)


def test_default_bands_are_block_averages() -> None:
    """The 16 bands span luma means over 2 x 4 x 4 pixels and chroma means over 4 x 4 x 4 pixels, nothing else."""
    codec = HaarCodec()
    video = clip(8, 16, 16)
    pixels = video.double() / 127.5 - 1
    luma = pixels.mean(-1, keepdim=True)
    chroma = pixels - luma

    def block_means(x: torch.Tensor, t: int) -> torch.Tensor:
        T, H, W, c = x.shape
        blocks = x.reshape(T // t, t, H // 4, 4, W // 4, 4, c).mean((1, 3, 5))
        return blocks.repeat_interleave(t, 0).repeat_interleave(4, 1).repeat_interleave(4, 2)

    expected = ((block_means(luma, 2) + block_means(chroma, 4) + 1) * 127.5).clamp(0, 255)
    difference = (codec.decode(codec.encode(video)).double() - expected).abs().max()
    assert difference <= 0.5 + 1e-3
    wrong = ((block_means(luma, 4) + block_means(chroma, 4) + 1) * 127.5).clamp(0, 255)
    assert (codec.decode(codec.encode(video)).double() - wrong).abs().max() > 2


def test_fewer_channels_are_a_prefix_of_more() -> None:
    video = clip(4, 16, 8)
    torch.testing.assert_close(HaarCodec(16).encode(video), FULL.encode(video)[:16])


def test_image_is_a_still_clip() -> None:
    codec = HaarCodec()
    image = clip(1, 16, 8)
    latents = codec.encode(image)
    assert latents.shape == (16, 1, 2, 1)
    torch.testing.assert_close(latents, codec.encode(image.repeat(4, 1, 1, 1)))
    reconstruction = FULL.decode(FULL.encode(image))
    assert torch.equal(reconstruction, image.repeat(4, 1, 1, 1))


def test_id_and_hash_name_the_bands() -> None:
    assert HaarCodec().id == "haar-4x8x8-c16"
    # a stored data set depends on this value: changing it means changing the version inside the hash on purpose
    assert HaarCodec().hash == "bf190d1ad4b64b7e"
    assert HaarCodec(17).hash != HaarCodec(16).hash
    assert (DctCodec().id, DctCodec().hash) == ("dct-4x8x8-c16", "d1301d8f09e40684")
    assert DctCodec(17).hash != DctCodec(16).hash


def test_the_cosine_transform_is_scipys() -> None:
    fft = pytest.importorskip("scipy.fft")
    bands = dct_bands()
    torch.testing.assert_close(bands @ bands.T, torch.eye(768, dtype=torch.float64), atol=1e-13, rtol=0)
    video = clip(12, 24, 40, seed=1)
    cells = video.double().div(127.5).sub(1).reshape(3, 4, 3, 8, 5, 8, 3).permute(0, 2, 4, 1, 3, 5, 6).reshape(-1, 768)
    expected = fft.dctn(cells.reshape(-1, 4, 8, 8, 3).numpy(), axes=(1, 2, 3, 4), norm="ortho").reshape(-1, 768)
    torch.testing.assert_close(cells @ bands.T, torch.from_numpy(expected), atol=1e-12, rtol=0)
    order = dct_order()
    assert sorted(order.tolist()) == list(range(768))
    for channels in (1, 16, 33):
        latents = DctCodec(channels).encode(video).flatten(1).T.double()
        torch.testing.assert_close(latents, torch.from_numpy(expected[:, order[:channels].tolist()]), atol=2e-5, rtol=0)
    # the controls: another type of the transform, and another order of the bands
    other = fft.dctn(cells.reshape(-1, 4, 8, 8, 3).numpy(), type=3, axes=(1, 2, 3, 4), norm="ortho").reshape(-1, 768)
    assert abs(other - expected).max() > 0.1
    assert (latents - torch.from_numpy(expected[:, :33])).abs().max() > 0.1


def test_the_bands_are_in_the_order_of_the_photographs() -> None:
    pytest.importorskip("skimage")
    from scripts.order_bands import order_bands

    assert torch.equal(order_bands(), dct_order())


def test_settings_that_choose_an_embedded_codec() -> None:
    assert settings_of(DctCodec(24).id) == "data.codec._target_=vsa.data.codecs.DctCodec data.codec.channels=24"
    assert settings_of(HaarCodec().id) == "data.codec._target_=vsa.data.codecs.HaarCodec data.codec.channels=16"
    assert settings_of("wan-vae-4x8x8-c16") == ""


@pytest.mark.parametrize("shape", [(5, 8, 8, 3), (4, 9, 8, 3), (4, 8, 12, 3), (4, 8, 8, 1), (0, 8, 8, 3), (4, 0, 8, 3)])
def test_refuses_shapes_off_the_stride(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"stride|must be uint8"):
        HaarCodec().encode(torch.zeros(shape, dtype=torch.uint8))


def test_refuses_wrong_channels_and_types() -> None:
    with pytest.raises(ValueError, match=r"\[16, t, h, w\]"):
        HaarCodec().decode(torch.zeros(15, 1, 1, 1))
    with pytest.raises(ValueError, match="uint8"):
        HaarCodec().encode(torch.zeros(4, 8, 8, 3))
    for channels in (0, 769):
        with pytest.raises(ValueError, match=str(channels)):
            HaarCodec(channels)


@pytest.mark.parametrize(
    ("frames", "haar", "wan"),
    [
        (-3, "length is 1", "length is 1"),
        (0, "length is 1", "length is 1"),
        (1, None, None),
        (2, "lengths are 1 and 4", "lengths are 1 and 5"),
        (7, "lengths are 4 and 8", "lengths are 5 and 9"),
        (8, None, "lengths are 5 and 9"),
        (16, None, "lengths are 13 and 17"),
        (17, "lengths are 16 and 20", None),
    ],
)
def test_both_neighbours_of_a_wrong_length_are_told(
    wan_vae: WanVAE, frames: int, haar: str | None, wan: str | None
) -> None:
    for codec, nearest in ((FULL, haar), (wan_vae, wan)):
        if nearest is None:
            check_frames(codec, frames)
            continue
        message = f"codec {codec.id} cannot encode {frames} frames; the nearest valid {nearest}"
        with pytest.raises(ValueError, match=f"^{message}$"):
            check_frames(codec, frames)
