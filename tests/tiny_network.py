"""A second network beside `VideoDiT`, and attention of two methods, for configs of tests."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.embeddings import patchify, sinusoid, unpatchify
from vsa.models.network import Network

TARGETS = "tests.tiny_network."


class DenseThenSparse(VideoSparseAttention):
    """Full attention in even layers, video-sparse attention in odd ones."""

    def __new__(cls, *, layer_idx: int, dim: int, num_heads: int, head_dim: int, **settings: Any) -> Any:
        if layer_idx % 2:
            return super().__new__(cls)
        return FullAttention(dim=dim, num_heads=num_heads, head_dim=head_dim, layer_idx=layer_idx)


class Block(nn.Module):
    """Self-attention and a feed-forward layer, each with a residual."""

    method: AttentionMethod

    def __init__(self, method: AttentionMethod, ffn_dim: int):
        super().__init__()
        self.qkv, self.joined = nn.Linear(method.dim, 3 * method.dim), nn.Linear(method.dim, method.dim)
        self.wide, self.narrow = nn.Linear(method.dim, ffn_dim), nn.Linear(ffn_dim, method.dim)
        self.activation_checkpointing = "none"
        self.replace_method(method)

    def replace_method(self, method: AttentionMethod) -> Block:
        for name, module in method.extra_modules().items():
            self.register_module(name, module)
        object.__setattr__(self, "method", method)
        return self

    def attend(self, h: Tensor, ctx: AttnContext) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.method.num_heads, -1)) for x in self.qkv(h).chunk(3, -1))
        return self.joined(self.method(q, k, v, self.method.project(h), ctx).flatten(2))

    def forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        x = x + self.attend(F.layer_norm(x, x.shape[-1:]), ctx)
        return x + self.narrow(F.gelu(self.wide(F.layer_norm(x, x.shape[-1:]))))


class TinyNetwork(Network):
    """Two kinds of linear layers around attention without positions; text and timestep are added to every token."""

    head = "last.weight"
    time_embedder = "time"
    attention_output = "joined"
    after_blocks = ("last.",)
    after_attention = ("joined.", "wide.", "narrow.")
    after_cross_attention = ("wide", "narrow")
    adapted_layers = ("qkv", "joined", "wide", "narrow")

    def __init__(
        self,
        *,
        attention: Any,
        num_attention_heads: int,
        attention_head_dim: int,
        ffn_dim: int,
        num_layers: int,
        text_dim: int,
        freq_dim: int,
    ):
        super().__init__()
        self.num_heads, self.head_dim, self.ffn_dim = num_attention_heads, attention_head_dim, ffn_dim
        self.dim, self.text_dim, self.freq_dim = num_attention_heads * attention_head_dim, text_dim, freq_dim
        self.in_channels = self.out_channels = 16
        self.image_dim, self.patch_size = None, (1, 2, 2)
        sizes = dict(dim=self.dim, num_heads=self.num_heads, head_dim=self.head_dim)
        self.patches, self.last = nn.Linear(64, self.dim), nn.Linear(self.dim, 64)
        self.time, self.text = nn.Linear(freq_dim, self.dim), nn.Linear(text_dim, self.dim)
        self.blocks = nn.ModuleList(Block(attention(**sizes, layer_idx=i), ffn_dim) for i in range(num_layers))

    def velocity(self, x, timestep, text, mask, image, ctx):
        layout = ctx.layout
        hidden = self.patches(layout.permute(patchify(x, self.patch_size)))
        hidden = hidden + (self.time(sinusoid(timestep, self.freq_dim).type_as(x)) + self.text(text.mean(1)))[:, None]
        for i, block in enumerate(self.blocks):
            hidden = block(hidden, ctx.layer(i))
        return unpatchify(layout.unpermute(self.last(hidden)), layout.segments[0].grid_thw, self.patch_size)

    def self_attention(self, layer, h, ctx):
        return self.blocks[layer].attend(h, ctx)

    def grid(self, latent_shape):
        _, t, h, w = latent_shape
        return t, h // 2, w // 2

    def fixed_settings(self):
        return {"num_attention_heads": self.num_heads, "num_layers": len(self.blocks)}

    def rows(self, layer, *, num_tokens, text_len, image_len):
        return 1 if layer in ("time", "text") else num_tokens
