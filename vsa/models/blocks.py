"""One transformer block of the video DiT; parameter names are those of diffusers' Wan.

B batch, L video tokens in the layout's order, S text tokens, H heads, D head dim, C = H * D model width,
M = 1, 2 or L timesteps per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from vsa_kernels import norm_rope

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.dense import cross_attn
from vsa.models.compute_dtype import rounded, split_projection
from vsa.models.embeddings import FeedForward, Places, Residual, ResidualNorm, at_least_fp32, residual_sum
from vsa.models.recompute import Level, checkpointed, checkpointed_except_attention
from vsa.models.rope import Rope


class Modulation(NamedTuple):
    """Shift, scale and gate of the two modulated sub-layers, each `[B, M, C]`, in checkpoint order."""

    shift_attn: Tensor
    scale_attn: Tensor
    gate_attn: Tensor
    shift_ffn: Tensor
    scale_ffn: Tensor
    gate_ffn: Tensor


class Conditioning(NamedTuple):
    """Inputs that all blocks share beside the hidden states.

    Args:
        modulation: `[B, M, 6, C]`, at least float32.
        rope: cos, sin `[L, D / 2]` in the layout's order.
        text: `[B, S, C]`.
        text_mask: bool `[B, 1, 1, S]`, True where a text token is attended to; None attends to all.
        image: `[B, I, C']` image tokens of image-to-video models.
        places: the tokens of each of two timesteps, with M = 2.
    """

    modulation: Tensor
    rope: Rope
    text: Tensor
    text_mask: Tensor | None = None
    image: Tensor | None = None
    places: Places | None = None


class QKNorm(nn.RMSNorm):
    """RMS norm of projected queries or keys, over all heads together, with the rotation of each head.

    Args:
        num_heads: H.
        head_dim: D.
        eps: constant added to the mean square.
    """

    compute_dtype: torch.dtype | None = None
    eps: float

    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__(num_heads * head_dim, eps=eps)
        self.num_heads = num_heads

    def forward(self, x: Tensor, projection: nn.Module, rope: Rope | None = None) -> Tensor:  # type: ignore[override]
        """Normalised heads `[B, L, H, D]` of `projection(x)`, rotated by the tables.

        Args:
            x: `[B, L, E]`.
            projection: projection to `[B, L, C]`; the bias of a linear layer is added by the kernel of the norm.
            rope: cos, sin `[L, D / 2]`, or None without rotation.
        """
        weight = rounded(self.weight, self.compute_dtype)
        tables = (None, None) if rope is None else rope
        x, arguments = split_projection(projection, x)
        return norm_rope(x, weight, *tables, num_heads=self.num_heads, eps=self.eps, projection=arguments)


class AttentionProjections(nn.Module):
    """Projections to q, k, v and back, with norms of q and k.

    Args:
        num_heads: H.
        head_dim: D.
        eps: epsilon of the norms.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.num_heads = num_heads
        dim = num_heads * head_dim
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        # a list because the checkpoint key is to_out.0
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q = QKNorm(num_heads, head_dim, eps)
        self.norm_k = QKNorm(num_heads, head_dim, eps)

    @property
    def projection(self) -> nn.Module:
        """The layer after the attention."""
        return self.to_out[0]

    def heads(self, x: Tensor) -> Tensor:
        """`[B, L, C]` to `[B, L, H, D]`."""
        return x.unflatten(-1, (self.num_heads, -1))


class CrossAttention(AttentionProjections):
    """Dense attention from video tokens to text and, with its own keys and values, to image tokens.

    Args:
        num_heads: H.
        head_dim: D.
        eps: epsilon of the norms.
        added_kv_proj_dim: width of the image tokens, None without an image branch.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, added_kv_proj_dim: int | None):
        super().__init__(num_heads, head_dim, eps)
        if added_kv_proj_dim is not None:
            dim = num_heads * head_dim
            self.add_k_proj = nn.Linear(added_kv_proj_dim, dim)
            self.add_v_proj = nn.Linear(added_kv_proj_dim, dim)
            self.norm_added_k = QKNorm(num_heads, head_dim, eps)

    def forward(self, x: Tensor, text: Tensor, text_mask: Tensor | None, image: Tensor | None) -> Tensor:
        return self.projection(self.attend(x, text, text_mask, image))

    def attend(self, x: Tensor, text: Tensor, text_mask: Tensor | None, image: Tensor | None) -> Tensor:
        """The heads `[B, L, C]`, which `projection` gets."""
        q, k = self.norm_q(x, self.to_q), self.norm_k(text, self.to_k)
        out = cross_attn(q, k, self.heads(self.to_v(text)), text_mask)
        if image is not None:
            k = self.norm_added_k(image, self.add_k_proj)
            out = out + cross_attn(q, k, self.heads(self.add_v_proj(image)))
        return out.flatten(2)


class TransformerBlock(nn.Module):
    """Modulated self-attention, text cross-attention and feed-forward, each with a residual.

    Forward hooks fire on the layers inside `attn1`, `attn2` and `ffn`, but not on these three, which are never called.

    Args:
        method: self-attention method of this layer; its extra modules are registered here under their own names.
        num_heads: H.
        head_dim: D.
        ffn_dim: width of the feed-forward layer.
        cross_attn_norm: affine norm before the cross-attention.
        eps: epsilon of every norm.
        added_kv_proj_dim: width of image tokens in the cross-attention, None without them.
    """

    method: AttentionMethod
    compute_dtype: torch.dtype | None = None

    def __init__(
        self,
        method: AttentionMethod,
        *,
        num_heads: int,
        head_dim: int,
        ffn_dim: int,
        cross_attn_norm: bool,
        eps: float,
        added_kv_proj_dim: int | None,
    ):
        super().__init__()
        dim = num_heads * head_dim
        self.norm1 = ResidualNorm(dim, eps, elementwise_affine=False)
        self.attn1 = AttentionProjections(num_heads, head_dim, eps)
        self.attn2 = CrossAttention(num_heads, head_dim, eps, added_kv_proj_dim)
        self.norm2 = ResidualNorm(dim, eps) if cross_attn_norm else Residual()
        self.ffn = FeedForward(dim, ffn_dim)
        self.norm3 = ResidualNorm(dim, eps, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, dim))
        self._register(method)
        self.activation_checkpointing: Level = "none"
        # an unbound function, because a bound one in a deep copy would still use the weights of the original block
        self.run: Callable[..., Tensor] = TransformerBlock.body

    def replace_method(self, method: AttentionMethod) -> TransformerBlock:
        """Replace the attention method and its extra modules; returns the block."""
        for name in self.method.extra_modules():
            del self._modules[name]
        self._register(method)
        return self

    def _register(self, method: AttentionMethod) -> None:
        for name, module in method.extra_modules().items():
            self.register_module(name, module)
        # bypasses nn.Module's registration, since the method's modules are already registered under the block's prefix
        object.__setattr__(self, "method", method)

    def forward(self, x: Tensor, cond: Conditioning, ctx: AttnContext) -> Tensor:
        """Hidden states `[B, L, C]` after the block.

        Args:
            x: `[B, L, C]` in the layout's order.
            cond: modulation, RoPE tables, text and image.
            ctx: context of this layer (scalar top-k).
        """
        run = self.run if self.method.traceable(ctx) else TransformerBlock.body
        if self.activation_checkpointing == "full" and torch.is_grad_enabled():
            return checkpointed(run, self, x, cond, ctx)
        return run(self, x, cond, ctx)

    def body(self, x: Tensor, cond: Conditioning, ctx: AttnContext) -> Tensor:
        """The computation of the block, which `Network.compile_blocks` compiles."""
        level = self.activation_checkpointing if torch.is_grad_enabled() else "none"
        if level == "attention_mlp":
            # not passed: older versions of torch would compile each layer for its own context
            return checkpointed_except_attention(lambda x, cond: self._sublayers(x, cond, ctx), x, cond)
        mod = self._modulation(cond)
        if level == "attention":
            states = checkpointed_except_attention(
                lambda x, mod, cond: self._attentions(x, mod, cond, ctx), x, mod, cond
            )
        else:
            states = self._attentions(x, mod, cond, ctx)
        return self._feed_forward(*states, mod, cond.places)

    def _sublayers(self, x: Tensor, cond: Conditioning, ctx: AttnContext) -> Tensor:
        mod = self._modulation(cond)
        return self._feed_forward(*self._attentions(x, mod, cond, ctx), mod, cond.places)

    def _modulation(self, cond: Conditioning) -> Modulation:
        table = at_least_fp32(rounded(self.scale_shift_table, self.compute_dtype))
        return Modulation(*(table + cond.modulation).unbind(2))

    def _attentions(self, x: Tensor, mod: Modulation, cond: Conditioning, ctx: AttnContext) -> tuple[Tensor, Tensor]:
        """Hidden states after self-attention, and the heads of cross-attention, not projected and added yet."""
        _, h = self.norm1(x, scale=mod.scale_attn, shift=mod.shift_attn, places=cond.places)
        heads = self._attend(h, cond.rope, ctx)
        x, h = self.norm2(x, heads, mod.gate_attn, projection=self.attn1.projection, places=cond.places)
        return x, self.attn2.attend(h, cond.text, cond.text_mask, cond.image)

    def _feed_forward(self, x: Tensor, heads: Tensor, mod: Modulation, places: Places | None) -> Tensor:
        own = {"scale": mod.scale_ffn, "shift": mod.shift_ffn, "places": places}
        x, h = self.norm3(x, heads, projection=self.attn2.projection, **own)
        return residual_sum(x, self.ffn.hidden(h), mod.gate_ffn, self.ffn.projection, places)

    def self_attention(self, h: Tensor, rope: Rope, ctx: AttnContext) -> Tensor:
        """Self-attention output `[B, L, C]` of normalised, modulated hidden states `[B, L, C]`."""
        return self.attn1.projection(self._attend(h, rope, ctx))

    def _attend(self, h: Tensor, rope: Rope, ctx: AttnContext) -> Tensor:
        attn = self.attn1
        q, k = attn.norm_q(h, attn.to_q, rope), attn.norm_k(h, attn.to_k, rope)
        v = attn.heads(attn.to_v(h))
        return self.method(q, k, v, self.method.project(h), ctx).flatten(2)
