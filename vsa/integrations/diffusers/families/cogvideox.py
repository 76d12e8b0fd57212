"""CogVideoX: joint rows of text, then video."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.families.ddpm_schedule import angle_of, angles_of_schedule, interpolated, velocity_of
from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.families.parts import Constants, Inputs, Parts, Sizes
from vsa.integrations.diffusers.processors import Processor, project, refuse_mask, rotate_heads
from vsa.integrations.diffusers.tile_attention import Grid


class CogVideoXProcessor(Processor):
    """Joint attention of CogVideoXTransformer3DModel: rows [text, video], norm per head, RoPE on the video."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        refuse_mask(attention_mask)
        text = encoder_hidden_states.shape[1]
        hidden = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        q, k, v = project(attn, hidden)
        if image_rotary_emb is not None:
            q, k = (torch.cat([x[:, :text], rotate_heads(x[:, text:], image_rotary_emb)], dim=1) for x in (q, k))
        out = attn.to_out[1](attn.to_out[0](self.attend(q, k, v, hidden)))
        return out[:, text:], out[:, :text]


def _grid(config: Any, arguments: Arguments) -> Grid:
    _, t, _, h, w = arguments["hidden_states"].shape
    return t // (config.patch_size_t or 1), h // config.patch_size, w // config.patch_size


def _sizes(config: Any) -> Sizes:
    for name in ("use_learned_positional_embeddings", "ofs_embed_dim"):
        if value := config[name]:
            raise ValueError(f"config.{name}={value}: image-to-video models of CogVideoX cannot be trained")
    dim = config.num_attention_heads * config.attention_head_dim
    channels = (config.in_channels, config.out_channels or config.in_channels)
    patch = (config.patch_size_t or 1, config.patch_size, config.patch_size)
    return Sizes(*channels, text_dim=config.text_embed_dim, ffn_dim=4 * dim, patch_size=patch)


def _inputs(transformer: Any, given: Inputs, constants: Constants) -> dict[str, Any]:
    config, text = transformer.config, given.text.shape[1]
    if not config.use_rotary_positional_embeddings and text != config.max_text_seq_length:
        raise ValueError(f"{FAMILY.name} takes texts of {config.max_text_seq_length} tokens, got {text}")
    angle = angle_of(given.timestep)
    angles = angles_of_schedule(_snr_shift(config, constants), given.x.device)
    scale = (angle.cos() + angle.sin()).to(given.x.dtype)
    return {
        # x0 and noise with factors whose squares, not which themselves, add up to 1
        "hidden_states": (given.x * scale[:, None, None, None, None]).transpose(1, 2),
        "encoder_hidden_states": given.text,
        "timestep": interpolated(angle, angles),
        "image_rotary_emb": _rotary(transformer, given.grid, constants),
    }


def _velocity(output: Tensor, transformer: Any, given: Inputs, constants: Constants) -> Tensor:
    return velocity_of(given.x, output.transpose(1, 2), angle_of(given.timestep)).type_as(output)


def _snr_shift(config: Any, constants: Constants) -> float:
    if (value := constants["snr_shift_scale"]) != "auto":
        return value
    return 1.0 if config.use_rotary_positional_embeddings else 3.0


def _rotary(transformer: Any, grid: Grid, constants: Constants) -> Any:
    config = transformer.config
    if not config.use_rotary_positional_embeddings:
        return None
    base = (config.sample_height // config.patch_size, config.sample_width // config.patch_size)
    return _tables(config.attention_head_dim, grid, base, config.patch_size_t is not None, transformer.device)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _tables(head_dim: int, grid: Grid, base: tuple[int, int], of_1_5: bool, device: torch.device) -> Any:
    """Rotary tables as `CogVideoXPipeline` makes them, for both versions of the model."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    frames, height, width = grid
    if of_1_5:
        region: dict[str, Any] = {"crops_coords": None, "grid_type": "slice", "max_size": base}
    else:
        region = {"crops_coords": get_resize_crop_region_for_grid((height, width), base[1], base[0])}
    return get_3d_rotary_pos_embed(head_dim, grid_size=(height, width), temporal_size=frames, device=device, **region)


PARTS = Parts(
    sizes=_sizes,
    inputs=_inputs,
    velocity=_velocity,
    rotary=_rotary,
    head="proj_out.weight",
    # of another width than the model
    time_embedder=None,
    attention_output=None,
    after_blocks=("norm_final.", "norm_out.", "proj_out."),
    after_attention=("attn1.to_out.", "norm2.", "ff."),
    adapted_layers=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    time_layers=("time_embedding.", ".norm1.linear", ".norm2.linear", "norm_out.linear"),
    text_layers=("patch_embed.text_proj.",),
    joint_layers=("transformer_blocks.",),
    tables=("image_rotary_emb",),
    modulation=(),
    # 3 in CogVideoX-2B, which has no rotary tables, else 1 (scheduler_config.json of the models)
    constants={"snr_shift_scale": "auto"},
    # the padding of a text is attended to
    takes_text_mask=False,
)

FAMILY = Family(
    name="CogVideoXTransformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn1",
    original=("CogVideoXAttnProcessor2_0",),
    processor=CogVideoXProcessor,
    grid=_grid,
    text="first",
    guided_batch=True,
    pipeline="CogVideoXPipeline",
    parts=PARTS,
)
