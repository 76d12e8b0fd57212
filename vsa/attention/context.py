"""The context of one forward pass for attention methods, an immutable value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention.denoising import DenoisingPass, Half
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.attention.sequence import Division
from vsa.attention.stats import listed_pairs

Recorder = Callable[[int, dict[str, Tensor]], None]
"""Called as `recorder(layer_idx, tensors)` by methods that expose their internals; see `AttnContext.record`."""

INDEX = ("kv_indices", "kv_num_blocks", "kv_num_full_blocks", "mask_ids", "mask_bits")
"""Names of the recorded tensors that make up the layer's `BlockIndex`."""


def recorded_index(tensors: Mapping[str, Tensor]) -> BlockIndex:
    """The `BlockIndex` among the tensors that a layer recorded, with its fine masks if there are any."""
    return BlockIndex(
        kv_indices=tensors["kv_indices"],
        kv_num_blocks=tensors["kv_num_blocks"],
        kv_num_full_blocks=tensors.get("kv_num_full_blocks"),
        mask_ids=tensors.get("mask_ids"),
        mask_bits=tensors.get("mask_bits"),
    )


def of_video(tensors: Mapping[str, Tensor], layout: TileLayout) -> dict[str, Tensor]:
    """What a layer recorded in a row of one video and texts, as from a row of the video alone.

    Lists, scores and tokens are those of the video; every token attends to the texts as well.
    """
    ((start, stop),) = layout.video_spans
    offsets = layout.kv_blocks.offsets.tolist()
    first, last = offsets.index(start), offsets.index(stop)

    def part(name: str, x: Tensor) -> Tensor:
        if name == "scores":
            return x[..., first:last] if x.shape[-1] == layout.kv_blocks.num else x
        # others by head are of the video's tiles
        return layout.take_video(x) if x.dim() == 4 and x.shape[1] == layout.num_tokens else x

    own = {name: part(name, x) for name, x in tensors.items() if name not in INDEX}
    if "kv_indices" in tensors:
        lists = tensors["kv_indices"]
        place = torch.arange(lists.shape[-1], device=lists.device)
        kept = (place < tensors["kv_num_blocks"][..., None]) & (lists >= first) & (lists < last)
        order = (~kept).byte().argsort(dim=-1, stable=True)
        own["kv_indices"] = (lists - first).clamp(0, last - first - 1).gather(-1, order)
        own["kv_num_blocks"] = kept.sum(-1, dtype=torch.int32)
        if "mask_bits" in tensors:
            whole = place < tensors["kv_num_full_blocks"][..., None]
            own["kv_num_full_blocks"] = (kept & whole).sum(-1, dtype=torch.int32)
            own |= {"mask_ids": tensors["mask_ids"].gather(-1, order), "mask_bits": tensors["mask_bits"]}
    return own


@dataclass(frozen=True, kw_only=True)
class AttnContext:
    """Layout, top-k and denoising state of one forward pass for an attention layer.

    Args:
        layout: division of the tokens into segments and tiles.
        topk: video kv tiles per video query tile, of one layer after `layer()`. Clamped to the number of tiles of each
            sample.
        layer_idx: index of the layer, set by `layer()`.
        denoising: step, progress and cached selections of a denoising pass; None in training. Methods themselves hold
            no run state.
        dense: whether the layer is dense in this pass, set by `layer()`: `topk` is all tiles then, and a method that
            selects nothing runs dense attention.
        selection: the selection of an earlier pass that this one reuses, set by `layer()`.
        recorder: recorder of the layers' internals; None in the hot path.
        slots: list to which `layer()` adds the int64 scalar of each layer of each row; None: pairs are not counted.
        listed: the scalar of one layer, set by `layer()`, for the pairs of its lists, see `count`; -1 until then.
        division: the tokens of this rank, where others share the sample; None: it has all of them.
        across: the same in `attend`, which has some of the heads or queries, for budgets that other ranks share.
    """

    layout: TileLayout
    topk: KeptTiles
    layer_idx: int = 0
    denoising: DenoisingPass | None = None
    dense: bool = False
    selection: BlockIndex | None = None
    recorder: Recorder | None = None
    slots: list[Tensor] | None = None
    listed: Tensor | None = None
    division: Division | None = None
    across: Division | None = None

    def cut(self, x: Tensor) -> Tensor:
        """The tokens of this rank of x `[B, L, ...]`, which are in the layout's order."""
        return x if self.division is None else self.division.cut(x)

    def gather(self, x: Tensor) -> Tensor:
        """All tokens `[B, L, ...]` of the tokens of this rank."""
        return x if self.division is None else self.division.gather(x)

    def kept(self, q: Tensor) -> int:
        """Video kv tiles that each video query tile keeps in this layer; the largest over samples where they differ.

        Args:
            q: `[B, L, H, D]` queries of the row, of a part those in its span.
        """
        if len(self.topk.layers) != 1:
            raise ValueError(f"expected the top-k of one layer, got {self.topk}: use ctx.layer(index)")
        if self.topk.count < 1:
            raise ValueError(f"topk must be at least 1, got {self.topk}")
        if q.shape[1] != self.layout.num_queries:
            raise ValueError(f"q must have the {self.layout.num_queries} tokens of the layout, got {q.shape[1]}")
        return self.topk.count

    def layer(self, index: int) -> AttnContext:
        """The context of one layer: the top-k of all layers in a compiled block would recompile at every layer."""
        topk, now, listed = self.topk.layer(index), self.denoising, None
        if self.slots is not None:
            listed = torch.full((), -1, dtype=torch.int64, device=self.layout.device)
            self.slots.append(listed)
        if now is None:
            return replace(self, topk=topk, layer_idx=index, slots=None, listed=listed)
        dense = now.dense or index in now.dense_layers
        topk = KeptTiles((self.layout.num_video_tiles,)) if dense else topk
        ctx = replace(self, topk=topk, layer_idx=index, dense=dense, slots=None, listed=listed)
        if now.cache is None or now.refresh or dense:
            return ctx
        # read here, because a mapping would break the graph of a compiled block
        kept_topk, selection = now.cache.get(ctx._place, (None, None))
        return replace(ctx, selection=selection if kept_topk == topk.count else None)

    @property
    def keeps_selection(self) -> bool:
        """Whether the selection of this pass is cached for later passes of its denoising."""
        return self.denoising is not None and self.denoising.cache is not None and self.selection is None

    @property
    def ranks(self) -> bool:
        """Whether tile scores are needed, for the selection or for the recorder."""
        return self.selection is None or self.recorder is not None

    @property
    def plain_topk(self) -> bool:
        """Whether the selection is a plain top-k that is neither cached nor reused."""
        shared = self.denoising is not None and self.denoising.leaders is not None
        return self.topk.samples is None and self.selection is None and not self.keeps_selection and not shared

    def select(self, choose: Callable[[KeptTiles], BlockIndex]) -> BlockIndex:
        """The selection of this layer: the cached one where this pass reuses it, else `choose(topk)`.

        Every method selects through this function, so that selections are cached, reused and shared in one way.
        """
        if self.selection is not None:
            self.count(self.selection)
            return self.selection
        index = choose(self.topk)
        if self.denoising is not None and self.denoising.leaders is not None:
            index = _follow(index, self.denoising.leaders)
        self.count(index)
        if self.denoising is not None and self.denoising.cache is not None:
            self.denoising.cache[self._place] = (self.topk.count, index)
        return index

    def count(self, index: BlockIndex) -> None:
        """Write the number of pairs of video tokens in a layer's lists `[B, H, Nq, Kmax]` to `listed`, if the pass
        counts them; no sum, because the backward pass may compute a layer again. `Network.text_pairs` has the others.
        """
        if self.listed is not None:
            pairs = listed_pairs(index, self.layout.video_blocks, self.layout.kv_blocks)
            rows = math.prod(index.kv_num_blocks.shape[:2])
            self.listed.copy_(pairs - rows * self._video_pairs(self.layout.text_tokens))

    def count_all(self, q: Tensor) -> None:
        """Report, as `count`, a layer whose queries q `[B, L, H, D]` attend to all of the video of their sample."""
        if self.listed is not None:
            texts = self.layout.text_tokens
            keys = [stop - start - n for (start, stop), n in zip(self.layout.sample_spans, texts, strict=True)]
            self.listed.fill_(q.shape[0] * q.shape[2] * self._video_pairs(keys))

    def _video_pairs(self, keys: Sequence[int]) -> int:
        """Pairs of the video queries with a number of keys of each sample."""
        spans, texts = self.layout.sample_spans, self.layout.text_tokens
        if len(spans) == 1:
            # a part has some of the queries
            return sum(stop - start for start, stop in self.layout.video_spans) * keys[0]
        return sum((stop - start - n) * k for (start, stop), n, k in zip(spans, texts, keys, strict=True))

    @property
    def _place(self) -> tuple[Any, ...]:
        assert self.denoising is not None
        # texts of another length have different tiles
        return self.denoising.owner, self.layer_idx, self.layout.segments

    def also_recording(self, more: Mapping[str, Tensor]) -> AttnContext:
        """This context with a recorder that also receives `more` (tensors that `attend` does not have)."""
        if (recorder := self.recorder) is None:
            return self
        extra_tensors = {name: tensor.detach() for name, tensor in more.items()}
        return replace(self, recorder=lambda layer_idx, tensors: recorder(layer_idx, {**tensors, **extra_tensors}))

    def in_row(self, layout: TileLayout, division: Division | None) -> AttnContext:
        """The context of a row that holds this one's video and texts; its recorder still gets what is the video's."""
        recorder = self.recorder
        of_row = None if recorder is None else (lambda layer, tensors: recorder(layer, of_video(tensors, layout)))
        return replace(self, layout=layout, division=division, recorder=of_row)

    def record(self, layer_idx: int, index: BlockIndex, **tensors: Tensor | None) -> None:
        """Pass a layer's selection and other internals to the recorder, if there is one.

        Args:
            layer_idx: index of the layer.
            index: kv tiles that each query tile attends to, with fine masks if there are any.
            **tensors: references, not copies; None values are left out. q, k `[B, L, H, D]`; scores `[B, H, Nq, Nkv]`,
                logits by which the tiles were ranked; fine `[B, L, H, D]`, output of the selected tiles; coarse, output
                `[B, N, H, D]` per tile or `[B, L, H, D]` per token; tail `[B, L, H, D]`, output of all other tiles, and
                tail_mass `[B, L, H, 1]`, their part of the softmax; gate_compress, gate_fine `[B, L, H, D]`, factors of
                coarse and fine; kept_density, merged_density `[B, H]`, shares of pairs before and after groups of query
                tiles are merged; skipped `[B, H, Nq]`, number of skips of a second stage.
        """
        if self.recorder is None:
            return
        recorded = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
        lists = {name: x for name in INDEX if (x := getattr(index, name)) is not None}
        self.recorder(layer_idx, recorded | lists)


def _follow(index: BlockIndex, leaders: Half) -> BlockIndex:
    """The lists of one half of the batch, repeated for both halves."""
    if index.kv_indices.shape[0] == 1:
        return index
    halves = {name: getattr(index, name).chunk(2)[leaders == "second"] for name in ("kv_indices", "kv_num_blocks")}
    return replace(index, **{name: torch.cat((half, half)) for name, half in halves.items()})
