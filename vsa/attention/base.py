"""Base class of the attention methods.

B batch, L tokens (tile-major), H heads, D head dim, C = H * D model width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vsa_kernels.modes import autocasts, lowered

from vsa.attention.context import AttnContext
from vsa.attention.dense import dense_attn_per_sample
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.sequence import Division
from vsa.attention.tiling import Grid
from vsa.settings import arguments_of


def without_autocast(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a method that `torch.autocast` does not reach: it computes in the dtype of its q, k and v.

    Gates get this dtype. Where those of q, k and v differ, as after a norm in fp32, all get autocast's dtype.
    """

    @wraps(step)
    def call(self: AttentionMethod, *args: Any, **named: Any) -> Any:
        first = args[0] if isinstance(args[0], Tensor) else next(iter(args[0].values()))
        if not autocasts(first.device):
            return step(self, *args, **named)
        if first is args[0] and not first.dtype == args[1].dtype == args[2].dtype:
            first, *_ = args = (*lowered(*args[:3]), *args[3:])
        gates = [{n: x.to(first.dtype) for n, x in a.items()} if isinstance(a, dict) else a for a in args[1:]]
        with torch.autocast(first.device.type, enabled=False):
            return step(self, args[0], *gates, **named)

    return call


class AttentionMethod(nn.Module):
    """Self-attention of one layer, between the qk-norm and the output projection.

    A method has three parts: `project` computes per-token tensors, `attend` handles the whole sequence, `combine`
    computes the output. Where several ranks share a sample, tensors travel between them: `attend` then gets some of the
    heads, and the other two the tokens of a rank.

    A method's own parameters live in `extra_modules()`; the block registers these under their names
    (`blocks.N.to_gate_compress`), so a dense checkpoint's keys stay a subset of a sparse one's.

    Args:
        dim: model width C.
        num_heads: H.
        head_dim: D.
        layer_idx: position of the layer in the model.
    """

    is_dense = False
    """Whether every token attends to its whole sample, in any order of the tokens."""

    selects = False
    """Whether query tiles select kv tiles by a top-k."""

    predicts = False
    """Whether another rule than a top-k selects kv tiles from q and k; `AttnContext.select` can reuse the selection."""

    expected_share: float = 1.0
    """Share of the kv tiles that a rule without a fixed count is expected to keep."""

    @property
    def measured(self) -> bool:
        """Whether q and k decide how many tiles are kept, so that the pairs of a pass are known after it."""
        return self.predicts

    training_free: str | None = None
    """Name of a method whose mask is a constant to the gradient; it takes gradients with `allow_training` only."""

    allow_training = True

    takes_text = True
    """Whether a row may hold text and cond tokens beside its video."""

    takes_query_parts = False
    """Whether `attend` takes the queries of a part, with all keys, see `vsa.attention.sequence.part_of`."""

    needs_all_heads: str | None = None
    """Setting with which the heads cannot be computed apart, on several ranks."""

    operator = "coarse_fine_attn"
    """Operator of vsa_kernels whose results estimates charge to a layer that selects tiles."""

    def __init__(self, *, dim: int, num_heads: int, head_dim: int, layer_idx: int = 0):
        super().__init__()
        self.dim, self.num_heads, self.head_dim, self.layer_idx = dim, num_heads, head_dim, layer_idx

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in {"attend", "combine", "attend_combine", "attend_dense", "dense_parts"} & vars(cls).keys():
            setattr(cls, name, without_autocast(vars(cls)[name]))

    def traceable(self, ctx: AttnContext) -> bool:
        """Whether a compiled block can run the method in this context."""
        # recorders and stored selections are Python callables and mappings, which would break the compiled graph
        selects = self.selects or self.predicts
        return ctx.recorder is None and not (ctx.keeps_selection and selects and not ctx.dense)

    def settings(self) -> dict[str, Any]:
        """Constructor settings as JSON values, those of `described_settings`; they rebuild the method."""
        return json.loads(json.dumps({name: self.setting(name) for name in described_settings(type(self))}))

    def setting(self, name: str) -> Any:
        """One of the settings."""
        return getattr(self, name)

    @classmethod
    def refuse_grid(cls, grid: Grid, settings: Mapping[str, Any]) -> None:
        """Raise ValueError when a method with these settings cannot run on a token grid."""

    def extra_modules(self) -> dict[str, nn.Module]:
        """Modules with the method's parameters, by the names under which the block registers them."""
        return {}

    def reset_extra_parameters(self) -> None:
        """Initialise the extra modules as documented, after the model has initialised every linear layer."""

    def check_model(self, num_layers: int) -> None:
        """Raise ValueError where the settings are for another model; called when a model is built."""

    def refuse_training(self, key: str = "attention") -> None:
        """Raise ValueError where gradients may not flow through the method.

        Args:
            key: setting that chose the method, for the message.
        """
        if not self.allow_training:
            raise ValueError(
                f"{key}={self.training_free} is training-free: its mask is a constant to the gradient; "
                f"set {key}.allow_training=true to train with it"
            )

    def refuse_division(self, ranks: int) -> None:
        """Raise ValueError where `ranks` ranks cannot share a sample: `attend` needs all heads or queries at once."""
        if self.needs_all_heads is not None:
            raise ValueError(f"task.parallel.sequence={ranks}: {self.needs_all_heads} needs all heads on one rank")
        if self.num_heads % ranks and not self.takes_query_parts:
            raise ValueError(
                f"task.parallel.sequence={ranks} does not divide the {self.num_heads} heads, and "
                f"{type(self).__name__} needs all queries of a head on one rank"
            )

    def rows_of(self, part: str) -> Grid | None:
        """Size of the query tiles that a part of `attend` has one row for; None: one row per token."""
        return None

    def trains(self, *tensors: Tensor) -> bool:
        """Whether gradients flow through a call with these tensors; ValueError where they may not."""
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if needs_grad:
            self.refuse_training()
        return needs_grad

    def extra_repr(self) -> str:
        # a method need not keep a setting under its name
        shown = (name for name in own_settings(type(self)) if hasattr(self, name))
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    def tiling(self) -> Mapping[str, Any]:
        """The arguments of `TileLayout.build` that this method determines; by default raster order without tiles."""
        return {"tile_thw": None}

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        """The token order and tiles of this method for a row of segments."""
        layout = TileLayout.build(segments, **self.tiling(), device=device)
        # of one video, whose tensors hold data
        if len(layout.segments) == 1 and layout.device.type != "meta":
            self.prepare(layout)
        return layout

    def prepare(self, layout: TileLayout) -> None:
        """Compute what `attend` derives from the layout of one video, which a compiled block cannot do."""

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """Per-token tensors from the block's normalised, modulated hidden states x `[B, L, C]`."""
        return {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        """Output `[B, L, H, D]` of the layer, for callers outside of the method.

        In a dense layer of a denoising (`AttnContext.dense`) a method that selects keeps all tiles and its gates; any
        other method is replaced by `attend_dense`.
        """
        dense = ctx.dense and not self.selects
        if ctx.division is not None:
            return self._divided(q, k, v, extra, ctx, ctx.division, self.dense_parts if dense else self.attend)
        if dense:
            return self.attend_dense(q, k, v, extra, ctx)
        return self.attend_combine(q, k, v, extra, ctx)

    def _divided(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extra: dict[str, Tensor],
        ctx: AttnContext,
        division: Division,
        attend: Callable[..., dict[str, Tensor]],
    ) -> Tensor:
        """Output `[B, l, H, D]` of this rank's tokens, from other ranks' keys and values too; gates do not travel."""
        heads = division.to_heads(q, keys=False), division.to_heads(k, keys=True), division.to_heads(v, keys=True)
        parts = attend(*heads, replace(ctx, division=None, across=division, layout=division.queries))
        parts = {name: division.to_tokens(part, self.rows_of(name)) for name, part in parts.items()}
        return self.combine(parts, extra, replace(ctx, layout=division.local))

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        """Output of a dense layer for a method that selects nothing, by default without its gates."""
        return self.combine(self.dense_parts(q, k, v, ctx), extra, ctx)

    @without_autocast
    def dense_parts(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """Parts of the output of a dense layer: dense attention inside each sample."""
        ctx.count_all(q)
        return {"out": dense_attn_per_sample(q, k, v, ctx.layout)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """Parts of the output from q, k, v `[B, L, H, D]` (RoPE and qk-norm applied)."""
        raise NotImplementedError

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        """Output `[B, L, H, D]` from the parts of `attend` and the tensors of `project`; by default the part `out`."""
        return parts["out"]

    def attend_combine(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        """`combine(attend(...))`; a method may override it with a fused op that equals the split path."""
        return self.combine(self.attend(q, k, v, ctx), extra, ctx)

    def sees(self, tokens: Tensor, layout: TileLayout) -> Tensor | None:
        """Keys that query tokens (int64 `[n]`, in the layout's order) attend to, bool `[n, L]`, for a method without
        lists of tiles; None: the recorded index has them."""
        return None

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Executed query-key pairs of one row and one head (FLOPs = 4 * D * pairs forward).

        Args:
            layout: layout of the method.
            topk: video kv tiles per query tile, a mean where it varies; for another rule the number that it is expected
                to keep.
        """
        raise NotImplementedError

    def expected_pairs(self, layout: TileLayout, topk: float | None = None) -> float:
        """`pairs` with `topk` tiles (None: all), or with the `expected_share` of them where there is no top-k, or where
        q and k decide and the share is larger."""
        tiles, share = layout.num_video_tiles, layout.num_video_tiles * self.expected_share
        if not self.selects:
            return self.pairs(layout, share)
        topk = tiles if topk is None else topk
        return self.pairs(layout, max(topk, share) if self.measured else topk)


def own_settings(method: type[AttentionMethod]) -> tuple[str, ...]:
    """Names of a method's own constructor arguments, without those of a layer and the backend."""
    shared = {*arguments_of(AttentionMethod), "backend"}
    return tuple(name for name in arguments_of(method) if name not in shared)


def described_settings(method: type[AttentionMethod]) -> tuple[str, ...]:
    """Names of the settings that describe a trained method: how its gates began is none."""
    return tuple(name for name in own_settings(method) if name != "gate_init")
