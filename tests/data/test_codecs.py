from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vsa.data.codecs import HaarCodec, WanVAE, check_frames

FULL = HaarCodec(768)


def clip(t: int, h: int, w: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (t, h, w, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@given(t=st.integers(1, 3), h=st.integers(1, 3), w=st.integers(1, 4), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_all_channels_reconstruct_every_clip_exactly(t: int, h: int, w: int, seed: int) -> None:
    video = clip(4 * t, 8 * h, 8 * w, seed)
    latents = FULL.encode(video)
    assert latents.shape == (768, t, h, w)
    assert torch.equal(FULL.decode(latents), video)


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
