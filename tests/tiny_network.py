"""A second network beside `VideoDiT`, and attention of two methods, for configs of tests."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
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
        self.patches, self.head = nn.Linear(64, self.dim), nn.Linear(self.dim, 64)
        self.time, self.text = nn.Linear(freq_dim, self.dim), nn.Linear(text_dim, self.dim)
        self.blocks = nn.ModuleList(Block(attention(**sizes, layer_idx=i), ffn_dim) for i in range(num_layers))

    def forward(
        self,
        x_t,
        timestep,
        text,
        text_mask=None,
        *,
        cond_latents=None,
        image_embeds=None,
        topk=None,
        denoising=None,
        recorder=None,
    ):
        layout = self.layout_for(x_t.shape[1:], x_t.device)
        kept = KeptTiles.of(layout.num_video_tiles if topk is None else topk)
        if denoising is None:
            kept = kept.at_timesteps(timestep, len(self.blocks))
        else:
            kept = kept.at(denoising.progress, denoising.step)
        ctx = AttnContext(layout=layout, topk=kept, denoising=denoising, recorder=recorder)
        real = text if text_mask is None else text.masked_fill(~text_mask[..., None], 0)
        x = self.patches(layout.permute(patchify(x_t, self.patch_size)))
        x = x + (self.time(sinusoid(timestep, self.freq_dim).type_as(x)) + self.text(real.mean(1)))[:, None]
        for i, block in enumerate(self.blocks):
            x = block(x, ctx.layer(i))
        return unpatchify(layout.unpermute(self.head(x)), self.grid(x_t.shape[1:]), self.patch_size)

    @property
    def attention_projections(self):
        return [block.joined for block in self._layers]

    @property
    def time_embedder(self):
        return self.time

    def self_attention(self, layer, h, ctx):
        return self._layers[layer].attend(h, ctx)

    def follows_attention(self, name):
        return name.startswith("head.")

    def grid(self, latent_shape):
        _, t, h, w = latent_shape
        return t, h // 2, w // 2

    def parameter_roles(self):
        def role(name: str, parameter: nn.Parameter) -> Any:
            if ".to_gate_" in name:
                return "gate"
            if name == "head.weight":
                return "head"
            if parameter.dim() == 1:
                return "vector"
            return "matrix" if name.startswith("blocks.") else "embedding"

        return {name: role(name, parameter) for name, parameter in self.named_parameters()}

    def fixed_settings(self):
        return {"num_attention_heads": self.num_heads, "num_layers": len(self.blocks)}

    def rows(self, layer, *, num_tokens, text_len, image_len):
        return 1 if layer in ("time", "text") else num_tokens
