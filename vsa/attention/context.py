"""What a method needs to know about one forward pass, as an immutable value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention.denoising import DenoisingPass, Half
from vsa.attention.layout import TileLayout
from vsa.attention.selection import SampleTopk

Recorder = Callable[[int, dict[str, Tensor]], None]
"""Called as `recorder(layer_idx, tensors)` by methods that expose their internals; see `AttnContext.record`."""

INDEX = ("kv_indices", "kv_num_blocks", "kv_num_full_blocks", "mask_ids", "mask_bits")
"""Recorded tensors that are the layer's `BlockIndex`, of those that it has."""


def recorded_index(tensors: Mapping[str, Tensor]) -> BlockIndex:
    """The index that a layer recorded, with its fine masks if it has any."""
    return BlockIndex(
        kv_indices=tensors["kv_indices"],
        kv_num_blocks=tensors["kv_num_blocks"],
        kv_num_full_blocks=tensors.get("kv_num_full_blocks"),
        mask_ids=tensors.get("mask_ids"),
        mask_bits=tensors.get("mask_bits"),
    )


@dataclass(frozen=True, kw_only=True)
class AttnContext:
    """One forward pass seen from an attention layer.

    Args:
        layout: how tokens are grouped into tiles and segments.
        topk: video kv tiles per video query tile: one int, or one per layer before `layer()` is called.
            Clamped per sample to its number of tiles. With `sample_topk` the most that any sample keeps.
        layer_idx: index of the layer, set by `layer()`.
        sample_topk: int32 `[B]` where samples of a batch keep different numbers (`[layers, B]` before `layer()`).
        denoising: which pass of a denoising it is, with the selections kept so far; None in training. Methods hold
            no run state.
        dense: the layer is dense in this pass, set by `layer()`: `topk` is all tiles, and a method that selects none
            runs dense attention.
        selection: what an earlier pass selected and this one reuses, set by `layer()`.
        recorder: receives internals; None in the hot path.
    """

    layout: TileLayout
    topk: int | tuple[int, ...]
    layer_idx: int = 0
    sample_topk: Tensor | None = None
    denoising: DenoisingPass | None = None
    dense: bool = False
    selection: BlockIndex | None = None
    recorder: Recorder | None = None

    def kept(self, q: Tensor) -> int:
        """Video kv tiles that each video query tile keeps in this layer; the most of any sample where they differ.

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
        now, sample_topk = self.denoising, None if self.sample_topk is None else self.sample_topk[index]
        if now is None:
            return replace(self, topk=topk, layer_idx=index, sample_topk=sample_topk)
        dense = now.dense or index in now.dense_layers
        topk = self.layout.num_video_tiles if dense else topk
        ctx = replace(self, topk=topk, layer_idx=index, sample_topk=sample_topk, dense=dense)
        if now.cache is None or now.refresh or dense:
            return ctx
        # read out here: a mapping would break the graph of a compiled block
        kept_topk, selection = now.cache.get(ctx._place, (None, None))
        return replace(ctx, selection=selection if kept_topk == topk else None)

    @property
    def keeps_selection(self) -> bool:
        """Whether the selection of this pass goes into the cache of its denoising."""
        return self.denoising is not None and self.denoising.cache is not None and self.selection is None

    @property
    def ranks(self) -> bool:
        """Whether scores of the tiles are looked at: to select, or by the recorder."""
        return self.selection is None or self.recorder is not None

    @property
    def plain_topk(self) -> bool:
        """Whether the selection is nothing but the best `topk` tiles of every row, kept nowhere."""
        shared = self.denoising is not None and self.denoising.leaders is not None
        return self.sample_topk is None and self.selection is None and not self.keeps_selection and not shared

    def select(self, choose: Callable[[int | SampleTopk], BlockIndex]) -> BlockIndex:
        """The selection of this layer: the kept one where this pass reuses it, else what `choose` makes of the top-k.

        Every method that selects does it here, so that selections are kept, reused and shared in one way.
        """
        if self.selection is not None:
            return self.selection
        assert isinstance(self.topk, int)
        topk = self.topk if self.sample_topk is None else SampleTopk(self.sample_topk, self.topk)
        index = choose(topk)
        if self.denoising is not None and self.denoising.leaders is not None:
            index = _follow(index, self.denoising.leaders)
        if self.denoising is not None and self.denoising.cache is not None:
            self.denoising.cache[self._place] = (self.topk, index)
        return index

    @property
    def _place(self) -> tuple[Any, ...]:
        assert self.denoising is not None
        # texts of another length have other tiles
        return self.denoising.owner, self.layer_idx, self.layout.segments

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
                tiles; gate_compress, gate_fine `[B, L, H, D]` factors of coarse and fine; kept_density, merged_density
                `[B, H]` shares of pairs before and after groups of query tiles are merged; skipped `[B, H, Nq]`, how
                often a second stage skipped.
        """
        if self.recorder is None:
            return
        recorded = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
        lists = {name: x for name in INDEX if (x := getattr(index, name)) is not None}
        self.recorder(layer_idx, recorded | lists)


def _follow(index: BlockIndex, leaders: Half) -> BlockIndex:
    """The lists of one half of the batch, for both halves."""
    if index.kv_indices.shape[0] == 1:
        return index
    halves = {name: getattr(index, name).chunk(2)[leaders == "second"] for name in ("kv_indices", "kv_num_blocks")}
    return replace(index, **{name: torch.cat((half, half)) for name, half in halves.items()})
