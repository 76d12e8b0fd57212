"""LTX-2 and LTX-2.3: self-attention of the video is sparse; audio and the attention between both stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.families.family import Family
from vsa.integrations.diffusers.families.ltx_video import flat_grid
from vsa.integrations.diffusers.processors import Processor, heads, refuse_mask, rotate


class LTX2Processor(Processor):
    """Self-attention of LTX2VideoTransformer3DModel, with norm over all heads and, in LTX-2.3, a gate per head.

    A perturbed pass of spatio-temporal guidance replaces the output by the values, as far as its mask is 0.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> Tensor:
        refuse_mask(attention_mask)
        q = heads(attn.norm_q(attn.to_q(hidden_states)), attn)
        k = heads(attn.norm_k(attn.to_k(hidden_states)), attn)
        values = attn.to_v(hidden_states)
        if query_rotary_emb is not None:
            turn = _rotate_halves if attn.rope_type == "split" else _rotate_neighbours
            q, k = turn(q, *query_rotary_emb), turn(k, *query_rotary_emb)
        out = values if all_perturbed else self.attend(q, k, heads(values, attn), hidden_states)
        if perturbation_mask is not None and not all_perturbed:
            out = torch.lerp(values, out, perturbation_mask)
        if attn.to_gate_logits is not None:
            gates = 2 * attn.to_gate_logits(hidden_states).sigmoid()
            out = (heads(out, attn) * gates[..., None]).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


def _rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` of x `[B, L, H, D]` by tables `[B, L, H * D]`."""
    return rotate(x, cos.view_as(x), sin.view_as(x))


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels D / 2 apart of x `[B, L, H, D]` by tables `[B, H, L, D / 2]`."""
    cos, sin, (first, second) = cos.transpose(1, 2), sin.transpose(1, 2), x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


FAMILY = Family(
    name="LTX2VideoTransformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn1",
    original=("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor"),
    processor=LTX2Processor,
    grid=flat_grid,
    guided_batch=True,
)
