"""Tile attention of one layer over rows in a model's own token order.

B batch, L tokens of a row (video and, in joint models, text), H heads, D head dim, C = H * D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPass, DenoisingPlan
from vsa.attention.layout import Segment
from vsa.attention.sparsity import resolve_topk

Grid = tuple[int, int, int]
TextSide = Literal["none", "first", "last"]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass of the transformer.

    Args:
        grid_thw: video tokens along time, height, width.
        text_lengths: number of real text tokens of each sample, the others are padding; None without padding.
        denoising: step and progress of the pass, where a budget needs them.
    """

    grid_thw: Grid
    text_lengths: tuple[int, ...] | None = None
    denoising: DenoisingPass = field(default_factory=DenoisingPass)


class Budget(Protocol):
    """Number of video tiles that a query tile keeps.

    Attributes:
        denoising: dense steps and layers, and reuse of selections.
        reads_timestep: whether passes differ by their timestep; reading it waits for the device.
    """

    @property
    def denoising(self) -> DenoisingPlan: ...

    @property
    def reads_timestep(self) -> bool: ...

    def layer_topk(self, layer: int, num_tiles: int, now: Pass) -> int:
        """Number of tiles that a layer keeps of the `num_tiles` of a pass; ValueError for a grid with too few."""
        ...


@dataclass(frozen=True, kw_only=True)
class FixedBudget:
    """A fixed number or share of tiles, with the exceptions of a denoising plan.

    Args:
        topk: tiles by layer; None with `sparsity`.
        sparsity: share of tiles skipped, in [0, 1).
        denoising: the plan.
    """

    topk: tuple[int, ...] | None
    sparsity: float | str | None
    denoising: DenoisingPlan = field(default_factory=DenoisingPlan)

    @property
    def reads_timestep(self) -> bool:
        return self.denoising.follows_steps

    def layer_topk(self, layer: int, num_tiles: int, now: Pass) -> int:
        """Number of tiles that a layer keeps."""
        plan, moment = self.denoising, now.denoising
        if layer in plan.dense_layers or moment.dense:
            return num_tiles
        other = plan.budget_at(moment.step, moment.progress)
        topk, sparsity = (None if self.topk is None else self.topk[layer], self.sparsity) if other is None else other
        if topk is not None:
            # a grid of a single tile, as with dense methods, has nothing to select
            if topk > num_tiles > 1:
                raise ValueError(f"topk {topk} of layer {layer} is above the {num_tiles} tiles of grid {now.grid_thw}")
            return min(topk, num_tiles)
        assert sparsity is not None
        if (1 - Fraction(str(sparsity))) * num_tiles < 1:
            raise ValueError(
                f"sparsity {sparsity} keeps less than one of the {num_tiles} tiles of grid {now.grid_thw}, "
                f"at most {1 - 1 / num_tiles:.4g} is possible"
            )
        return resolve_topk(sparsity, num_tiles, plan.rounding)


class Row(NamedTuple):
    """q, k, v `[B, L, H, D]` and the hidden states `[B, L, C]` from which they were projected."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor


class CurrentPass:
    """The current pass, set by a hook of the transformer and read by its processors; empty before the first pass."""

    def __init__(self) -> None:
        self.value: Pass | None = None


class TileAttention:
    """Attention of one layer over rows in the model's own token order.

    Args:
        method: attention method of this layer.
        layer: position of the layer in the model.
        budget: budget of the model.
        current: holder of the current pass.
        text: side of a row on which the text is.
    """

    def __init__(self, method: AttentionMethod, layer: int, budget: Budget, current: CurrentPass, text: TextSide):
        self.method, self.layer, self.budget, self.current, self.text = method, layer, budget, current, text

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """Attention output `[B, L, C]`; zero at padding text tokens, which no token attends to.

        Args:
            q, k, v: `[B, L, H, D]`, qk-norm and RoPE applied.
            hidden: `[B, L, C]` hidden states from which q, k and v were projected, for a method's gates.
        """
        now = self.current.value
        if now is None:
            raise ValueError("attention was called outside of the transformer's forward: call the transformer instead")
        batch, length = q.shape[:2]
        text = length - math.prod(now.grid_thw)
        lengths = now.text_lengths or (text,) * batch
        fits = text == 0 if self.text == "none" else 0 <= max(lengths) <= text
        if not fits or len(lengths) != batch:
            raise ValueError(f"{batch} rows of {length} tokens do not fit a grid of {now.grid_thw}, texts {lengths}")
        # samples with equally long texts share one layout
        outs, order = [], []
        for text_length in sorted(set(lengths)):
            rows = [i for i, n in enumerate(lengths) if n == text_length]
            # padding is at the end of the text, and padded text is at the end of the row
            stop = length - text + text_length
            part = (x[:, :stop] if len(rows) == batch else x[rows, :stop] for x in (q, k, v, hidden))
            out = self._attend(Row(*part), text_length, now)
            outs.append(F.pad(out, (0, 0, 0, text - text_length)))
            order += rows
        if len(outs) == 1:
            return outs[0]
        return torch.cat(outs)[torch.tensor(order).argsort().to(q.device)]

    def _attend(self, row: Row, text: int, now: Pass) -> Tensor:
        layout = self.method.layout(self._segments(now.grid_thw, text), row.q.device)
        topk = self.budget.layer_topk(self.layer, layout.num_video_tiles, now)
        ctx = AttnContext(layout=layout, topk=topk, denoising=now.denoising).layer(self.layer)
        q, k, v = (layout.permute(x) for x in row[:3])
        extra = {name: layout.permute(x) for name, x in self.method.project(row.hidden).items()}
        out = self.method(q, k, v, extra, ctx)
        return layout.unpermute(out).flatten(2).type_as(q)

    def _segments(self, grid_thw: Grid, text: int) -> Sequence[Segment]:
        video = Segment(grid_thw)
        if text == 0:
            return (video,)
        words = Segment((1, 1, text), kind="text")
        return (words, video) if self.text == "first" else (video, words)
