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

    def layer(self, index: int) -> AttnContext:
        """The context of one layer, its top-k a scalar: a tuple inside a compiled block recompiles at every layer."""
        topk = self.topk if isinstance(self.topk, int) else self.topk[index]
        return replace(self, topk=topk, layer_idx=index)
