"""Video diffusion transformer: the architecture of Wan2.1 with an exchangeable self-attention method.

B batch, C T H W latent channels, frames, rows, columns, L video tokens, S text tokens, E text width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.layout import TileLayout
from vsa.models.blocks import Conditioning, TransformerBlock
from vsa.models.compiled import compiled_body
from vsa.models.compute_dtype import rounded
from vsa.models.embeddings import (
    ConditionEmbedder,
    Grid,
    PatchEmbedding,
    Places,
    ResidualNorm,
    at_least_fp32,
    patchify,
    unpatchify,
)
from vsa.models.init import Init, init_parameters
from vsa.models.network import Network
from vsa.models.rope import axis_dims, rope_tables, sincos_table
from vsa.settings import Bound, Positive, validated

# far above those of any model, far below those that are built for ever
Size = Annotated[int, Bound(">=", 1), Bound("<=", 4096)]
Patch = Annotated[int, Bound(">=", 1), Bound("<=", 64)]
Width = Annotated[int, Bound(">=", 1), Bound("<=", 1 << 20)]


@validated
class VideoDiT(Network):
    """Diffusion transformer with the architecture of Wan2.1.

    With dense attention its parameter names and its output are those of diffusers' `WanTransformer3DModel`;
    a sparse method adds its own parameters under each block (`blocks.N.to_gate_compress`, `blocks.N.to_gate_fine`).

    Args:
        attention: factory of a layer's self-attention method, given `dim`, `num_heads`, `head_dim`, `layer_idx`.
        num_attention_heads: H.
        attention_head_dim: D, even and at least 6.
        ffn_dim: width of the feed-forward layers.
        num_layers: number of blocks.
        in_channels: latent channels of the input, concatenated conditions included.
        out_channels: channels of the velocity.
        text_dim: E.
        freq_dim: width of the timestep sinusoid, even.
        patch_size: latent frames, rows, columns per token.
        cross_attn_norm: affine norm before the cross-attention.
        eps: epsilon of every norm.
        image_dim: width of the image tokens of image-to-video models, None without them.
        added_kv_proj_dim: width of the embedded image tokens in cross-attention (the model width), None without.
        rope_max_seq_len: largest token count along one axis.
        rope_theta: base of the RoPE frequencies; 10000 in Wan, small grids need a smaller one.
        absolute_positions: add a fixed sinusoidal position embedding to the patch embedding (Wan does not). The fastest
            RoPE channels repeat after 6.3 tokens, so a small model cannot tell the two ends of a small grid apart.
        init: "gpt_neox" (pretraining from scratch, VSA paper) or "wan".
    """

    head = "proj_out.weight"
    modulation = ("scale_shift_table",)
    time_embedder = "condition_embedder.time_embedder"
    attention_output = "attn1.to_out.0"
    after_blocks = ("proj_out.", "scale_shift_table")
    after_attention = ("attn1.to_out.", "attn2.", "norm2.", "ffn.")
    after_cross_attention = ("attn2.to_out", "ffn.")
    adapted_layers = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")

    def __init__(
        self,
        *,
        attention: Callable[..., AttentionMethod],
        num_attention_heads: Size,
        attention_head_dim: Size,
        ffn_dim: Width,
        num_layers: Size,
        in_channels: Width = 16,
        out_channels: Width = 16,
        text_dim: Width = 4096,
        freq_dim: Width = 256,
        patch_size: tuple[Patch, Patch, Patch] = (1, 2, 2),
        cross_attn_norm: bool = True,
        eps: Positive = 1e-6,
        image_dim: Width | None = None,
        added_kv_proj_dim: Width | None = None,
        rope_max_seq_len: Width = 1024,
        rope_theta: Positive = 10000.0,
        absolute_positions: bool = False,
        init: Init = "gpt_neox",
    ):
        super().__init__()
        axis_dims(attention_head_dim)
        if freq_dim < 2 or freq_dim % 2:
            raise ValueError(f"freq_dim must be even and positive, got {freq_dim}")
        if (image_dim is None) != (added_kv_proj_dim is None):
            raise ValueError(f"image_dim and added_kv_proj_dim come together, got {image_dim} and {added_kv_proj_dim}")
        dim = num_attention_heads * attention_head_dim
        if added_kv_proj_dim not in (None, dim):
            raise ValueError(f"added_kv_proj_dim must be the model width {dim}, got {added_kv_proj_dim}")
        self.dim, self.num_heads, self.head_dim, self.ffn_dim = dim, num_attention_heads, attention_head_dim, ffn_dim
        self.in_channels, self.out_channels, self.text_dim = in_channels, out_channels, text_dim
        self.image_dim, self.rope_max_seq_len, self.rope_theta = image_dim, rope_max_seq_len, rope_theta
        self.absolute_positions = absolute_positions
        self.init: Init = init
        self.patch_size: Grid = (int(patch_size[0]), int(patch_size[1]), int(patch_size[2]))

        self.patch_embedding = PatchEmbedding(in_channels, dim, self.patch_size)
        self.condition_embedder = ConditionEmbedder(dim, freq_dim, text_dim, image_dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                attention(dim=dim, num_heads=num_attention_heads, head_dim=attention_head_dim, layer_idx=layer_idx),
                num_heads=num_attention_heads,
                head_dim=attention_head_dim,
                ffn_dim=ffn_dim,
                cross_attn_norm=cross_attn_norm,
                eps=eps,
                added_kv_proj_dim=added_kv_proj_dim,
            )
            for layer_idx in range(num_layers)
        )
        for method in self.attention_layers:
            method.check_model(num_layers)
        self.norm_out = ResidualNorm(dim, eps, elementwise_affine=False)
        self.proj_out = nn.Linear(dim, out_channels * math.prod(self.patch_size))
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, dim))
        self.reset_parameters()

    def velocity(
        self, x: Tensor, timestep: Tensor, text: Tensor, mask: Tensor | None, image: Tensor | None, ctx: AttnContext
    ) -> Tensor:
        layout, embed_image = ctx.layout, self.condition_embedder.image_embedder
        grid = layout.segments[0].grid_thw
        # all values per token are permuted once, here, and the velocity is permuted back at the end; a rank that shares
        # the sample goes on with its own tokens
        x = self.patch_embedding(ctx.cut(layout.permute(patchify(x, self.patch_size))))
        if self.absolute_positions:
            x = x + ctx.cut(layout.permute(sincos_table(grid, self.dim, layout.device)[None])).type_as(x)
        times, places = timestep[:, None] if timestep.dim() == 1 else timestep, None
        if times.shape[1] == layout.num_tokens:
            times = ctx.cut(layout.permute(times))
        elif times.shape[1] == 2:
            places = (layout if ctx.division is None else ctx.division.local).derive(_first_frame_first)
        temb, modulation = self.condition_embedder.time(times)
        cond = Conditioning(
            modulation=modulation,
            rope=self._rope(ctx),
            text=self.condition_embedder.text_embedder(text),
            text_mask=None if mask is None else mask[:, None, None],
            image=None if image is None or embed_image is None else embed_image(image),
            places=places,
        )
        for layer_idx, block in enumerate(self.blocks):
            x = block(x, cond, ctx.layer(layer_idx))

        table = at_least_fp32(rounded(self.scale_shift_table, self.compute_dtype))
        shift, scale = (table + temb[:, :, None]).unbind(2)
        x = self.proj_out(self.norm_out(x, scale=scale, shift=shift, places=places)[1])
        return unpatchify(layout.unpermute(ctx.gather(x)), grid, self.patch_size)

    def grid(self, latent_shape: Sequence[int]) -> Grid:
        shape = tuple(latent_shape)
        if len(shape) != 4 or any(n % p or n < p for n, p in zip(shape[1:], self.patch_size, strict=True)):
            raise ValueError(f"latent shape [C, T, H, W] must be multiples of the patch {self.patch_size}, got {shape}")
        t, h, w = (n // p for n, p in zip(shape[1:], self.patch_size, strict=True))
        if max(t, h, w) > self.rope_max_seq_len:
            raise ValueError(f"token grid {(t, h, w)} exceeds rope_max_seq_len {self.rope_max_seq_len}")
        return t, h, w

    def self_attention(self, layer: int, h: Tensor, ctx: AttnContext) -> Tensor:
        return self.blocks[layer].self_attention(h, self._rope(ctx), ctx)

    def reset_parameters(self) -> None:
        """Initialise every parameter, also after `to_empty` of a model built on the meta device."""
        init_parameters(self, init=self.init, dim=self.dim, num_layers=len(self.blocks))
        for method in self.attention_layers:
            method.reset_extra_parameters()

    def fixed_settings(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.num_heads,
            "attention_head_dim": self.head_dim,
            "num_layers": len(self.blocks),
            "patch_size": list(self.patch_size),
            "rope_theta": self.rope_theta,
            "absolute_positions": self.absolute_positions,
        }

    def compile_blocks(self, *, backend: str = "inductor") -> None:
        run = compiled_body(backend=backend)
        for block in self.blocks:
            block.run = run

    def rows(self, layer: str, *, num_tokens: int, text_len: int, image_len: int) -> int:
        if layer.startswith("condition_embedder.time"):
            return 1
        if layer.startswith("condition_embedder.text_embedder.") or layer.endswith(("attn2.to_k", "attn2.to_v")):
            return text_len
        if layer.startswith("condition_embedder.image_embedder.") or layer.endswith((".add_k_proj", ".add_v_proj")):
            return image_len
        return num_tokens

    def _rope(self, ctx: AttnContext) -> tuple[Tensor, Tensor]:
        layout = ctx.layout
        cos, sin = rope_tables(layout.segments[0].grid_thw, self.head_dim, layout.device, self.rope_theta)
        return ctx.cut(layout.permute(cos[None]))[0], ctx.cut(layout.permute(sin[None]))[0]


def _first_frame_first(layout: TileLayout) -> Places:
    """The tokens in the layout's order, those of the first latent frame before all others, and the number of these; of
    a part its own."""
    (_, h, w), (start, stop) = layout.segments[0].grid_thw, layout.span
    later = layout.order[start:stop] >= h * w
    return later.to(torch.uint8).argsort(stable=True).int(), int((~later).sum())
