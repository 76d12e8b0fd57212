"""Attention processors of four diffusers transformers that hand q, k and v to an attention method.

B batch, L tokens of a row (video and, in joint models, text), H heads, D head dim, C = H * D model width.

A processor computes q, k and v with the model's own modules and puts the output through the model's own projections,
as the processor it stands in for does; only softmax attention itself is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.tile_attention import TileAttention


class Processor:
    """Base of the processors: what diffusers sets on every processor, and the attention of the layer.

    Args:
        attend: attention of the layer.
    """

    # diffusers assigns both to processors that have them; tile attention has its own backends
    _attention_backend = None
    _parallel_config = None

    def __init__(self, attend: TileAttention):
        self.attend = attend


class WanProcessor(Processor):
    """Self-attention of WanTransformer3DModel: video tokens, norm over all heads, RoPE tables `[1, L, 1, D]`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        refuse_mask(attention_mask)
        q = heads(attn.norm_q(attn.to_q(hidden_states)), attn)
        k = heads(attn.norm_k(attn.to_k(hidden_states)), attn)
        v = heads(attn.to_v(hidden_states), attn)
        if rotary_emb is not None:
            q, k = rotate(q, *rotary_emb), rotate(k, *rotary_emb)
        out = self.attend(q, k, v, hidden_states)
        return attn.to_out[1](attn.to_out[0](out))


class LTXProcessor(Processor):
    """Self-attention of LTXVideoTransformer3DModel: as Wan's, with one RoPE over all heads, tables `[B, L, C]`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        refuse_mask(attention_mask)
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        v = heads(attn.to_v(hidden_states), attn)
        if image_rotary_emb is not None:
            q, k = rotate(q, *image_rotary_emb), rotate(k, *image_rotary_emb)
        out = self.attend(heads(q, attn), heads(k, attn), v, hidden_states)
        return attn.to_out[1](attn.to_out[0](out))


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


class HunyuanVideoProcessor(Processor):
    """Joint attention of HunyuanVideoTransformer3DModel: rows [video, text], padding at the end, RoPE on the video.

    Double blocks have projections of their own for the text (`add_q_proj`), single blocks have none and leave the
    output projection to the block. The mask says what the pass already knows from the text lengths.
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
            text_q = heads(attn.add_q_proj(encoder_hidden_states), attn)
            text_k = heads(attn.add_k_proj(encoder_hidden_states), attn)
            text_v = heads(attn.add_v_proj(encoder_hidden_states), attn)
            text_q = text_q if attn.norm_added_q is None else attn.norm_added_q(text_q)
            text_k = text_k if attn.norm_added_k is None else attn.norm_added_k(text_k)
            pairs = zip(project(attn, hidden_states), (text_q, text_k, text_v), strict=True)
            q, k, v = (torch.cat(pair, dim=1) for pair in pairs)
        if image_rotary_emb is not None:
            q, k = (torch.cat([rotate_heads(x[:, :video], image_rotary_emb), x[:, video:]], dim=1) for x in (q, k))
        out = self.attend(q, k, v, hidden)
        out, text_out = out[:, :video], out[:, video:]
        if getattr(attn, "to_out", None) is not None:
            out = attn.to_out[1](attn.to_out[0](out))
        if getattr(attn, "to_add_out", None) is not None:
            text_out = attn.to_add_out(text_out)
        return out, text_out


def refuse_mask(mask: Tensor | None) -> None:
    # a mask that is not the padding of a known family would silently be ignored
    if mask is not None:
        raise ValueError(f"self-attention of this model takes no mask, got one of shape {tuple(mask.shape)}")


def heads(x: Tensor, attn: Any) -> Tensor:
    """`[B, L, C]` to `[B, L, H, D]`."""
    return x.unflatten(2, (attn.heads, -1))


def project(attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[B, L, H, D]` of diffusers' `Attention`, whose qk-norm is per head and may be missing."""
    q, k, v = (heads(linear(hidden), attn) for linear in (attn.to_q, attn.to_k, attn.to_v))
    return q if attn.norm_q is None else attn.norm_q(q), k if attn.norm_k is None else attn.norm_k(k), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channel pairs of x, in at least the precision of the tables; cos and sin broadcast to x.

    All four families pair neighbours and repeat each angle for both channels of its pair.
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x * cos + turned * sin).type_as(x)


def rotate_heads(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """`rotate` of x `[B, L, H, D]` by tables `[L, D]`."""
    cos, sin = (table.to(x.device)[:, None] for table in tables)
    return rotate(x, cos, sin)
