"""Small Wan models of diffusers and of ours with the same weights."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.sparse_config import (
    SparseAttentionConfig,
)
from vsa.checkpoints.wan import (
    sparse_settings,
)
from vsa.models.video_dit import VideoDiT

BASE = dict(num_attention_heads=3, attention_head_dim=16, text_dim=24, freq_dim=32, ffn_dim=80, num_layers=2)
KINDS = {
    "t2v": dict(in_channels=8, out_channels=8),
    "i2v": dict(in_channels=13, out_channels=8, image_dim=20, added_kv_proj_dim=48),
    # Wan2.2's image-to-video model has no image tokens
    "i2v_22": dict(in_channels=13, out_channels=8),
    "ti2v": dict(in_channels=48, out_channels=48),
}
LATENT = (3, 6, 10)
SPARSE = partial(VideoSparseAttention, tile_thw=(2, 2, 2))
COARSE_ONLY = partial(SPARSE, fine_gate=False)


def diffusers_model(kind: str = "t2v", seed: int = 0) -> Any:

    torch.manual_seed(seed)
    model = WanTransformer3DModel(**BASE, **KINDS[kind]).eval()
    for parameter in model.parameters():
        # attention sharp enough and norms far enough from 1 for a mistake to show
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(folder: Path, kind: str = "t2v", shard: str = "5GB") -> Path:
    diffusers_model(kind).save_pretrained(folder, max_shard_size=shard)
    return folder


def ours(attention: Any = FullAttention, kind: str = "t2v", **changes: Any) -> VideoDiT:
    return VideoDiT(attention=attention, **{**BASE, **KINDS[kind], **changes})


def random_sparse(attention: Any = SPARSE, kind: str = "t2v", seed: int = 5) -> VideoDiT:
    model = ours(attention, kind)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return model


def config_of(model: VideoDiT, **changes: Any) -> SparseAttentionConfig:
    values = {
        "grid_topk": ((4, 8),),
        "num_tiles": (30,),
        "grids": ((3, 6, 10),),
        "flow_shift": 3.0,
        "guidance_scale": 5.0,
    }
    return SparseAttentionConfig(**{**sparse_settings(model), **values, **changes})


def inputs(kind: str, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = math.prod(LATENT) // 4
    rows = tokens if kind == "ti2v" else 1
    timestep = torch.rand(2, rows, generator=generator) * 1000
    return {
        "x": torch.randn(2, KINDS[kind]["in_channels"], *LATENT, generator=generator),
        "timestep": timestep if kind == "ti2v" else timestep[:, 0],
        "text": torch.randn(2, 512, 24, generator=generator),
        "image": torch.randn(2, 257, 20, generator=generator) if kind == "i2v" else None,
    }


@torch.no_grad()
def run_theirs(model: Any, x, timestep, text, image) -> torch.Tensor:
    return model(x, timestep, text, image).sample


@torch.no_grad()
def run_ours(model: VideoDiT, x, timestep, text, image, topk=None) -> torch.Tensor:
    split = model.out_channels
    cond = x[:, split:] if x.shape[1] > split else None
    return model(x[:, :split], timestep, text, cond_latents=cond, image_embeds=image, topk=topk)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
