"""What training, sampling, evaluation, export and estimates ask of a network.

B batch, C T H W latent channels, frames, rows, columns, L video tokens, S text tokens, E text width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from vsa_kernels.dispatch import resolve_backend

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext, Recorder
from vsa.attention.denoising import DenoisingPass
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.tiling import Grid
from vsa.models.compute_dtype import compute_in
from vsa.models.flops import FlopCount, count_flops
from vsa.models.recompute import Level

Module = TypeVar("Module", bound=nn.Module)
Role = Literal["matrix", "vector", "embedding", "gate", "head"]


class Network(nn.Module):
    """Predicts the flow-matching velocity of video latents from noisy latents, timestep and text.

    A network is known by this class alone; `VideoDiT` is one. Each layer has its own self-attention method, and what
    holds of attention is asked of a layer: `attention_layers[i].selects`. A property of the network says which layers
    it is about. A subclass is an `nn.Module` with the attributes and methods that raise NotImplementedError here.

    Attributes:
        dim: model width, `num_heads * head_dim`.
        num_heads: heads of self-attention.
        head_dim: channels of a head.
        ffn_dim: width of the feed-forward layers.
        in_channels: latent channels of the input, concatenated conditions included.
        out_channels: channels of the velocity.
        text_dim: E.
        image_dim: width of the image tokens of image-to-video models, None without them.
        patch_size: latent frames, rows, columns per token.
        blocks: one module per layer, in their order, with its `method`, `replace_method` and level of
            `activation_checkpointing`, as in `TransformerBlock`; sharding gathers the parameters of one at a time.
        compute_dtype: dtype that parameters are rounded to in the forward pass (`compute_in`); None: their own.
    """

    dim: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    image_dim: int | None
    patch_size: Grid
    blocks: nn.ModuleList
    compute_dtype: torch.dtype | None = None

    def forward(
        self,
        x_t: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_mask: Tensor | None = None,
        *,
        cond_latents: Tensor | None = None,
        image_embeds: Tensor | None = None,
        topk: KeptTiles | int | Sequence[int] | None = None,
        denoising: DenoisingPass | None = None,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Velocity `[B, out_channels, T, H, W]` in the compute dtype of the head.

        Args:
            x_t: `[B, C, T, H, W]` noisy latents.
            timestep: `[B]`, or `[B, L]` with one per token in raster order; 0 is clean, 1000 is noise.
            text: `[B, S, E]` text embeddings.
            text_mask: bool `[B, S]`, True where a text token is real; None attends to all S (Wan's convention:
                zero-padded to 512, unmasked).
            cond_latents: `[B, Cc, T, H, W]` conditions, concatenated along channels (image-to-video).
            image_embeds: `[B, I, image_dim]` image tokens.
            topk: kv tiles per query tile, one for all layers or one per layer; None is all tiles. If it changes
                over a denoising, each sample uses the value at its own timestep.
            denoising: the current pass of a denoising, which then determines the top-k of all samples; None in
                training.
            recorder: receives the internals of the attention methods; blocks then run uncompiled.
        """
        raise NotImplementedError

    @property
    def attention_layers(self) -> Sequence[AttentionMethod]:
        """Self-attention methods, one per layer."""
        return [block.method for block in self._layers]

    @property
    def attention_projections(self) -> Sequence[nn.Module]:
        """The modules whose output `[B, L, C]` is that of self-attention, one per layer."""
        raise NotImplementedError

    @property
    def time_embedder(self) -> nn.Module:
        """The module whose output of width C conditions every block on the timestep."""
        raise NotImplementedError

    def self_attention(self, layer: int, h: Tensor, ctx: AttnContext) -> Tensor:
        """Self-attention output `[1, L, C]` of a layer for its normalised, modulated input h `[1, L, C]`.

        Both are in the order of `ctx.layout`, the layout of one video.
        """
        raise NotImplementedError

    def follows_attention(self, name: str) -> bool:
        """Whether a parameter acts only after the last self-attention, which its gradient then does not pass."""
        raise NotImplementedError

    def grid(self, latent_shape: Sequence[int]) -> Grid:
        """Token grid of a latent shape `[C, T, H, W]`; ValueError if it has none."""
        raise NotImplementedError

    def parameter_roles(self) -> Mapping[str, Role]:
        """Role of every parameter by name, which determines its optimizer group and weight decay.

        gate: all parameters of the attention methods' own modules, including biases, which therefore decay with their
        weights; head: the weight of the last layer; vector: other biases, norms and modulation tables; embedding:
        weights of the patch, time, text and image embeddings; matrix: the weights inside the blocks.
        """
        raise NotImplementedError

    def fixed_settings(self) -> Mapping[str, Any]:
        """Settings, by their names in a config, that shapes of parameters do not determine clearly."""
        raise NotImplementedError

    @property
    def activation_checkpointing(self) -> Level:
        """The part of each block that the backward pass recomputes, see `vsa.models.recompute`."""
        return self._layers[0].activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, level: Level) -> None:
        for block in self._layers:
            block.activation_checkpointing = level

    def compile_blocks(self, *, backend: str = "inductor") -> None:
        """Compile the body that all blocks share as one graph, without sharding hooks and full checkpointing.

        Args:
            backend: backend of `torch.compile`.
        """
        raise NotImplementedError

    def rows(self, layer: str, *, num_tokens: int, text_len: int, image_len: int) -> int:
        """Rows of one sample that pass through a linear layer, by its name.

        Args:
            layer: name of the module.
            num_tokens: L.
            text_len: S.
            image_len: image tokens of image-to-video models.
        """
        raise NotImplementedError

    # what follows from the above

    @property
    def selects(self) -> bool:
        """Whether the query tiles of a layer select kv tiles by a top-k."""
        return any(method.selects for method in self.attention_layers)

    @property
    def predicts(self) -> bool:
        """Whether q and k of a layer determine the visited tiles by another rule than a top-k."""
        return any(method.predicts for method in self.attention_layers)

    @property
    def is_dense(self) -> bool:
        """Whether all layers have dense attention."""
        return all(method.is_dense for method in self.attention_layers)

    @property
    def attention_names(self) -> str:
        """Classes of the attention methods, for messages."""
        return ", ".join(dict.fromkeys(type(method).__name__ for method in self.attention_layers))

    @property
    def attention_backend(self) -> str | None:
        """Backend of the attention methods on the device of the weights; None if no layer has backends."""
        for method in self.attention_layers:
            if hasattr(method, "backend"):
                device = next(self.parameters()).device
                return method.backend or resolve_backend(None, device, torch.float32, method.head_dim)  # type: ignore
        return None

    @property
    def _layers(self) -> list[Any]:
        return list(self.blocks)

    def layout_for(self, latent_shape: Sequence[int], device: torch.device | str | None = None) -> TileLayout:
        """Tile layout of a latent shape `[C, T, H, W]`, that of every layer which is not dense; dense ones take any.

        Raises:
            ValueError: no such grid, or layers that order or tile the tokens in different ways.
        """
        return self.layout_of((Segment(grid_thw=self.grid(latent_shape)),), device)

    def layout_of(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        """`layout_for` a row of segments."""
        layers = self.attention_layers
        first, *others = [method for method in layers if not method.is_dense] or layers[:1]
        layout = first.layout(segments, device)
        for method in others:
            # equal layouts are one object
            if method.layout(segments, device) is not layout:
                raise ValueError(
                    f"layers {first.layer_idx} and {method.layer_idx} have attention with different tiles or token "
                    f"orders ({type(first).__name__}, {type(method).__name__}): all layers share one"
                )
        return layout

    @torch.no_grad()
    def with_attention(self, attention: Callable[..., AttentionMethod]) -> Network:
        """This network with other attention methods; all other parameters are shared, not copied.

        The parameters of a method have the values that its constructor sets.

        Args:
            attention: factory of the methods from `dim`, `num_heads`, `head_dim`, `layer_idx`.
        """
        model, blocks = _shallow_copy(self), []
        for layer_idx, block in enumerate(self._layers):
            # a comparison must not change the random state of its caller
            with torch.random.fork_rng(devices=[]):
                made = attention(dim=self.dim, num_heads=self.num_heads, head_dim=self.head_dim, layer_idx=layer_idx)
            made.check_model(len(self.blocks))
            made = made.to(next(self.parameters())).train(self.training)
            blocks.append(_shallow_copy(block).replace_method(made))
        model.blocks = nn.ModuleList(blocks).train(self.training)
        compute_in(model, self.compute_dtype)
        return model

    def flops(
        self,
        latent_shape: Sequence[int],
        topk: KeptTiles | float | None = None,
        text_len: int = 512,
        *,
        image_len: int = 0,
        training: bool = True,
    ) -> FlopCount:
        """Floating point operations of one sample (one timestep per sample).

        Args:
            latent_shape: `[C, T, H, W]`.
            topk: kv tiles per query tile, or their expected number, see `AttentionMethod.pairs`; if it changes over a
                denoising, its largest value is counted. None: all, or what the methods expect to keep.
            text_len: S.
            image_len: image tokens of image-to-video models.
            training: count forward and backward instead of the forward only.
        """
        layout = self.layout_for(latent_shape, "cpu")
        pairs = self.pairs(layout, topk)
        return count_flops(
            self, pairs, num_tokens=layout.num_tokens, text_len=text_len, image_len=image_len, training=training
        )

    def pairs(self, layout: TileLayout, topk: KeptTiles | float | None = None) -> list[float]:
        """Executed query-key pairs of one head in each layer; `topk` as in `flops`."""
        methods = self.attention_layers
        if topk is None:
            return [method.expected_pairs(layout) for method in methods]
        counts = KeptTiles.of(topk).largest().by_layer(len(methods))
        # a top-k says nothing about the layers that select by another rule, or not at all
        return [
            method.pairs(layout, k) if method.selects else method.expected_pairs(layout)
            for method, k in zip(methods, counts, strict=True)
        ]


def _shallow_copy(module: Module) -> Module:
    """A new module that shares the parameters and submodules of another one."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
