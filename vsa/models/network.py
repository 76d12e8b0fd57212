"""What training, sampling, evaluation, export and estimates ask of a network.

B batch, C T H W latent channels, frames, rows, columns, L video tokens, S text tokens, E text width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from vsa_kernels.dispatch import resolve_backend

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext, Recorder
from vsa.attention.denoising import DenoisingPass
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.sequence import Division, SequenceRanks, token_spans
from vsa.attention.tiling import Grid
from vsa.models.compute_dtype import compute_in
from vsa.models.flops import FlopCount
from vsa.models.pair_tally import PairTally
from vsa.models.recompute import Level

Module = TypeVar("Module", bound=nn.Module)
Role = Literal["matrix", "vector", "embedding", "gate", "head"]


class Network(nn.Module):
    """Predicts the flow-matching velocity of video latents from noisy latents, timestep and text.

    A network is known by this class alone; `VideoDiT` is one, a transformer class of diffusers is another. Each layer
    has its own self-attention method, and what holds of attention is asked of a layer: `attention_layers[i].selects`.
    A property of the network says which layers it is about. A subclass sets the attributes, and has the methods that
    raise NotImplementedError here. Names of parameters and modules are matched by their beginning or, inside a block,
    by a part.

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
        head: name of the weight of the last layer.
        modulation: endings of the names of modulation tables.
        time_embedder: name of the module whose output of width C conditions every block on the timestep; None: there is
            none of this width.
        attention_output: name, in a block, of the module whose output `[B, L, C]` is that of self-attention; None: some
            blocks have none.
        after_blocks: names of what acts after the last block.
        after_attention: names, in a block, of what acts after self-attention, `attention_output` included.
        after_cross_attention: names, in a block, of the linear layers that level `attention` does not compute again.
        adapted_layers: endings of the names of the linear layers that LoRA adapts by default.
        text_in_rows: whether the rows of self-attention hold text beside the video.
        takes_text_mask: whether `text_mask` may hide the padding of a text.
        takes_token_times: whether tokens of a sample may have different timesteps.
        gates_in: beginning of the names, in a block, of the modules of its method, as "attn.".
        one_pass: whether one pass computes all samples of a batch, so that an output of a block has all of them.
        sequence: the ranks that share a sample; None: every rank has its own.
        tally: counts the pairs of every pass, for attention that is `measured`; None: nothing is counted.
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
    blocks: Any
    compute_dtype: torch.dtype | None = None
    head: str
    modulation: tuple[str, ...] = ()
    time_embedder: str | None
    attention_output: str | None
    after_blocks: tuple[str, ...]
    after_attention: tuple[str, ...]
    after_cross_attention: tuple[str, ...]
    adapted_layers: tuple[str, ...]
    text_in_rows: bool = False
    takes_text_mask: bool = True
    takes_token_times: bool = True
    gates_in: str = ""
    one_pass: bool = True
    sequence: SequenceRanks | None = None
    tally: PairTally | None = None

    def velocity(
        self, x: Tensor, timestep: Tensor, text: Tensor, mask: Tensor | None, image: Tensor | None, ctx: AttnContext
    ) -> Tensor:
        """The result of `forward` for valid inputs.

        Args:
            x: `[B, in_channels, T, H, W]` noisy latents, conditions included.
            timestep: as in `forward`.
            text: `[B, S, E]`, zero where it is masked.
            mask: bool `[B, S]`, `text_mask` of `forward`.
            image: `[B, I, image_dim]`.
            ctx: layout, top-k of every layer, denoising state and the tokens of this rank.
        """
        raise NotImplementedError

    def grid(self, latent_shape: Sequence[int]) -> Grid:
        """Token grid of a latent shape `[C, T, H, W]`; ValueError if it has none."""
        raise NotImplementedError

    def self_attention(self, layer: int, h: Tensor, ctx: AttnContext) -> Tensor:
        """Self-attention output `[1, L, C]` of a layer for its normalised, modulated input h `[1, L, C]`.

        Both are in the order of `ctx.layout`, the layout of one video.
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

    def compile_blocks(self, *, backend: str = "inductor") -> None:
        """Compile the body that all blocks share as one graph, without sharding hooks and full checkpointing.

        Args:
            backend: backend of `torch.compile`.
        """
        raise NotImplementedError

    def fixed_settings(self) -> Mapping[str, Any]:
        """Settings, by their names in a config, that shapes of parameters do not determine clearly."""
        raise NotImplementedError

    def diffusers_config(self) -> dict[str, Any] | None:
        """`config.json` of the transformer, where the network is one of diffusers; None for other networks."""
        return None

    def refuse_data(self, text_padding: str, first_frame: float) -> None:
        """Raise ValueError where the network cannot be trained on data, or needs an input that these do not give.

        Args:
            text_padding: `mask` or `zeros`, what follows a text.
            first_frame: share of the samples whose first frame is given.
        """
        if first_frame > 0 and not self.takes_token_times:
            raise ValueError(
                f"task.objective.first_frame={first_frame}: {self.title} has one timestep per sample, so no clean frame"
            )
        if text_padding == "mask" and not self.takes_text_mask:
            raise ValueError(f"{self.title} takes no text mask, it needs data.text_padding=zeros, got mask")

    @property
    def title(self) -> str:
        """The name of its class, for messages."""
        return type(self).__name__

    @property
    def block_prefixes(self) -> Sequence[str]:
        """Beginnings of the names of the parameters of each block, such as `blocks.0.`."""
        return [f"blocks.{layer}." for layer in range(len(self.blocks))]

    # what follows from the above

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
            timestep: `[B]`; `[B, 2]` with that of the first latent frame and that of all others, which costs hardly
                more; or `[B, L]` with one per token in raster order. 0 is clean, 1000 is noise.
            text: `[B, S, E]` text embeddings.
            text_mask: bool `[B, S]`, True where a text token is real; None attends to all S (Wan's convention:
                zero-padded to 512, unmasked).
            cond_latents: `[B, Cc, T, H, W]` conditions, concatenated along channels (image-to-video).
            image_embeds: `[B, I, image_dim]` image tokens.
            topk: kv tiles per query tile, one for all layers or one per layer; None is all tiles. If it changes
                over a denoising, each sample uses the value at its own timestep.
            denoising: the current pass of a denoising, which then determines the top-k of all samples; None in
                training.
            recorder: recorder of the internals of the attention methods, those of the video where rows hold text too;
                blocks then run uncompiled. Samples of other text lengths are calls of their own.
        """
        x = x_t if cond_latents is None else torch.cat((x_t, cond_latents), dim=1)
        layout = self.layout_for(x.shape[1:], x_t.device)
        self._check_inputs(x, timestep, text, text_mask, image_embeds, layout.num_tokens)
        kept = KeptTiles.of(layout.num_video_tiles if topk is None else topk)
        layers = len(self.blocks)
        kept = kept.at(denoising.progress, denoising.step) if denoising else kept.at_timesteps(timestep, layers)
        kept.by_layer(layers)
        if text_mask is not None:
            # masked tokens must not affect the output, even if they hold NaN
            text = text.masked_fill(~text_mask[..., None], 0)
        # a recorder gets whole layers
        division = None if recorder is not None else self.division_of(layout)
        x = x if division is None else division.ranks.enter(x)
        ctx = AttnContext(layout=layout, topk=kept, denoising=denoising, recorder=recorder, division=division)
        if (tally := self.tally) is None:
            return self.velocity(x, timestep, text, text_mask, image_embeds, ctx)
        each = len(x) * (self.num_heads * layout.num_tokens**2 if division is None else division.pairs(self.num_heads))
        out = self.velocity(x, timestep, text, text_mask, image_embeds, replace(ctx, slots=(slots := [])))
        tally.add(slots, layers, layers * each)
        return out

    def division_of(self, layout: TileLayout) -> Division | None:
        """The tokens of this rank in a row of one video, beside its text; None where ranks share no sample."""
        if self.sequence is None:
            return None
        division = layout.derive(Division, self.sequence, self.num_heads)
        for method in self.attention_layers if division.queries is not layout else ():
            method.prepare(division.queries)
        return division

    def gather(self, x: Tensor, latent_shape: Sequence[int]) -> Tensor:
        """All tokens `[B, L, ...]` of hidden states, in the order of the layout, that a pass left on this rank.

        Args:
            x: `[B, l, ...]` tokens of this rank; all of them, as after the last block of a class, are returned.
            latent_shape: `[C, T, H, W]` of the pass.
        """
        layout = self.layout_for(latent_shape, x.device)
        division = self.division_of(layout)
        return x if division is None or x.shape[1] == layout.num_tokens else division.gather(x)

    def refuse_division(self, latent_shapes: Iterable[Sequence[int]], ranks: int) -> None:
        """Raise ValueError where `ranks` ranks cannot share samples of these latent shapes `[C, T, H, W]`."""
        for method in self.attention_layers:
            method.refuse_division(ranks)
        for shape in latent_shapes:
            token_spans(self.layout_for(shape), ranks)

    def _check_inputs(
        self, x: Tensor, timestep: Tensor, text: Tensor, mask: Tensor | None, image: Tensor | None, num_tokens: int
    ) -> None:
        batch, channels = x.shape[:2]
        if channels != self.in_channels:
            raise ValueError(
                f"model takes {self.in_channels} latent channels (x_t and cond_latents together), got {channels}"
            )
        if text.dim() != 3 or text.shape[0] != batch or text.shape[2] != self.text_dim:
            raise ValueError(f"text must be [B, S, E] = [{batch}, S, {self.text_dim}], got {list(text.shape)}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != text.shape[:2]):
            raise ValueError(f"text_mask must be bool {list(text.shape[:2])}, got {mask.dtype} {list(mask.shape)}")
        if mask is not None and not self.takes_text_mask:
            raise ValueError(f"{self.title} takes no text_mask, got {list(mask.shape)}: pad texts with zeros")
        if timestep.shape not in ((batch,), (batch, 2), (batch, num_tokens)):
            sizes = f"[{batch}], [{batch}, 2] or [{batch}, {num_tokens}]"
            raise ValueError(f"timestep must be {sizes}, got {list(timestep.shape)}")
        if timestep.dim() == 2 and not self.takes_token_times:
            raise ValueError(f"{self.title} has one timestep per sample, got {list(timestep.shape)}")
        if (image is None) != (self.image_dim is None):
            shape = None if image is None else list(image.shape)
            raise ValueError(f"image_embeds must be set exactly if image_dim is: {self.image_dim}, got {shape}")

    def parameter_roles(self) -> dict[str, Role]:
        """Role of every parameter by name, which determines its optimizer group and weight decay.

        gate: all parameters of the attention methods' own modules, including biases, which therefore decay with their
        weights; head: the weight of the last layer; vector: other biases, norms and modulation tables; embedding:
        weights of the patch, time, text and image embeddings; matrix: the weights inside the blocks.
        """
        layers = zip(self.block_prefixes, self.attention_layers, strict=True)
        inside = self.gates_in
        extras = tuple(f"{prefix}{inside}{name}." for prefix, method in layers for name in method.extra_modules())
        prefixes = tuple(self.block_prefixes)

        def role(name: str, parameter: nn.Parameter) -> Role:
            if extras and name.startswith(extras):
                return "gate"
            if name == self.head:
                return "head"
            if parameter.dim() == 1 or name.endswith(self.modulation):
                return "vector"
            return "matrix" if name.startswith(prefixes) else "embedding"

        return {name: role(name, parameter) for name, parameter in self.named_parameters()}

    def follows_attention(self, name: str) -> bool:
        """Whether a parameter acts only after the last self-attention, which its gradient then does not pass."""
        last = self.block_prefixes[-1]
        return name.startswith((*self.after_blocks, *(last + part for part in self.after_attention)))

    @property
    def activation_checkpointing(self) -> Level:
        """The part of each block that the backward pass recomputes, see `vsa.models.recompute`."""
        return self.blocks[0].activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, level: Level) -> None:
        for block in self.blocks:
            block.activation_checkpointing = level

    @property
    def attention_layers(self) -> Sequence[AttentionMethod]:
        """Self-attention methods, one per layer."""
        return [block.method for block in self.blocks]

    @property
    def selects(self) -> bool:
        """Whether the query tiles of a layer select kv tiles by a top-k."""
        return any(method.selects for method in self.attention_layers)

    @property
    def predicts(self) -> bool:
        """Whether q and k of a layer determine the visited tiles by another rule than a top-k."""
        return any(method.predicts for method in self.attention_layers)

    @property
    def measured(self) -> bool:
        """Whether q and k decide in every layer how many tiles are kept, see `AttentionMethod.measured`."""
        return all(method.measured for method in self.attention_layers)

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

    def layout_for(self, latent_shape: Sequence[int], device: torch.device | str | None = None) -> TileLayout:
        """Tile layout of a latent shape `[C, T, H, W]`, that of every layer which is not dense; dense ones take any.

        Raises:
            ValueError: no such grid, or layers that order or tile the tokens in different ways.
        """
        segments = (Segment(grid_thw=self.grid(latent_shape)),)
        first = next(iter(self.blocks)).method
        if first.is_dense:
            first = next((method for method in self.attention_layers if not method.is_dense), first)
        layout = first.layout(segments, device)
        agreed = layout.derive(_networks)
        if self not in agreed:
            for method in self.attention_layers:
                # equal layouts are one object
                if not method.is_dense and method.layout(segments, device) is not layout:
                    raise ValueError(
                        f"layers {first.layer_idx} and {method.layer_idx} have attention with different tiles or token "
                        f"orders ({type(first).__name__}, {type(method).__name__}): all layers share one"
                    )
            agreed.add(self)
        return layout

    @torch.no_grad()
    def with_attention(self, attention: Callable[..., AttentionMethod]) -> Network:
        """This network with other attention methods; all other parameters are shared, not copied.

        The parameters of a method have the values that its constructor sets.

        Args:
            attention: factory of the methods from `dim`, `num_heads`, `head_dim`, `layer_idx`.
        """
        model, blocks = self.shallow_copy(), []
        for layer_idx, block in enumerate(self.blocks):
            # a comparison must not change the random state of its caller
            with torch.random.fork_rng(devices=[]):
                made = attention(dim=self.dim, num_heads=self.num_heads, head_dim=self.head_dim, layer_idx=layer_idx)
            made.check_model(len(self.blocks))
            made = made.to(next(self.parameters())).train(self.training)
            blocks.append(shallow_copy(block).replace_method(made))
        model.replace_blocks(blocks)
        compute_in(model, self.compute_dtype)
        return model

    def shallow_copy(self) -> Network:
        """A new network that shares the parameters and submodules of this one."""
        return shallow_copy(self)

    def replace_blocks(self, blocks: Sequence[nn.Module]) -> None:
        """Run other blocks, one per layer, from now on."""
        self.blocks = nn.ModuleList(blocks).train(self.training)

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
                denoising, its largest value is counted. None: all, or what the methods expect to keep; 0: none, for
                what is computed beside them.
            text_len: S.
            image_len: image tokens of image-to-video models.
            training: whether forward and backward are counted, instead of the forward only.
        """
        layout = self.layout_for(latent_shape, "cpu")
        sizes: dict[str, Any] = {"num_tokens": layout.num_tokens, "text_len": text_len, "image_len": image_len}
        linear_factor, attention_factor = (3.0, 3.5) if training else (1.0, 1.0)
        # of one pair of tokens
        width = self.num_heads * self.head_dim
        each, layers, pairs = attention_factor * 4 * width, len(self.blocks), self.pairs(layout, topk)
        roles = self.parameter_roles()
        num_parameters = sum(p.numel() for name, p in self.named_parameters() if roles[name] != "gate")
        cross_attention = each * self.text_pairs(layout.num_tokens, text_len, image_len) * layers
        return FlopCount(
            executed=linear_factor * self.linear_flops(**sizes) + cross_attention + each * sum(pairs),
            self_attention=each * sum(pairs),
            selected=each * sum(own for own, m in zip(pairs, self.attention_layers, strict=True) if m.selects),
            dense_equivalent=linear_factor * 2 * num_parameters * layout.num_tokens
            + each * (float(layout.num_tokens) ** 2 * layers),
        )

    def text_pairs(self, num_tokens: int, text_len: int, image_len: int) -> int:
        """Query-key pairs of one head of a layer with a text or image token."""
        return num_tokens * (text_len + image_len)

    def linear_flops(
        self, *, num_tokens: int, text_len: int, image_len: int = 0, recomputed: Level | None = None
    ) -> float:
        """Operations of the forward pass of the linear layers for one sample with one timestep.

        Args:
            num_tokens: L.
            text_len: S.
            image_len: image tokens of image-to-video models.
            recomputed: level at which only what the backward pass recomputes is counted; None: everything.
        """
        sizes = {"num_tokens": num_tokens, "text_len": text_len, "image_len": image_len}
        layers = [(name, m) for name, m in self.named_modules() if isinstance(m, nn.Linear | nn.Conv3d)]
        if recomputed is not None:
            kept = {"none": ("",), "attention": self.after_cross_attention}.get(recomputed, ())
            inside = [(name, m) for name, m in layers if name.startswith(tuple(self.block_prefixes))]
            layers = [(name, m) for name, m in inside if not any(part in name for part in kept)]
        return float(sum(2 * self.rows(name, **sizes) * layer.weight.numel() for name, layer in layers))

    def pairs(self, layout: TileLayout, topk: KeptTiles | float | None = None) -> list[float]:
        """Executed query-key pairs of one head in each layer; `topk` as in `flops`."""
        methods = self.attention_layers
        if topk is None:
            return [method.expected_pairs(layout) for method in methods]
        if topk == 0:
            return [method.pairs(layout, 0) for method in methods]
        counts = KeptTiles.of(topk).largest().by_layer(len(methods))
        # beside layers that select by a top-k, it says nothing about those with another rule
        other = self.selects
        return [
            method.expected_pairs(layout, k) if other else method.pairs(layout, k)
            for method, k in zip(methods, counts, strict=True)
        ]

    def computed_tiles(self, layout: TileLayout, topk: KeptTiles) -> KeptTiles:
        """Tiles per query tile; those of layers without a top-k from the pairs of tokens that they compute."""
        methods, pairs, tiles = self.attention_layers, self.pairs(layout), layout.num_video_tiles
        if all(method.selects for method in methods):
            return topk
        own = [tiles * (count / layout.num_tokens**2) for count in pairs]
        if not self.selects:
            return KeptTiles((fmean(own),))
        layers = zip(methods, topk.by_layer(len(methods)), own, strict=True)
        return KeptTiles(tuple(k if method.selects else count for method, k, count in layers))


def _networks(layout: TileLayout) -> WeakSet[Network]:
    """Networks of which all layers have a layout."""
    return WeakSet()


def shallow_copy(module: Module) -> Module:
    """A new module that shares the parameters and submodules of another one."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
