"""Tile attention of one layer over rows in a model's own token order.

B batch, L tokens of a row (video and, in joint models, text), H heads, D head dim, C = H * D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPass
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment

Grid = tuple[int, int, int]
TextSide = Literal["none", "first", "last"]
Texts = tuple[tuple[int, ...], ...]
"""For each sample of a batch, the lengths of its text and condition segments, in their order in the row."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass of the transformer.

    Args:
        grid_thw: video tokens along time, height, width.
        texts: text and condition segments of each sample, other tokens beside the video are padding; None: one segment
            without padding.
        denoising: step and progress of the pass, where the number of tiles needs them.
    """

    grid_thw: Grid
    texts: Texts | None = None
    denoising: DenoisingPass = field(default_factory=DenoisingPass)


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
        kept_on: tiles that the layers keep on a grid of N tiles; ValueError for a grid with too few.
        current: holder of the current pass.
        text: side of a row on which the text is.
    """

    def __init__(
        self,
        method: AttentionMethod,
        layer: int,
        kept_on: Callable[[int], KeptTiles],
        current: CurrentPass,
        text: TextSide,
    ):
        self.method, self.layer, self.kept_on, self.current, self.text = method, layer, kept_on, current, text

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
        texts = now.texts or ((text,),) * batch
        lengths = [sum(segments) for segments in texts]
        fits = text == 0 if self.text == "none" else 0 <= max(lengths) <= text
        if not fits or len(texts) != batch:
            raise ValueError(f"{batch} rows of {length} tokens do not fit a grid of {now.grid_thw}, texts {lengths}")
        # samples with equally long texts share one layout
        outs, order = [], []
        for segments in sorted(set(texts)):
            rows = [i for i, own in enumerate(texts) if own == segments]
            # padding is at the end of the text, and padded text is at the end of the row
            stop = length - text + sum(segments)
            part = (x[:, :stop] if len(rows) == batch else x[rows, :stop] for x in (q, k, v, hidden))
            out = self._attend(Row(*part), segments, now)
            outs.append(F.pad(out, (0, 0, 0, length - stop)))
            order += rows
        if len(outs) == 1:
            return outs[0]
        return torch.cat(outs)[torch.tensor(order).argsort().to(q.device)]

    def _attend(self, row: Row, texts: tuple[int, ...], now: Pass) -> Tensor:
        layout = self.method.layout(self._segments(now.grid_thw, texts), row.q.device)
        try:
            topk = self.kept_on(layout.num_video_tiles).at(now.denoising.progress, now.denoising.step)
        except ValueError as error:
            raise ValueError(f"grid {now.grid_thw}: {error}") from None
        ctx = AttnContext(layout=layout, topk=topk, denoising=now.denoising).layer(self.layer)
        q, k, v = (layout.permute(x) for x in row[:3])
        extra = {name: layout.permute(x) for name, x in self.method.project(row.hidden).items()}
        out = self.method(q, k, v, extra, ctx)
        return layout.unpermute(out).flatten(2).type_as(q)

    def _segments(self, grid_thw: Grid, texts: tuple[int, ...]) -> Sequence[Segment]:
        video, words = Segment(grid_thw), [Segment((1, 1, length), kind="text") for length in texts if length]
        return (*words, video) if self.text == "first" else (video, *words)
