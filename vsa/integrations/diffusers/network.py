"""A transformer class of diffusers as a network: its own modules, names and forward, with our attention.

B batch, C T H W latent channels, frames, rows, columns, L video tokens, S text tokens, E text width.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.layout import Segment
from vsa.attention.tiling import Grid
from vsa.checkpoints.wan_config import SPARSE_FLAG
from vsa.integrations.diffusers.families import FAMILIES
from vsa.integrations.diffusers.families.parts import Inputs
from vsa.integrations.diffusers.layer_block import CurrentPass, Group, LayerBlock, Pass, as_layer, joint_groups
from vsa.models.compiled import compiled_body
from vsa.models.compute_dtype import allow_rounding
from vsa.models.init import NothingDrawn
from vsa.models.network import Network, shallow_copy
from vsa.settings import validated


@validated
class DiffusersNetwork(Network):
    """A supported transformer class of diffusers with another self-attention.

    With dense attention, parameters and output are those of the class; a sparse method adds its own parameters under
    each block (`transformer_blocks.N.to_gate_compress`). The class runs its own forward. Video tokens are in tile order
    from its first block to its last one.

    Args:
        attention: factory of a layer's self-attention method, given `dim`, `num_heads`, `head_dim`, `layer_idx`.
        class_name: name of the class.
        config: its settings, as in its `config.json`; others have the defaults of the class.
        constants: inputs of the class that no data give, by name, in place of those of the family.
    """

    transformer: Any

    def __init__(
        self,
        *,
        attention: Callable[..., AttentionMethod],
        class_name: str,
        config: Mapping[str, Any],
        constants: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        family = FAMILIES.get(class_name)
        if family is None or family.parts is None:
            known = ", ".join(name for name, other in FAMILIES.items() if other.parts is not None)
            raise ValueError(f"class_name must be a class that can be trained ({known}), got {class_name}")
        self.family, self.parts = family, family.parts
        self.text_in_rows = family.text != "none"
        self.one_pass = not self.parts.packed
        own = self.parts.constants or {}
        if unknown := sorted(set(constants or {}) - set(own)):
            names = ", ".join(own) or "none"
            raise ValueError(f"constants.{unknown[0]}: {class_name} has no such input, those without data are {names}")
        self.constants = {**own, **(constants or {})}
        transformer = _transformer(class_name, config)
        # not a submodule: the network holds its modules under their own names, in the same dictionaries
        object.__setattr__(self, "transformer", transformer)
        self._modules, self._parameters = transformer._modules, transformer._parameters
        self._buffer_values: dict[str, Tensor] = {}
        loose = [
            (place, name)
            for place, module in transformer.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        ]
        if loose or next(self.buffers(), None) is not None:
            # those of the class do not depend on the number of layers
            shallow = _transformer(class_name, {**config, **dict.fromkeys(self.parts.depths, 1)}, device="cpu")
            self._buffer_values = dict(shallow.named_buffers())
            # tensors that the class moves to the device of its inputs
            for place, name in loose:
                setattr(transformer.get_submodule(place), name, getattr(shallow.get_submodule(place), name))
        self.current = CurrentPass()
        self._read_sizes()
        for module in (transformer, *self.modules()):
            allow_rounding(module)
        blocks = self.blocks
        sizes = {"dim": self.dim, "num_heads": self.num_heads, "head_dim": self.head_dim}
        shared: dict[str, Any] = {"family": family, "parts": self.parts, "current": self.current, "layers": len(blocks)}
        for layer, block in enumerate(blocks):
            method = attention(**sizes, layer_idx=layer)
            if self.text_in_rows and not method.takes_text:
                name = type(method).__name__
                raise ValueError(f"{name} takes rows of one video, but {class_name} has text in its rows")
            as_layer(block, method, **shared, layer=layer)
        for method in self.attention_layers:
            method.check_model(len(blocks))
        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
        self.reset_parameters()

    def _read_sizes(self) -> None:
        config, parts = self.transformer.config, self.parts
        attn = getattr(self.blocks[0], self.family.attention)
        query = getattr(attn, self.family.query)
        self.num_heads, self.dim = getattr(attn, self.family.heads), query.in_features
        self.head_dim = query.out_features // self.num_heads
        self.gates_in = "" if self.family.gates_in == "block" else f"{self.family.attention}."
        sizes = parts.sizes(config)
        self.in_channels, self.out_channels, self.text_dim = sizes.in_channels, sizes.out_channels, sizes.text_dim
        self.ffn_dim, self.image_dim = sizes.ffn_dim, sizes.image_dim
        t, h, w = sizes.patch_size
        self.patch_size: Grid = (t, h, w)
        self.head, self.modulation = parts.head, parts.modulation
        # a class may have a module of this name
        vars(self)["time_embedder"] = parts.time_embedder
        self.attention_output = parts.attention_output
        self.after_blocks, self.after_attention = parts.after_blocks, parts.after_attention
        self.after_cross_attention, self.adapted_layers = (), parts.adapted_layers
        self.takes_text_mask, self.takes_token_times = parts.takes_text_mask, parts.takes_token_times

    def refuse_data(self, text_padding: str, first_frame: float) -> None:
        super().refuse_data(text_padding, first_frame)
        if missing := [name for name, value in self.constants.items() if value is None]:
            raise ValueError(
                f"{self.title} takes {missing[0]}, which data do not hold: model.constants.{missing[0]}=0 trains it "
                "with that value, and a pipeline that gives another one then meets an input it was not trained on"
            )

    @property
    def title(self) -> str:
        return self.family.name

    @property
    def blocks(self) -> Any:
        """One module per layer, in their order."""
        stacks = [self._modules[stack] for stack in self.family.stacks]
        return stacks[0] if len(stacks) == 1 else [block for stack in stacks for block in stack]  # type: ignore

    @property
    def block_prefixes(self) -> Sequence[str]:
        stacks = self.family.stacks
        return [f"{stack}.{i}." for stack in stacks for i in range(len(self._modules[stack]))]  # type: ignore[arg-type]

    def velocity(
        self, x: Tensor, timestep: Tensor, text: Tensor, mask: Tensor | None, image: Tensor | None, ctx: AttnContext
    ) -> Tensor:
        grid = ctx.layout.segments[0].grid_thw
        if timestep.dim() == 2 and timestep.shape[1] != ctx.layout.num_tokens:
            # that of the first frame and that of the others; the class has one per token
            frame = grid[1] * grid[2]
            timestep = torch.cat(
                (timestep[:, :1].expand(-1, frame), timestep[:, 1:].expand(-1, frame * (grid[0] - 1))), 1
            )
        head: Any = self.get_submodule(self.head.rpartition(".")[0])
        # gathered weights have another dtype than sharded ones
        dtype: torch.dtype = self.compute_dtype or head.weight.dtype
        given = Inputs(
            x=x.to(dtype),
            timestep=timestep,
            text=text.to(dtype),
            mask=mask,
            image=None if image is None else image.to(dtype),
            grid=grid,
        )
        transformer: Any = self.transformer
        if hasattr(type(transformer), "compute_dtype"):
            transformer.compute_dtype = self.compute_dtype
        if self.parts.packed:
            return self._packed(given, ctx)
        groups = self._groups(ctx, mask, text.shape[1])
        return self._pass(
            given, Pass(video=ctx.layout, groups=groups, per_token=timestep.dim() == 2, division=ctx.division)
        )

    def _packed(self, given: Inputs, ctx: AttnContext) -> Tensor:
        """The velocity of a class whose batch has one timestep and one length of its texts, in as many passes."""
        samples, text = given.text.shape[:2]
        lengths = [text] * samples if given.mask is None else given.mask.sum(1).tolist()
        # sharded blocks are gathered in every pass, so that all ranks need as many: one a sample
        apart = range(samples) if isinstance(next(self.blocks[-1].parameters()), DTensor) else [0] * samples
        kinds = list(zip(given.timestep.tolist(), lengths, apart, strict=True))
        outs, order = [], []
        for kind in dict.fromkeys(kinds):
            rows = [i for i, own in enumerate(kinds) if own == kind]
            own = Inputs(given.x[rows], given.timestep[rows], given.text[rows, : kind[1]], None, None, given.grid)
            topk = ctx.topk if ctx.topk.samples is None else replace(ctx.topk, samples=ctx.topk.samples[:, rows])
            groups = self._groups(replace(ctx, topk=topk), None, kind[1])
            row = groups[0].ctx
            outs.append(self._pass(own, Pass(video=row.layout, groups=groups, per_token=False, division=row.division)))
            order += rows
        return torch.cat(outs)[torch.tensor(order).argsort().to(given.x.device)]

    def _pass(self, given: Inputs, now: Pass) -> Tensor:
        transformer: Any = self.transformer
        self.current.value = now
        try:
            arguments = self.parts.inputs(transformer, given, self.constants)
            output = transformer.forward(**arguments).sample
        finally:
            self.current.value = None
        return self.parts.velocity(output, transformer, given, self.constants)

    def _groups(self, ctx: AttnContext, mask: Tensor | None, text: int) -> tuple[Group, ...]:
        if self.family.text == "none":
            return (Group(None, (ctx.division or ctx.layout).num_tokens, ctx),)
        methods = self.attention_layers
        method = next((method for method in methods if not method.is_dense), methods[0])
        video = ctx.layout.segments[0]

        def row(length: int) -> AttnContext:
            words = Segment((1, 1, length), kind="text")
            segments = (words, video) if self.family.text == "first" else (video, words)
            layout = method.layout(segments, ctx.layout.device)
            return ctx.in_row(layout, ctx.division and self.division_of(layout))

        return joint_groups(ctx, row, mask, text)

    def grid(self, latent_shape: Sequence[int]) -> Grid:
        shape = tuple(latent_shape)
        if len(shape) != 4 or any(n % p or n < p for n, p in zip(shape[1:], self.patch_size, strict=True)):
            raise ValueError(f"latent shape [C, T, H, W] must be multiples of the patch {self.patch_size}, got {shape}")
        t, h, w = (n // p for n, p in zip(shape[1:], self.patch_size, strict=True))
        longest = self.transformer.config.get("rope_max_seq_len")
        if longest is not None and max(t, h, w) > longest:
            raise ValueError(f"token grid {(t, h, w)} exceeds rope_max_seq_len {longest}")
        return t, h, w

    def self_attention(self, layer: int, h: Tensor, ctx: AttnContext) -> Tensor:
        tables = self.parts.rotary(self.transformer, ctx.layout.segments[0].grid_thw, self.constants)
        block: LayerBlock = self.blocks[layer]
        return block.attend_row(h, tables, ctx)

    def reset_parameters(self) -> None:
        """Initialise every parameter: the head zero, other matrices N(0, sqrt(2 / (5 C))) and tables N(0, 1 / sqrt(C)),
        as `init=gpt_neox` of `VideoDiT`, biases zero, norms one."""
        for name, parameter in self.named_parameters():
            if name == self.head or name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                share = 1.0 if name.endswith(self.modulation) else 0.4
                nn.init.normal_(parameter, std=math.sqrt(share / self.dim))
        for method in self.attention_layers:
            method.reset_extra_parameters()

    def to_empty(self, *, device: Any, recurse: bool = True) -> DiffusersNetwork:
        super().to_empty(device=device, recurse=recurse)
        # buffers are no part of weights: their values are those that the class computes
        for name, buffer in self.named_buffers():
            buffer.copy_(self._buffer_values[name])
        return self

    def diffusers_config(self) -> dict[str, Any]:
        config = {name: value for name, value in self.transformer.config.items() if name[0] != "_"}
        # as in its file
        config = {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}
        return {"_class_name": self.family.name, **config}

    def fixed_settings(self) -> dict[str, Any]:
        config = {f"config.{name}": value for name, value in self.diffusers_config().items() if name[0] != "_"}
        return {"class_name": self.family.name, **config}

    def compile_blocks(self, *, backend: str = "inductor") -> None:
        run = compiled_body(LayerBlock.body, backend=backend)
        for block in self.blocks:
            block.run = run

    def rows(self, layer: str, *, num_tokens: int, text_len: int, image_len: int) -> int:
        parts = self.parts
        kinds = {parts.time_layers: 1, parts.text_layers: text_len, parts.image_layers: image_len}
        kinds[parts.joint_layers] = num_tokens + text_len
        return next((rows for names, rows in kinds.items() if any(name in f"{layer}." for name in names)), num_tokens)

    def text_pairs(self, num_tokens: int, text_len: int, image_len: int) -> int:
        if self.family.text == "none":
            return super().text_pairs(num_tokens, text_len, image_len)
        return (2 * num_tokens + text_len) * text_len

    def shallow_copy(self) -> DiffusersNetwork:
        model, transformer = shallow_copy(self), shallow_copy(self.transformer)
        object.__setattr__(model, "transformer", transformer)
        transformer._modules = model._modules
        model.current = CurrentPass()
        return model

    def replace_blocks(self, blocks: Sequence[nn.Module]) -> None:
        rest = list(blocks)
        for stack in self.family.stacks:
            count = len(self._modules[stack])  # type: ignore[arg-type]
            own, rest = rest[:count], rest[count:]
            for block in own:
                block.current = self.current  # type: ignore[assignment]
            self._modules[stack] = nn.ModuleList(own).train(self.training)


def _transformer(class_name: str, config: Mapping[str, Any], device: str = "meta") -> Any:
    """A transformer of the class whose parameters have no values; buffers have theirs on a real device.

    Raises:
        ValueError: a setting that the class does not have, or a value that it does not take.
    """
    cls = getattr(importlib.import_module("diffusers"), class_name)
    own = {name: value for name, value in config.items() if name[0] != "_" and name != SPARSE_FLAG}
    known = inspect.signature(cls.__init__).parameters
    if unknown := sorted(set(own) - set(known)):
        raise ValueError(f"config.{unknown[0]}={own[unknown[0]]}: not a setting of {class_name}")
    with torch.device(device), NothingDrawn():
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()})
