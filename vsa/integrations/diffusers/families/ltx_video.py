"""LTX-Video: rows of video tokens that arrive flat, text in cross-attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.families.parts import Constants, Inputs, Parts, Sizes, unpatchified
from vsa.integrations.diffusers.processors import VideoProcessor
from vsa.integrations.diffusers.tile_attention import Grid
from vsa.models.embeddings import patchify


def flat_grid(config: Any, arguments: Arguments) -> Grid:
    """Token grid of latents that arrive as rows of tokens, from the arguments beside them."""
    t, h, w = (arguments.get(name) for name in ("num_frames", "height", "width"))
    if t is None or h is None or w is None:
        raise ValueError(f"LTX needs num_frames, height and width for its token grid, got {t}, {h}, {w}")
    return t, h, w


def _patch(config: Any) -> Grid:
    return config.patch_size_t, config.patch_size, config.patch_size


def _sizes(config: Any) -> Sizes:
    t, h, w = _patch(config)
    dim = config.num_attention_heads * config.attention_head_dim
    # those of the class are channels of a token
    channels = (n // (t * h * w) for n in (config.in_channels, config.out_channels or config.in_channels))
    return Sizes(*channels, text_dim=config.caption_channels, ffn_dim=4 * dim, patch_size=(t, h, w))


def _scale(constants: Constants) -> tuple[float, int, int]:
    # seconds of a latent frame, pixels of a row and a column (LTXPipeline)
    return constants["vae_temporal"] / constants["fps"], constants["vae_spatial"], constants["vae_spatial"]


def _inputs(transformer: Any, given: Inputs, constants: Constants) -> dict[str, Any]:
    t, h, w = given.grid
    return {
        "hidden_states": patchify(given.x, _patch(transformer.config)),
        "timestep": given.timestep,
        "encoder_hidden_states": given.text,
        "encoder_attention_mask": given.mask,
        "num_frames": t,
        "height": h,
        "width": w,
        "rope_interpolation_scale": _scale(constants),
    }


def _velocity(output: Tensor, transformer: Any, given: Inputs, constants: Constants) -> Tensor:
    return unpatchified(output, given.grid, _patch(transformer.config))


def _rotary(transformer: Any, grid: Grid, constants: Constants) -> Any:
    return transformer.rope(transformer.proj_in.weight[None], *grid, _scale(constants))


PARTS = Parts(
    sizes=_sizes,
    inputs=_inputs,
    rotary=_rotary,
    velocity=_velocity,
    head="proj_out.weight",
    time_embedder="time_embed.emb.timestep_embedder",
    attention_output="attn1.to_out.0",
    after_blocks=("proj_out.", "scale_shift_table"),
    after_attention=("attn1.to_out.", "attn2.", "norm2.", "ff."),
    adapted_layers=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    time_layers=("time_embed.",),
    text_layers=("caption_projection.", ".attn2.to_k", ".attn2.to_v"),
    tables=("image_rotary_emb",),
    token_rows=("temb",),
    # of LTX-Video's VAE, and the frame rate that its pipeline assumes
    constants={"fps": 25, "vae_temporal": 8, "vae_spatial": 32},
    takes_token_times=True,
)

FAMILY = Family(
    name="LTXVideoTransformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn1",
    original=("LTXVideoAttnProcessor",),
    processor=VideoProcessor,
    grid=flat_grid,
    guided_batch=True,
    pipeline="LTXPipeline",
    parts=PARTS,
)
