"""Small networks and a batch for tests of objectives."""

from __future__ import annotations

import torch

from vsa.attention.video_sparse import VideoSparseAttention
from vsa.data.batch import VideoBatch
from vsa.models.video_dit import VideoDiT


def make_net(attention, seed: int = 0) -> VideoDiT:
    torch.manual_seed(seed)
    net = VideoDiT(
        attention=attention,
        num_attention_heads=2,
        attention_head_dim=8,
        ffn_dim=16,
        num_layers=3,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.2)
    return net


def sparse_attention(**sizes):
    return VideoSparseAttention(**sizes, tile_thw=(2, 2, 2))


def make_batch() -> tuple[VideoBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 3, 8, 6, generator=generator)
    batch = VideoBatch(
        latents=latents,
        text=torch.randn(2, 5, 8, generator=generator),
        text_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
        seeds=torch.tensor([11, 12]),
        slots=torch.tensor([0, 1]),
        num_slots=2,
        step=4,
        sample_ids=("a", "b"),
        captions=("", ""),
    )
    return batch, latents
