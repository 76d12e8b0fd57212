"""What a method needs to know about one forward pass, as an immutable value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention.layout import TileLayout

Recorder = Callable[[int, dict[str, Tensor]], None]
"""Called as `recorder(layer_idx, tensors)` by methods that expose their internals; see `AttnContext.record`."""


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

    def also_recording(self, more: Mapping[str, Tensor]) -> AttnContext:
        """This context with a recorder that gets `more` (what `attend` does not see) too; itself without a recorder."""
        if (recorder := self.recorder) is None:
            return self
        known = {name: tensor.detach() for name, tensor in more.items()}
        return replace(self, recorder=lambda layer_idx, tensors: recorder(layer_idx, {**tensors, **known}))

    def record(self, layer_idx: int, index: BlockIndex, **tensors: Tensor | None) -> None:
        """Hand a layer's selection and other internals to the recorder, where there is one.

        Args:
            layer_idx: the layer's number.
            index: which kv tiles each query tile attends to token by token, in some of them by a fine mask.
            **tensors: references, not copies, what is None left out. q, k `[B, L, H, D]`; scores `[B, H, Nq, Nkv]`
                logits the tiles were ranked by; fine `[B, L, H, D]` output of the selected tiles; coarse output
                `[B, N, H, D]` per tile or `[B, L, H, D]` per token, or tail `[B, L, H, D]`, the output of all other
                tiles; gate_compress, gate_fine `[B, L, H, D]` factors of coarse and fine.
        """
        if self.recorder is None:
            return
        recorded = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
        names = ("kv_indices", "kv_num_blocks", "kv_num_full_blocks", "mask_ids", "mask_bits")
        lists = {name: x for name in names if (x := getattr(index, name)) is not None}
        self.recorder(layer_idx, recorded | lists)
