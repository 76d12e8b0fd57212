"""Small data sets shared by the data tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.tiny_wan import make_vae
from vsa.data.codecs import HaarCodec, WanVAE
from vsa.data.shard_writer import ShardWriter
from vsa.data.text import HashedNgramEncoder

VIDEO_SHAPE = (16, 2, 2, 4)
IMAGE_SHAPE = (16, 1, 4, 4)


def write_dataset(
    root: Path, *, videos: int = 23, images: int = 9, channels: int = 16, prefix: str = "", **options
) -> Path:
    """Random latents in two buckets; sample i has 1 + i % 3 captions."""
    generator = torch.Generator().manual_seed(1)
    encoder = HashedNgramEncoder(dim=8, max_tokens=5)
    with ShardWriter(root, codec=HaarCodec(channels), text_encoder=encoder, samples_per_shard=10, **options) as writer:
        for i in range(videos + images):
            kind, shape = ("video", VIDEO_SHAPE) if i < videos else ("image", IMAGE_SHAPE)
            latents = torch.randn(channels, *shape[1:], generator=generator)
            captions = [f"{kind} {i} caption {k}" for k in range(1 + i % 3)]
            writer.add(f"{prefix}{kind}-{i:03d}", latents, captions, {"source": f"{i}.mp4"})
    return root


@pytest.fixture
def make_dataset():
    """`write_dataset`, for tests that need their own folder."""
    return write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 23 video and 9 image latents; tests must not change it."""
    return write_dataset(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="session")
def wan_vae(tmp_path_factory: pytest.TempPathFactory) -> WanVAE:
    """A tiny VAE of Wan's kind with random weights."""
    folder = tmp_path_factory.mktemp("wan") / "vae"
    make_vae().save_pretrained(folder)
    return WanVAE(str(folder))
