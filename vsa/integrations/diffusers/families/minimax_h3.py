"""MiniMax-H3: packed rows of text, conditions, audio, then the generated video, without padding.

Sources: diffusers 0.42 `MiniMaxH3Transformer3DModel` and its modular pipeline (order of the rows, timesteps); FastVideo
`video_sparse_attn_h3.py` (tiles never cross a segment, queries before the video are dense, their keys always visible,
coarse stage over all tiles, gates without bias).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.diffusion.flow_matching import TIMESTEP_SCALE
from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.families.packed_rows import grid_of, packed, texts_of
from vsa.integrations.diffusers.families.parts import Constants, Inputs, Parts, Sizes, unpatchified
from vsa.integrations.diffusers.processors import Processor, project, refuse_mask
from vsa.integrations.diffusers.tile_attention import Grid
from vsa.models.embeddings import patchify


class MiniMaxH3Processor(Processor):
    """Joint attention of MiniMaxH3Transformer3DModel: norm per head, RoPE on the first channels of a head."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        refuse_mask(attention_mask)
        q, k, v = project(attn, hidden_states)
        if rotary_emb is not None:
            q, k = (_rotate(x, *rotary_emb) for x in (q, k))
        return attn.to_out[1](attn.to_out[0](self.attend(q, k, v, hidden_states)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of x `[B, L, H, D]` by tables `[L, R]`; pairs are R / 2 channels apart."""
    cos, sin = (table.to(x.dtype)[:, None] for table in (cos, sin))
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([turning * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def _timestep(arguments: Arguments) -> float:
    # of the generated video; here 1 is clean, and conditions are cleaner
    last = arguments["video_indices"][-1]
    return TIMESTEP_SCALE * (1 - float(arguments["timestep"][arguments["timestep_indices"][last]]))


def _sizes(config: Any) -> Sizes:
    channels, (t, h, w) = config.in_channels, config.patch_size
    return Sizes(channels, channels, text_dim=config.text_dim, ffn_dim=config.ffn_dim, patch_size=(t, h, w))


def _inputs(transformer: Any, given: Inputs, constants: Constants) -> dict[str, Any]:
    config, device = transformer.config, given.x.device
    row = packed(config, given.grid, given.text.shape[1], device)
    return {
        "hidden_states": patchify(given.x, config.patch_size),
        "audio_hidden_states": given.x.new_zeros(len(given.x), 0, config.audio_in_channels),
        "encoder_hidden_states": given.text,
        # the samples of a pass have one timestep; here 1 is clean
        "timestep": 1 - given.timestep[:1] / TIMESTEP_SCALE,
        "timestep_indices": torch.zeros(len(row["token_tags"]), dtype=torch.long, device=device),
        **row,
    }


def _velocity(output: Tensor, transformer: Any, given: Inputs, constants: Constants) -> Tensor:
    # the class predicts data - noise
    return -unpatchified(output, given.grid, transformer.config.patch_size)


def _rotary(transformer: Any, grid: Grid, constants: Constants) -> Any:
    return transformer.rope(packed(transformer.config, grid, 0, transformer.device)["position_ids"])


PARTS = Parts(
    sizes=_sizes,
    inputs=_inputs,
    rotary=_rotary,
    velocity=_velocity,
    head="proj_out.weight",
    time_embedder=None,
    # rows hold text too, and a batch may take several passes
    attention_output=None,
    after_blocks=("norm_out.", "proj_out.", "audio_proj_out."),
    after_attention=("attn.to_out.", "norm2.", "ff."),
    adapted_layers=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    time_layers=("time_embedder.", ".adaln_proj.", "norm_out.linear"),
    text_layers=("context_embedder.", "token_refiner."),
    joint_layers=("transformer_blocks.",),
    tables=("adaln_indices", "rotary_emb"),
    attention_rotary="rotary_emb",
    modulation=(),
    depths=("num_layers", "num_refiner_layers"),
    packed=True,
)

FAMILY = Family(
    name="MiniMaxH3Transformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn",
    original=("MiniMaxH3AttnProcessor",),
    processor=MiniMaxH3Processor,
    grid=grid_of,
    text="first",
    texts=texts_of,
    timestep=_timestep,
    gates_in="attention",
    gate_settings={"gate_bias": False, "coarse_text": True},
    parts=PARTS,
)
