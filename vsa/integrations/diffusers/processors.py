"""What the attention processors of the families share: they pass q, k and v to an attention method.

B batch, L tokens of a row (video and, in joint models, text), H heads, D head dim, C = H * D model width.

Like the processor that it replaces, a processor computes q, k and v and the output projection with the model's own
modules; only the softmax attention is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.tile_attention import TileAttention


class Processor:
    """Base of the processors: attributes that diffusers sets on every processor, and the attention of the layer.

    Args:
        attend: attention of the layer.
    """

    # diffusers assigns both attributes if they exist; tile attention has its own backends
    _attention_backend = None
    _parallel_config = None

    def __init__(self, attend: TileAttention):
        self.attend = attend


class VideoProcessor(Processor):
    """Self-attention of video tokens (WanTransformer3DModel, LTXVideoTransformer3DModel), with norm over all heads.

    RoPE tables are `[1, L, 1, D]`, the same for every head (Wan), or `[B, L, C]` (LTX).
    """

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
            cos, sin = (table if table.ndim == 4 else heads(table, attn) for table in rotary_emb)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.attend(q, k, v, hidden_states)
        return attn.to_out[1](attn.to_out[0](out))


def refuse_mask(mask: Tensor | None) -> None:
    # any other mask than the known padding would silently be ignored
    if mask is not None:
        raise ValueError(f"self-attention of this model takes no mask, got one of shape {list(mask.shape)}")


def heads(x: Tensor, attn: Any) -> Tensor:
    """`[B, L, C]` to `[B, L, H, D]`."""
    return x.unflatten(2, (attn.heads, -1))


def project(attn: Any, hidden: Tensor, layers: str = "to_{}", norms: str = "norm_{}") -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[B, L, H, D]` of diffusers' `Attention`, whose qk-norm is per head and may be missing."""
    q, k, v = (heads(getattr(attn, layers.format(name))(hidden), attn) for name in "qkv")
    norm_q, norm_k = (getattr(attn, norms.format(name)) for name in "qk")
    return q if norm_q is None else norm_q(q), k if norm_k is None else norm_k(k), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channel pairs of x, in at least the precision of the tables; cos and sin broadcast to x.

    All families that use it pair neighbours and repeat each angle for both channels of its pair.
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x * cos + turned * sin).type_as(x)


def rotate_heads(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """`rotate` of x `[B, L, H, D]` by tables `[L, D]`."""
    cos, sin = (table.to(x.device)[:, None] for table in tables)
    return rotate(x, cos, sin)
