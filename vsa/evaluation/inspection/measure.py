"""A model's attention on one clip: selections, true attention and gates by timestep, layer and head.

T timesteps, Y layers, H heads, Nq / Nkv tiles of queries / keys, L tokens; of those shown Ys layers, Hs heads, Q query
tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention import stats
from vsa.attention.context import recorded_index
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.evaluation.attention_map import denoise_once, tile_map
from vsa.evaluation.inspection.metrics import (
    HEAD_METRICS,
    head_metrics,
    one_head,
    selected_tiles,
    stage_outputs,
)
from vsa.models.network import Network

MAPS = {"coarse_gate": "coarse gate", "fine_gate": "fine gate", "coarse_share": "coarse share of the output"}
"""Per-token quantities shown on the page, with their labels."""


class NothingSelected(ValueError):
    """None of the inspected layers selects tiles."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Layers, heads and query tiles that the page shows one by one.

    Args:
        layers: indices of layers, ascending.
        heads: indices of heads, ascending.
        queries: indices of query tiles, ascending.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    queries: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Results of an inspection.

    Args:
        layout: layout of the clip's tokens.
        query_tiles: int64 `[t, h, w]` query tile of every token, see `tile_map`.
        tiles: int64 `[t, h, w]` kv tile of every token; kv tiles may be of another size.
        timesteps: timesteps in [0, 1000], 1000 is pure noise.
        layers: inspected layers that select tiles.
        silent: inspected layers that select none.
        tables: fp32 `[metrics, T, Y, H]` in the order of `HEAD_METRICS`; NaN where a method has no such quantity.
        overlap_heads: fp32 `[T, Y]`, share of tiles that two heads have in common.
        counts: int32 `[T, Y, H, Nkv]`, lists that hold each kv tile.
        shown: indices of the following tensors.
        selected: bool `[T, Ys, Hs, Q, Nkv]`.
        coarse: fp32 of the same shape, the softmax of the scores that rank the tiles; NaN for a fixed window.
        mass: fp32 of the same shape, the true attention of the query tile: mean over its tokens of the mass of dense
            attention on each kv tile.
        maps: fp32 `[T, Ys, t, h, w]` by the names of `MAPS` that the method has: root mean square of a gate over heads
            and channels, and the share of the coarse stage (or pooled tail) in the norm of the output.
    """

    layout: TileLayout
    query_tiles: Tensor
    tiles: Tensor
    timesteps: tuple[float, ...]
    layers: tuple[int, ...]
    silent: tuple[int, ...]
    tables: Tensor
    overlap_heads: Tensor
    counts: Tensor
    shown: Shown
    selected: Tensor
    coarse: Tensor
    mass: Tensor
    maps: dict[str, Tensor]

    def table(self, name: str) -> Tensor:
        """fp32 `[T, Y, H]` of one of `HEAD_METRICS`."""
        return self.tables[list(HEAD_METRICS).index(name)]


@torch.no_grad()
def inspect_clip(
    model: Network,
    latents: Tensor,
    text: Tensor,
    text_mask: Tensor | None,
    *,
    timesteps: Sequence[float],
    topk: KeptTiles,
    shown: Shown,
    layers: Sequence[int],
    tokens: int | None = 256,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Inspection:
    """Measure one forward per timestep, all from the same noise.

    Args:
        model: model in eval mode.
        latents: normalised `[1, C, T, H, W]`.
        text: `[1, S, E]`.
        text_mask: bool `[1, S]`, or None.
        timesteps: timesteps in [0, 1000]; each selection is compared with the one before.
        topk: tiles per query tile.
        shown: layers, heads and query tiles whose selection is stored per tile; layers without one are skipped.
        layers: layers to measure.
        tokens: number of query tokens whose dense attention gives the recall, None for all.
        seed: seed of the noise and of the sampled query tokens.
        progress: function called with 1 after every timestep.

    Raises:
        NothingSelected: none of the layers selects tiles.
        ValueError: a layer has lists of other query tiles than those of the model's layout.
    """
    layout = model.layout_for(latents.shape[1:], latents.device)
    sampled = stats.sample_tokens(layout.num_tokens, tokens, seed=seed)
    looks: list[dict[int, dict[str, Tensor]]] = []
    indices: dict[int, BlockIndex] = {}
    for timestep in timesteps:
        layer_looks: dict[int, dict[str, Tensor]] = {}

        def recorder(layer: int, tensors: dict[str, Tensor], layer_looks=layer_looks) -> None:
            if layer not in layers or "kv_indices" not in tensors:
                return
            if (lists := tensors["kv_indices"].shape[2]) != layout.num_blocks:
                raise ValueError(
                    f"layer {layer} has {lists} lists, the model's layout has {layout.num_blocks} tiles: lists of "
                    "other query tiles cannot be inspected"
                )
            subset = shown if layer in shown.layers else None
            layer_looks[layer] = _look(tensors, layout, sampled, indices.get(layer), subset)
            indices[layer] = recorded_index(tensors)

        denoise_once(model, latents, text, text_mask, sigma=timestep / 1000, topk=topk, recorder=recorder, seed=seed)
        looks.append(layer_looks)
        if progress is not None:
            progress(1)
    recorded_layers = tuple(sorted(looks[0]))
    if not recorded_layers:
        raise NothingSelected(f"layers {', '.join(map(str, layers))} select no tiles")
    shown = replace(shown, layers=tuple(layer for layer in shown.layers if layer in recorded_layers))

    def stacked(name: str, some: Sequence[int] = recorded_layers) -> Tensor:
        return torch.stack([torch.stack([look[layer][name] for layer in some]) for look in looks])

    return Inspection(
        layout=layout,
        query_tiles=tile_map(layout),
        tiles=tile_map(layout, layout.kv_blocks),
        timesteps=tuple(timesteps),
        layers=recorded_layers,
        silent=tuple(layer for layer in layers if layer not in recorded_layers),
        tables=stacked("metrics").movedim(2, 0),
        overlap_heads=stacked("overlap_heads"),
        counts=stacked("counts"),
        shown=shown,
        selected=stacked("selected", shown.layers),
        coarse=stacked("coarse", shown.layers),
        mass=stacked("mass", shown.layers),
        maps={name: stacked(name, shown.layers) for name in MAPS if name in looks[0][shown.layers[0]]},
    )


def _look(
    tensors: dict[str, Tensor], layout: TileLayout, tokens: Tensor, previous: BlockIndex | None, subset: Shown | None
) -> dict[str, Tensor]:
    """Tensors of one layer at one timestep by their names in `Inspection` and `MAPS`; `tables` is "metrics"."""
    selected = selected_tiles(tensors, layout)
    look = {
        "metrics": head_metrics(tensors, layout, tokens, previous),
        "overlap_heads": stats.head_overlap(selected).float().cpu(),
        "counts": selected[0].sum(1, dtype=torch.int32).cpu(),
    }
    if subset is not None:
        look |= _rows(tensors, layout, selected, subset) | token_maps(tensors, layout)
    return look


def _rows(tensors: dict[str, Tensor], layout: TileLayout, selected: Tensor, subset: Shown) -> dict[str, Tensor]:
    heads, queries = list(subset.heads), list(subset.queries)
    selected = selected[0][heads][:, queries]
    coarse = torch.full(selected.shape, torch.nan)
    if "scores" in tensors:
        coarse = tensors["scores"][0][heads][:, queries].float().softmax(-1)
    mass = torch.stack([query_mass(one_head(tensors, head), layout, queries) for head in heads])
    return {"selected": selected.cpu(), "coarse": coarse.cpu(), "mass": mass.cpu()}


def query_mass(tensors: dict[str, Tensor], layout: TileLayout, queries: Sequence[int]) -> Tensor:
    """True attention `[Q, Nkv]` of some query tiles of the first sample and head: the mean over a tile's tokens."""
    offsets = layout.blocks.offsets.tolist()
    sizes = [offsets[q + 1] - offsets[q] for q in queries]
    tokens = torch.cat([torch.arange(offsets[q], offsets[q + 1]) for q in queries])
    mass = stats.tile_mass(tensors["q"][:1], tensors["k"][:1], tokens, layout.kv_blocks)[0, 0]
    return torch.stack([rows.mean(0) for rows in mass.split(sizes)])


def token_maps(tensors: dict[str, Tensor], layout: TileLayout) -> dict[str, Tensor]:
    """Per-token quantities of the first sample, fp32 `[t, h, w]` by the names of `MAPS`."""
    grid = layout.only_video("a map of tokens").grid_thw
    maps = {}
    for name, gate in (("coarse_gate", "gate_compress"), ("fine_gate", "gate_fine")):
        if gate in tensors:
            maps[name] = _size(tensors[gate])
    coarse, fine = stage_outputs(tensors, layout)
    if coarse is not None and fine is not None:
        a, b = _size(coarse), _size(fine)
        maps["coarse_share"] = a / (a + b).clamp_min(torch.finfo(torch.float32).tiny)
    return {name: layout.unpermute(values[None])[0].view(grid).cpu() for name, values in maps.items()}


def _size(x: Tensor) -> Tensor:
    """Root mean square over heads and channels, `[L]` of the first sample."""
    return x[0].float().square().mean((-2, -1)).sqrt()


def choose_shown(
    *,
    layers: Sequence[int],
    num_heads: int,
    num_queries: int,
    num_tiles: int,
    num_timesteps: int,
    most_bytes: int,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    first: Sequence[int] = (),
) -> Shown:
    """Choose what fits into a page: everything, or fewer query tiles, then heads, then layers, spread evenly.

    Args:
        layers: candidate layers.
        num_heads: H.
        num_queries: Nq.
        num_tiles: Nkv.
        num_timesteps: T.
        most_bytes: size limit of the embedded rows, one row per query tile with 8/3 bytes per kv tile.
        heads: heads that the user asked for.
        queries: query tiles that the user asked for.
        first: query tiles to prefer.
    """
    some_layers, some_heads = list(layers), list(range(num_heads)) if heads is None else list(heads)
    target_queries = min(num_queries, 32) if queries is None else len(queries)

    def room() -> int:
        row = num_timesteps * len(some_layers) * len(some_heads) * num_tiles * 8 // 3
        return most_bytes // row

    for layer_limit, head_limit in ((len(some_layers), 4), (8, 4), (8, 2), (4, 2), (4, 1), (2, 1), (1, 1)):
        if room() >= target_queries:
            break
        some_heads = _spread(some_heads, head_limit) if heads is None else some_heads
        some_layers = _spread(some_layers, layer_limit)
    if queries is None:
        count = min(num_queries, max(1, room()))
        others = [query for query in range(num_queries) if query not in first]
        chosen_queries = {*first[:count], *_spread(others, count - len(first[:count]))}
    else:
        chosen_queries = set(queries)
    return Shown(layers=tuple(some_layers), heads=tuple(sorted(some_heads)), queries=tuple(sorted(chosen_queries)))


def _spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values, spread evenly, the last among them."""
    count = min(count, len(values))
    return [values[(i + 1) * len(values) // count - 1] for i in range(count)]
