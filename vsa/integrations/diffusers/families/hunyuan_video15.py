"""HunyuanVideo 1.5: joint rows of video, then tokens of an image and of two texts, all padding at the end."""

from __future__ import annotations

from typing import Any

import torch

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.families.hunyuan_video import (
    TEXT_LAYERS,
    HunyuanVideoProcessor,
    patch_size,
    rotary,
    token_grid,
)
from vsa.integrations.diffusers.families.parts import Constants, Inputs, Parts, Sizes
from vsa.integrations.diffusers.tile_attention import Grid, Texts


def _texts(arguments: Arguments, grid: Grid) -> Texts:
    masks = (arguments["encoder_attention_mask"], arguments["encoder_attention_mask_2"])
    lengths = torch.stack([mask.bool().sum(dim=1) for mask in masks]).sum(dim=0)
    # the class takes image embeddings that are all 0 for no image, and masks them
    image = arguments["image_embeds"]
    lengths = lengths + image.shape[1] * (image != 0).any()
    return tuple((length,) for length in lengths.tolist())


def _sizes(config: Any) -> Sizes:
    if config.use_meanflow:
        raise ValueError("config.use_meanflow=True: its second timestep is not trained, False can be")
    width = int(config.num_attention_heads * config.attention_head_dim * config.mlp_ratio)
    # latents of the condition and their mask, which text-to-video has as zeros, are added in `_inputs`
    channels = config.out_channels or config.in_channels
    return Sizes(channels, channels, text_dim=config.text_embed_dim, ffn_dim=width, patch_size=patch_size(config))


def _inputs(transformer: Any, given: Inputs, constants: Constants) -> dict[str, Any]:
    (batch, channels, *latents), config = given.x.shape, transformer.config
    mask = given.text.new_ones(given.text.shape[:2], dtype=torch.bool) if given.mask is None else given.mask
    none = given.text.new_zeros
    return {
        "hidden_states": torch.cat([given.x, given.x.new_zeros(batch, config.in_channels - channels, *latents)], dim=1),
        "timestep": given.timestep,
        "encoder_hidden_states": given.text,
        "encoder_attention_mask": mask,
        # no glyphs, no image
        "encoder_hidden_states_2": none(batch, 0, config.text_embed_2_dim),
        "encoder_attention_mask_2": none(batch, 0),
        "image_embeds": none(batch, 0, config.image_embed_dim),
    }


PARTS = Parts(
    sizes=_sizes,
    inputs=_inputs,
    rotary=rotary,
    head="proj_out.weight",
    time_embedder="time_embed.timestep_embedder",
    attention_output="attn.to_out.0",
    after_blocks=("norm_out.", "proj_out."),
    after_attention=("attn.to_out.", "attn.to_add_out.", "norm2", "ff."),
    adapted_layers=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", *TEXT_LAYERS),
    time_layers=("time_embed.", ".norm1.linear", ".norm1_context.", "norm_out.linear"),
    text_layers=("context_embedder.", *(f".{name}." for name in TEXT_LAYERS)),
    image_layers=("context_embedder_2.", "image_embedder."),
    joint_layers=(".to_gate_",),
    tables=("freqs_cis",),
    modulation=(),
    depths=("num_layers", "num_refiner_layers"),
)

FAMILY = Family(
    name="HunyuanVideo15Transformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn",
    original=("HunyuanVideo15AttnProcessor2_0",),
    # its double blocks are those of HunyuanVideo
    processor=HunyuanVideoProcessor,
    grid=token_grid,
    text="last",
    texts=_texts,
    pipeline="HunyuanVideo15Pipeline",
    parts=PARTS,
)
