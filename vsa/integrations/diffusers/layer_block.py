"""Blocks of a diffusers transformer as layers of a network: tile order, attention method, recomputation, compile.

B batch, L tokens of a row (video and, in joint models, text), H heads, D head dim, C = H * D model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.layout import TileLayout
from vsa.attention.sequence import Division
from vsa.integrations.diffusers.families.family import Family
from vsa.integrations.diffusers.families.parts import Parts
from vsa.models.compute_dtype import allow_rounding
from vsa.models.network import shallow_copy
from vsa.models.recompute import Level, checkpointed, checkpointed_except_attention


class Group(NamedTuple):
    """Rows of a batch with equally many text tokens.

    Args:
        samples: int64 indices of the rows; None: all.
        tokens: tokens of a row without padding, which is at its end.
        ctx: context of the rows, of one layer in a layer.
    """

    samples: Tensor | None
    tokens: int
    ctx: AttnContext


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of the network.

    Args:
        video: layout of the tokens that a block gets as `Parts.tokens`.
        groups: the rows of the batch, by their number of text tokens.
        per_token: whether every token has its own timestep.
        division: those tokens of this rank, where others share the sample; None: it has all of them.
        ordered: arguments that all blocks share, in tile order, by name.
    """

    video: TileLayout
    groups: tuple[Group, ...]
    per_token: bool
    division: Division | None = None
    ordered: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, value: Any) -> Any:
        """This rank's rows of an argument of a block, in tile order; it is permuted once for all blocks."""
        if name not in self.ordered:
            self.ordered[name] = in_tile_order(value, self.video, self.division)
        return self.ordered[name]


class CurrentPass:
    """The current pass, set by the network and read by its blocks; None outside of a pass."""

    value: Pass | None = None


def in_tile_order(value: Any, layout: TileLayout, division: Division | None = None) -> Any:
    """Tables `[L]` or `[L, D]`, tensors `[B, L, ...]` or tuples of them, in tile order on the device of the layout; of
    a division the rows of this rank."""
    if isinstance(value, tuple):
        return tuple(in_tile_order(part, layout, division) for part in value)
    value = value.to(layout.device)
    rows = layout.permute(value[None] if value.dim() < 3 else value)
    rows = rows if division is None else division.cut(rows)
    return rows[0] if value.dim() < 3 else rows


class LayerAttention:
    """Attention of one layer over rows whose video tokens are in tile order, called by the processor of the family.

    Args:
        method: attention method of the layer.
    """

    def __init__(self, method: AttentionMethod):
        self.method = method
        self.groups: tuple[Group, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """Attention output `[B, L, C]`, zero at padding; arguments as in `TileAttention`."""
        outs, length = [], q.shape[1]
        for samples, tokens, ctx in self.groups:
            rows = (x if samples is None else x.index_select(0, samples) for x in (q, k, v, hidden))
            own_q, own_k, own_v, own_hidden = (x[:, :tokens] for x in rows)
            out = self.method(own_q, own_k, own_v, self.method.project(own_hidden), ctx).flatten(2).type_as(q)
            outs.append(F.pad(out, (0, 0, 0, length - tokens)) if tokens < length else out)
        if len(outs) == 1:
            return outs[0]
        samples = torch.cat([group.samples for group in self.groups if group.samples is not None])
        return torch.cat(outs).index_select(0, samples.argsort())


class LayerBlock(nn.Module):
    """What a network adds to a block of diffusers, whose class it precedes in the order of bases (`as_layer`).

    The first block puts the video tokens into tile order, the last one back into raster order.
    """

    method: AttentionMethod
    attend: LayerAttention
    family: Family
    parts: Parts
    current: CurrentPass
    layer: int
    num_layers: int
    activation_checkpointing: Level = "none"
    run: Callable[..., Any] | None = None
    """The compiled body; None: it runs uncompiled."""

    def replace_method(self, method: AttentionMethod) -> LayerBlock:
        """Replace the attention method and its extra modules; returns the block."""
        # another network may share the module, with its own processor
        attn: Any = shallow_copy(getattr(self, self.family.attention))
        owner = self if self.family.gates_in == "block" else attn
        for name in self.method.extra_modules() if "method" in vars(self) else ():
            del owner._modules[name]
        for name, module in method.extra_modules().items():
            if hasattr(owner, name):
                raise ValueError(f"block {self.layer} already has an attribute {name}")
            owner.register_module(name, module)
        # bypasses nn.Module's registration, since the method's modules are registered under the block's prefix
        object.__setattr__(self, "method", method)
        self.attend = LayerAttention(method)
        attn.processor = self.family.processor(self.attend)  # type: ignore[arg-type] (called alike)
        self._modules[self.family.attention] = attn
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the block; the arguments are those of its class."""
        now = self.current.value
        if now is None:
            raise ValueError(f"layer {self.layer} was called outside of its network's forward")
        call = _signature(type(self)).bind(self, *args, **kwargs)
        given = call.arguments
        for name in (*self.parts.tables, *(self.parts.token_rows if now.per_token else ())):
            if given.get(name) is not None:
                given[name] = now.once(name, given[name])
        if self.layer == 0:
            given[self.parts.tokens] = in_tile_order(given[self.parts.tokens], now.video, now.division)
        groups = tuple(group._replace(ctx=group.ctx.layer(self.layer)) for group in now.groups)
        body = LayerBlock.body
        if self.run is not None and all(self.method.traceable(group.ctx) for group in groups):
            body = self.run
        if self.activation_checkpointing == "full" and torch.is_grad_enabled():
            out = checkpointed(body, self, groups, call.args[1:], call.kwargs)
        else:
            out = body(self, groups, call.args[1:], call.kwargs)
        self.attend.groups = ()
        if self.layer < self.num_layers - 1:
            return out
        video, *others = out if isinstance(out, tuple) else (out,)
        video = now.video.unpermute(video if now.division is None else now.division.gather(video))
        return (video, *others) if others else video

    def body(self, groups: tuple[Group, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The computation of the block, which `Network.compile_blocks` compiles."""
        self.attend.groups = groups
        # the parts of a block are those of its class: both middle levels recompute all but the attention operators
        if self.activation_checkpointing in ("attention", "attention_mlp") and torch.is_grad_enabled():
            return checkpointed_except_attention(
                lambda args, kwargs: self._computed(groups, args, kwargs), args, kwargs
            )
        return self._computed(groups, args, kwargs)

    def _computed(self, groups: tuple[Group, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            # also when the backward pass computes the block again; a graph holds that, and cannot set it there
            self.attend.groups = groups
        return super().forward(*args, **kwargs)

    def attend_row(self, h: Tensor, tables: Any, ctx: AttnContext) -> Tensor:
        """Self-attention output `[1, L, C]` of a row of video alone, see `Network.self_attention`."""
        self.attend.groups = (Group(None, h.shape[1], ctx),)
        apart = self.family.text != "none" and not self.parts.packed
        texts = {"encoder_hidden_states": h[:, :0]} if apart else {}
        named = {self.parts.attention_rotary: in_tile_order(tables, ctx.layout)} if tables is not None else {}
        out = getattr(self, self.family.attention)(h, **texts, **named)
        self.attend.groups = ()
        return out[0] if isinstance(out, tuple) else out


def as_layer(
    block: Any, method: AttentionMethod, *, family: Family, parts: Parts, current: CurrentPass, layer: int, layers: int
) -> None:
    """Make a block a layer of a network, in place; its parameters keep their names.

    Args:
        block: block of a transformer of the family.
        method: its attention method.
        family: see `Family`.
        parts: see `Parts`.
        current: the pass that all blocks of the network share.
        layer: index of the block.
        layers: number of all blocks.
    """
    for module in block.modules():
        allow_rounding(module)
    block.__class__ = _layer_class(type(block))
    block.family, block.parts, block.current, block.layer, block.num_layers = family, parts, current, layer, layers
    block.replace_method(method)


@cache
def _layer_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (LayerBlock, cls), {"__module__": cls.__module__})


@cache
def _signature(cls: type[nn.Module]) -> inspect.Signature:
    """Signature of the forward that follows that of `LayerBlock`."""
    bases = cls.__mro__
    following = bases[bases.index(LayerBlock) + 1 :]
    return inspect.signature(next(base for base in following if "forward" in vars(base)).forward)


def joint_groups(
    ctx: AttnContext, row_of: Callable[[int], AttnContext], mask: Tensor | None, text: int
) -> tuple[Group, ...]:
    """The rows of a batch of video and text, by the number of their text tokens.

    Args:
        ctx: context of the video alone.
        row_of: function from a number of text tokens to the context of a row with as many.
        mask: bool `[B, S]`, True where a text token is real; None: all are.
        text: S.
    """
    video = (ctx.division or ctx.layout).num_tokens

    def group(samples: Tensor | None, length: int) -> Group:
        topk = ctx.topk
        if samples is not None and topk.samples is not None:
            topk = replace(topk, samples=topk.samples[:, samples])
        own = replace(row_of(length), topk=topk)
        return Group(samples, video + length, own)

    lengths = [text] if mask is None else mask.sum(1).tolist()
    if len(set(lengths)) == 1:
        return (group(None, lengths[0]),)
    rows = {n: [i for i, own in enumerate(lengths) if own == n] for n in sorted(set(lengths))}
    return tuple(group(torch.tensor(own, device=ctx.layout.device), n) for n, own in rows.items())
