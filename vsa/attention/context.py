"""What a method needs to know about one forward pass, as an immutable value."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from vsa.attention.layout import TileLayout

Recorder = Callable[[int, dict[str, Tensor]], None]
"""Called as `recorder(layer_idx, tensors)` by methods that expose their internals."""


@dataclass(frozen=True, kw_only=True)
class AttnContext:
    """One forward pass seen from an attention layer.

    Args:
        layout: how tokens are grouped into tiles and segments.
        topk: video kv tiles per video query tile: one int, or one per layer before `layer()` is called.
            Clamped per sample to its number of tiles.
        layer_idx: index of the layer, set by `layer()`.
        progress: denoising progress in [0, 1] (0 = pure noise), None in training.
        cache: caller-owned mapping for masks kept between passes; methods hold no run state.
        recorder: receives internals; None in the hot path.
    """

    layout: TileLayout
    topk: int | tuple[int, ...]
    layer_idx: int = 0
    progress: float | None = None
    cache: MutableMapping[Any, Any] | None = None
    recorder: Recorder | None = None

    def kept(self, q: Tensor) -> int:
        """Video kv tiles that each video query tile keeps in this layer.

        Args:
            q: `[B, L, H, D]` queries of the row.

        Raises:
            ValueError: top-k of several layers or below 1, or another number of tokens than the layout's.
        """
        if isinstance(self.topk, tuple):
            raise ValueError(f"a layer needs one top-k, got {self.topk}: take ctx.layer(index)")
        if self.topk < 1:
            raise ValueError(f"topk must be at least 1, got {self.topk}")
        if q.shape[1] != self.layout.num_tokens:
            raise ValueError(f"layout has {self.layout.num_tokens} tokens, q has {q.shape[1]}")
        return self.topk

    def layer(self, index: int) -> AttnContext:
        """The context of one layer, its top-k a scalar: a tuple inside a compiled block recompiles at every layer."""
        topk = self.topk if isinstance(self.topk, int) else self.topk[index]
        return replace(self, topk=topk, layer_idx=index)
