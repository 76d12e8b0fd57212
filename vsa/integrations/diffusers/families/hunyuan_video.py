"""HunyuanVideo: joint rows of video, then text that is padded to one length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.families.family import Arguments, Family
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


def _grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = arguments["hidden_states"].shape[2:]
    return t // config.patch_size_t, h // config.patch_size, w // config.patch_size


def _texts(arguments: Arguments, grid: Grid) -> Texts:
    lengths = arguments["encoder_attention_mask"].sum(dim=1, dtype=torch.int)
    return tuple((length,) for length in lengths.tolist())


FAMILY = Family(
    name="HunyuanVideoTransformer3DModel",
    stacks=("transformer_blocks", "single_transformer_blocks"),
    attention="attn",
    original=("HunyuanVideoAttnProcessor2_0",),
    processor=HunyuanVideoProcessor,
    grid=_grid,
    text="last",
    texts=_texts,
)
