"""Kandinsky 5: video tokens in self-attention, text in cross-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.processors import Processor, rotate
from vsa.integrations.diffusers.tile_attention import Grid


class Kandinsky5Processor(Processor):
    """Self-attention of Kandinsky5Transformer3DModel: norm per head, RoPE as matrices `[1, L, 1, D / 2, 2, 2]`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        sparse_params: Any = None,
    ) -> Tensor:
        q, k, v = (
            layer(hidden_states).unflatten(2, (attn.num_heads, -1))
            for layer in (attn.to_query, attn.to_key, attn.to_value)
        )
        q, k = attn.query_norm(q.float()).type_as(q), attn.key_norm(k.float()).type_as(k)
        if rotary_emb is not None:
            cos, sin = (rotary_emb[..., row, 0].repeat_interleave(2, dim=-1) for row in (0, 1))
            # the class rounds to bfloat16 whatever its dtype
            q, k = (rotate(x.float(), cos, sin).to(torch.bfloat16).type_as(x) for x in (q, k))
        return attn.out_layer(self.attend(q, k, v, hidden_states))


def _grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = (n // p for n, p in zip(arguments["hidden_states"].shape[1:4], config.patch_size, strict=True))
    return t, h, w


FAMILY = Family(
    name="Kandinsky5Transformer3DModel",
    stacks=("visual_transformer_blocks",),
    attention="self_attention",
    original=("Kandinsky5AttnProcessor",),
    processor=Kandinsky5Processor,
    grid=_grid,
    query="to_query",
    heads="num_heads",
    # masks of its own sparse attention, with another order of the tokens
    replaced=("sparse_params",),
)
