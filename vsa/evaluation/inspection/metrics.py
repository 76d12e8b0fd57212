"""Metrics of one layer's attention at one noise level, from the tensors that its method records.

B samples, L tokens, H heads, D head dim, Nq / Nkv tiles of queries / keys. Metrics of tensors that a method does not
record (`AttnContext.record`) are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention import stats
from vsa.attention.context import recorded_index
from vsa.attention.layout import TileLayout

PANELS = {
    "recall": "recall of the true attention mass",
    "gate_rms": "coarse gate (rms)",
    "coarse_share": "coarse share of the output",
    "overlap_steps": "overlap with the noise level before",
    "overlap_heads": "overlap between heads",
    "entropy": "entropy of the coarse scores",
}
"""Panels of a heatmap, layer by noise level."""

METRICS = (*PANELS, "recall_random")

HEAD_METRICS = {
    "recall": "recall: true attention on the selected tiles",
    "recall_random": "recall of as many random tiles",
    "gate_rms": "coarse gate, root mean square",
    "gate_fine_rms": "fine gate, root mean square",
    "coarse_share": "share of the coarse stage (or pooled tail) in the output",
    "tail_mass": "attention that the layer gives to its pooled tail; the true one is 1 - recall",
    "overlap_steps": "overlap of a list with that of the timestep before",
    "entropy": "entropy of the coarse attention, 1 is uniform",
    "pair_overlap": "overlap of the lists of 2 neighbouring query tiles",
    "pair_random": "overlap of 2 random lists",
    "four_overlap": "overlap of the lists of 4 neighbouring query tiles",
    "four_random": "overlap of 4 random lists",
    "lists_mean": "lists that hold a kv tile: mean over the tiles",
    "lists_median": "lists that hold a kv tile: median",
    "lists_p90": "lists that hold a kv tile: 90th percentile",
    "lists_p99": "lists that hold a kv tile: 99th percentile",
    "lists_largest": "lists that hold the most popular kv tile",
    "lists_none": "kv tiles in no list",
    "lists_long": "kv tiles in more than 1.5 times the mean",
}
"""Metrics of every head, with their meanings."""


LISTS = ("kv_indices", "kv_num_blocks", "kv_num_full_blocks", "mask_ids")
"""Recorded tensors with one list for each query tile, by head."""


def selected_tiles(tensors: Mapping[str, Tensor], layout: TileLayout) -> Tensor:
    """The recorded lists as bool `[B, H, Nq, Nkv]`."""
    batch, _, heads, _ = tensors["q"].shape
    return recorded_index(tensors).to_dense(layout.kv_blocks.num).expand(batch, heads, -1, -1)


def stage_outputs(tensors: Mapping[str, Tensor], layout: TileLayout) -> tuple[Tensor | None, Tensor | None]:
    """Contributions of the coarse stage (or pooled tail) and the fine stage to the output, `[B, L, H, D]` each."""
    coarse, fine = tensors.get("tail"), tensors.get("fine")
    if coarse is None and "coarse" in tensors:
        coarse = tensors["coarse"]
        coarse = coarse if coarse.shape[1] == layout.num_tokens else layout.tile_to_tokens(coarse)
        coarse = coarse * tensors["gate_compress"] if "gate_compress" in tensors else coarse
    if fine is not None and "gate_fine" in tensors:
        fine = fine * tensors["gate_fine"]
    return coarse, fine


def layer_metrics(
    tensors: Mapping[str, Tensor], layout: TileLayout, tokens: Tensor, previous: BlockIndex | None
) -> dict[str, Tensor]:
    """Means over samples and heads, fp32 scalars by the names of `METRICS`, `gate_fine_rms` and `tail_mass`.

    Args:
        tensors: tensors that the layer recorded.
        layout: layout of a row of one video.
        tokens: int64 query tokens whose recall is measured.
        previous: selection of the layer at the noise level before; None leaves `overlap_steps` NaN.
    """
    q, k, index = tensors["q"], tensors["k"], recorded_index(tensors)
    selected = selected_tiles(tensors, layout)
    if index.mask_bits is None:
        mass = stats.tile_mass(q, k, tokens, layout.kv_blocks)
        recall = stats.selection_recall(mass, selected, tokens.to(q.device), layout.blocks)
    else:
        recall = stats.visible_recall(q, k, index, tokens, layout.blocks, layout.kv_blocks)
    missing = q.new_tensor(math.nan)
    metrics = dict.fromkeys((*METRICS, "gate_fine_rms", "tail_mass"), missing) | {
        "recall": recall.selected.mean(),
        "recall_random": recall.random.mean(),
        "overlap_heads": stats.head_overlap(selected),
    }
    for name, gate in (("gate_rms", "gate_compress"), ("gate_fine_rms", "gate_fine")):
        if gate in tensors:
            metrics[name] = stats.rms(tensors[gate])
    coarse, fine = stage_outputs(tensors, layout)
    if coarse is not None and fine is not None:
        metrics["coarse_share"] = stats.coarse_share(coarse, fine)
    if "tail_mass" in tensors:
        metrics["tail_mass"] = tensors["tail_mass"].mean()
    if "scores" in tensors:
        metrics["entropy"] = stats.coarse_entropy(tensors["scores"])
    if previous is not None:
        metrics["overlap_steps"] = stats.selection_overlap(selected, previous.to_dense(layout.kv_blocks.num))
    return {name: value.float() for name, value in metrics.items()}


def head_metrics(
    tensors: Mapping[str, Tensor], layout: TileLayout, tokens: Tensor, previous: BlockIndex | None
) -> Tensor:
    """fp32 `[metrics, H]` in the order of `HEAD_METRICS`; arguments as for `layer_metrics`."""
    selected = selected_tiles(tensors, layout)
    pairs, fours = (stats.neighbour_overlap(selected, neighbours(layout, size)) for size in (2, 4))
    rows = {"pair_overlap": pairs.overlap, "pair_random": pairs.random}
    rows |= {"four_overlap": fours.overlap, "four_random": fours.random}
    popularity = stats.popularity(selected)
    names = ("mean", "median", "p90", "p99", "largest", "none", "long")
    rows |= {f"lists_{name}": values for name, values in zip(names, popularity, strict=True)}
    by_head = []
    for head in range(selected.shape[1]):
        one = one_head(tensors, head)
        metrics = layer_metrics(one, layout, tokens, None if previous is None else _one_list(previous, head))
        by_head.append(metrics | {name: values.mean(0)[head] for name, values in rows.items()})
    return torch.stack([torch.stack([metrics[name] for metrics in by_head]) for name in HEAD_METRICS]).cpu()


BY_HEAD = ("scores", "kept_density", "merged_density", "skipped", *LISTS)
"""Recorded tensors `[B, H, ...]`; all others are `[B, L, H, D]`."""


def one_head(tensors: Mapping[str, Tensor], head: int) -> dict[str, Tensor]:
    """The recorded tensors of one head; lists that all heads share stay as they are."""
    heads = tensors["q"].shape[2]

    def part(name: str, tensor: Tensor) -> Tensor:
        if name == "mask_bits":
            return tensor
        dim = 1 if name in BY_HEAD else 2
        # keys may be shared by groups of heads
        place = head * tensor.shape[dim] // heads
        return tensor.narrow(dim, place, 1)

    return {name: part(name, tensor) for name, tensor in tensors.items()}


def _one_list(index: BlockIndex, head: int) -> BlockIndex:
    place = 0 if index.kv_indices.shape[1] == 1 else head
    lists = (index.kv_indices[:, place : place + 1], index.kv_num_blocks[:, place : place + 1])
    return BlockIndex(kv_indices=lists[0], kv_num_blocks=lists[1])


def neighbours(layout: TileLayout, size: int) -> Tensor:
    """Offsets `[G + 1]` of groups of `size` neighbouring tiles: aligned in space where the order of tiles has them."""
    if size in layout.super_offsets:
        return layout.super_offsets[size].cpu()
    starts = torch.arange(0, layout.num_blocks, size)
    return torch.cat([starts, torch.tensor([layout.num_blocks])])
