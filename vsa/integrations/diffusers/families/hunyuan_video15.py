"""HunyuanVideo 1.5: joint rows of video, then tokens of an image and of two texts, all padding at the end."""

from __future__ import annotations

from typing import Any

import torch

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.families.hunyuan_video import HunyuanVideoProcessor
from vsa.integrations.diffusers.tile_attention import Grid, Texts


def _grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = arguments["hidden_states"].shape[2:]
    return t // config.patch_size_t, h // config.patch_size, w // config.patch_size


def _texts(arguments: Arguments, grid: Grid) -> Texts:
    masks = (arguments["encoder_attention_mask"], arguments["encoder_attention_mask_2"])
    lengths = torch.stack([mask.bool().sum(dim=1) for mask in masks]).sum(dim=0)
    # the class takes image embeddings that are all 0 for no image, and masks them
    image = arguments["image_embeds"]
    lengths = lengths + image.shape[1] * (image != 0).any()
    return tuple((length,) for length in lengths.tolist())


FAMILY = Family(
    name="HunyuanVideo15Transformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn",
    original=("HunyuanVideo15AttnProcessor2_0",),
    # its double blocks are those of HunyuanVideo
    processor=HunyuanVideoProcessor,
    grid=_grid,
    text="last",
    texts=_texts,
)
