"""CogVideoX: joint rows of text, then video."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.families.family import Arguments, Family
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


FAMILY = Family(
    name="CogVideoXTransformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn1",
    original=("CogVideoXAttnProcessor2_0",),
    processor=CogVideoXProcessor,
    grid=_grid,
    text="first",
    guided_batch=True,
)
