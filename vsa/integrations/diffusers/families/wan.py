"""Wan 2.1 and 2.2: video tokens in self-attention, text and image in cross-attention."""

from __future__ import annotations

from typing import Any

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.families.parts import Constants, Inputs, Parts, Sizes, latents_of
from vsa.integrations.diffusers.processors import VideoProcessor
from vsa.integrations.diffusers.tile_attention import Grid


def _grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = (n // p for n, p in zip(arguments["hidden_states"].shape[2:], config.patch_size, strict=True))
    return t, h, w


def _sizes(config: Any) -> Sizes:
    channels = (config.in_channels, config.out_channels or config.in_channels)
    return Sizes(*channels, config.text_dim, config.ffn_dim, config.patch_size, config.image_dim)


def _inputs(transformer: Any, given: Inputs, constants: Constants) -> dict[str, Any]:
    return {
        "hidden_states": given.x,
        "timestep": given.timestep,
        "encoder_hidden_states": given.text,
        "encoder_hidden_states_image": given.image,
    }


def _rotary(transformer: Any, grid: Grid, constants: Constants) -> Any:
    return transformer.rope(latents_of(grid, transformer.config.patch_size, transformer.device))


PARTS = Parts(
    sizes=_sizes,
    inputs=_inputs,
    rotary=_rotary,
    head="proj_out.weight",
    time_embedder="condition_embedder.time_embedder",
    attention_output="attn1.to_out.0",
    after_blocks=("proj_out.", "scale_shift_table"),
    after_attention=("attn1.to_out.", "attn2.", "norm2.", "ffn."),
    adapted_layers=("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"),
    time_layers=("condition_embedder.time_",),
    text_layers=("condition_embedder.text_embedder.", ".attn2.to_k", ".attn2.to_v"),
    image_layers=("condition_embedder.image_embedder.", ".add_k_proj", ".add_v_proj"),
    tables=("rotary_emb",),
    token_rows=("temb",),
    attention_rotary="rotary_emb",
    # the zeros after a text are attended to
    takes_text_mask=False,
    takes_token_times=True,
)

FAMILY = Family(
    name="WanTransformer3DModel",
    stacks=("blocks",),
    attention="attn1",
    original=("WanAttnProcessor",),
    processor=VideoProcessor,
    grid=_grid,
    pipeline="WanPipeline",
    parts=PARTS,
)
