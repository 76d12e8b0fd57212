"""HunyuanVideo: joint rows of video, then text that is padded to one length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.families.parts import Constants, Inputs, Parts, Sizes, latents_of
from vsa.integrations.diffusers.processors import Processor, project, rotate_heads
from vsa.integrations.diffusers.tile_attention import Grid, Texts


class HunyuanVideoProcessor(Processor):
    """Joint attention of HunyuanVideoTransformer3DModel: rows [video, text], padding at the end, RoPE on the video.

    Double blocks have separate projections for the text (`add_q_proj`); single blocks have none and leave the output
    projection to the block. The mask is not used, because the text lengths of the pass contain the same information.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        video = hidden_states.shape[1]
        hidden = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        if attn.add_q_proj is None:
            q, k, v = project(attn, hidden)
        else:
            text = project(attn, encoder_hidden_states, layers="add_{}_proj", norms="norm_added_{}")
            q, k, v = (torch.cat(pair, dim=1) for pair in zip(project(attn, hidden_states), text, strict=True))
        if image_rotary_emb is not None:
            q, k = (torch.cat([rotate_heads(x[:, :video], image_rotary_emb), x[:, video:]], dim=1) for x in (q, k))
        out = self.attend(q, k, v, hidden)
        out, text_out = out[:, :video], out[:, video:]
        if getattr(attn, "to_out", None) is not None:
            out = attn.to_out[1](attn.to_out[0](out))
        if getattr(attn, "to_add_out", None) is not None:
            text_out = attn.to_add_out(text_out)
        return out, text_out


def token_grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = arguments["hidden_states"].shape[2:]
    return t // config.patch_size_t, h // config.patch_size, w // config.patch_size


def _texts(arguments: Arguments, grid: Grid) -> Texts:
    lengths = arguments["encoder_attention_mask"].sum(dim=1, dtype=torch.int)
    return tuple((length,) for length in lengths.tolist())


def patch_size(config: Any) -> Grid:
    return config.patch_size_t, config.patch_size, config.patch_size


def _sizes(config: Any) -> Sizes:
    if config.image_condition_type == "token_replace":
        raise ValueError(
            "config.image_condition_type=token_replace: its blocks take the first tokens for the first frame, which "
            "tiles are not; null and latent_concat can be trained"
        )
    width = int(config.num_attention_heads * config.attention_head_dim * config.mlp_ratio)
    channels = (config.in_channels, config.out_channels or config.in_channels)
    return Sizes(*channels, text_dim=config.text_embed_dim, ffn_dim=width, patch_size=patch_size(config))


def _inputs(transformer: Any, given: Inputs, constants: Constants) -> dict[str, Any]:
    batch, config = given.x.shape[0], transformer.config
    mask = given.text.new_ones(given.text.shape[:2], dtype=torch.bool) if given.mask is None else given.mask
    guidance = None
    if config.guidance_embeds:
        # the pipeline embeds thousandths
        guidance = given.timestep.new_full((batch,), 1000.0 * constants["guidance"])
    return {
        "hidden_states": given.x,
        "timestep": given.timestep,
        "encoder_hidden_states": given.text,
        "encoder_attention_mask": mask.long(),
        "pooled_projections": given.text.new_full((batch, config.pooled_projection_dim), constants["pooled_text"] or 0),
        "guidance": guidance,
    }


def rotary(transformer: Any, grid: Grid, constants: Constants) -> Any:
    return transformer.rope(latents_of(grid, patch_size(transformer.config), transformer.device))


TEXT_LAYERS = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff_context.net.0.proj", "ff_context.net.2")

PARTS = Parts(
    sizes=_sizes,
    inputs=_inputs,
    rotary=rotary,
    head="proj_out.weight",
    time_embedder="time_text_embed.timestep_embedder",
    # single blocks project attention and feed-forward together
    attention_output=None,
    after_blocks=("norm_out.", "proj_out."),
    after_attention=("proj_mlp.", "proj_out."),
    adapted_layers=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_mlp", *TEXT_LAYERS),
    time_layers=("time_text_embed.", ".norm1.linear", ".norm1_context.", ".norm.linear", "norm_out.linear"),
    text_layers=("context_embedder.", *(f".{name}." for name in TEXT_LAYERS)),
    joint_layers=("single_transformer_blocks.", ".to_gate_"),
    tables=("freqs_cis", "image_rotary_emb"),
    modulation=(),
    # guidance of the distilled model; its second text encoder is in no set
    constants={"guidance": 1.0, "pooled_text": None},
    depths=("num_layers", "num_single_layers", "num_refiner_layers"),
)

FAMILY = Family(
    name="HunyuanVideoTransformer3DModel",
    stacks=("transformer_blocks", "single_transformer_blocks"),
    attention="attn",
    original=("HunyuanVideoAttnProcessor2_0",),
    processor=HunyuanVideoProcessor,
    grid=token_grid,
    text="last",
    texts=_texts,
    pipeline="HunyuanVideoPipeline",
    # it embeds this one, and has another for two passes
    trained_arguments={"guidance_scale": 1.0},
    parts=PARTS,
)
