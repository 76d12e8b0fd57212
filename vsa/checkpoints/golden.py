"""Golden tensors: inputs and outputs of a sparse checkpoint's self-attention layers, for tests of other engines.

L tokens, C model width. A case is one layer on a small grid, from the normalised, modulated hidden states that enter
`to_q` and the gates to the output of `to_out.0`, both in raster order. It covers qk-norm, RoPE, tiles, selection, both
stages and the gates.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from vsa.attention.context import INDEX, AttnContext, Recorder
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.attention.neighborhood.axis import AxisRule
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    Grid,
    SparseAttentionConfig,
    read_sparse_config,
    write_sparse_config,
)
from vsa.checkpoints.wan import refuse_other_attention
from vsa.checkpoints.weight_files import save_tensors
from vsa.files import atomic_file, open_tensors, parse_json
from vsa.models.network import Network

GOLDEN = "golden.safetensors"
TOLERANCE = 1e-4
"""Relative error for fp32 engines: rounding gives about 1e-6, one wrong tile some per cent. bf16 needs about 0.02."""
_HEADER = {"grid_thw": [int], "cases": [{"layer": int, "topk": int, "dense?": bool}]}

# engines with different rounding must select the same tiles: smallest gap between the scores of the last selected and
# the first skipped tile, relative to the spread of the scores
_MIN_MARGIN = 2e-5
_MAX_DRAWS = 200
_MANY_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """Input of one layer.

    Args:
        layer: index of the block.
        hidden: `[1, L, C]` float32 hidden states in raster order.
        grid_thw: token grid with L cells.
        topk: kv tiles per query tile; all tiles if the method does not select.
        dense: whether dense attention replaces a method without top-k, see `SparseAttentionConfig.dense_layers`.
    """

    layer: int
    hidden: Tensor
    grid_thw: Grid
    topk: int
    dense: bool = False


@dataclass(frozen=True, kw_only=True)
class GoldenError:
    """Error of a layer relative to its golden output.

    Args:
        layer: index of the block.
        error: norm of the difference divided by the norm of the golden output.
        tolerance: largest error that passes.
    """

    layer: int
    error: float
    tolerance: float

    @property
    def failed(self) -> bool:
        # a NaN fails, of golden tensors that are not finite or 0 everywhere as well
        return not self.error <= self.tolerance


Engine = Callable[[GoldenCase], Tensor]


def attention_output(model: Network, case: GoldenCase, recorder: Recorder | None = None) -> Tensor:
    """Self-attention output `[1, L, C]` of one layer in raster order, computed by the reference engine."""
    device = next(model.parameters()).device
    layout = _layout(model, case.grid_thw, device)
    topk = KeptTiles.of(case.topk)
    ctx = AttnContext(layout=layout, topk=topk, layer_idx=case.layer, dense=case.dense, recorder=recorder)
    return layout.unpermute(model.self_attention(case.layer, layout.permute(case.hidden.to(device)), ctx))


@torch.no_grad()
def write_golden(
    model: Network, folder: str | Path, *, layers: Sequence[int] | None = None, tolerance: float = TOLERANCE
) -> Path:
    """Write `golden.safetensors` into an exported folder and reference it in its `sparse_attention.json`.

    The grid has one full and one partial tile in time, two full and one partial in height, two in width, and is so
    large that each window leaves out a token. Layers that are not dense keep a quarter of the tiles, or all if the
    method does not select. Inputs are standard normal. A layer with a near tie in its selection gets the input of the
    next seed, so that rounding does not decide which tiles are compared.

    Args:
        model: model with the folder's own weights (`open_network`), in float32.
        folder: folder with a `sparse_attention.json`.
        layers: layers to write; None: all, but only the first one for grids above 4096 tokens, which windows of a fixed
            number of tokens can need.
        tolerance: see `GoldenError`.

    Raises:
        ValueError: an unknown layer, weights that are not float32, a missing `sparse_attention.json` or that of another
            model, or no unambiguous selection.
    """
    folder = Path(folder)
    sparse = read_sparse_config(folder)
    refuse_other_attention(model, sparse, str(folder / SPARSE_CONFIG))
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"golden tensors are computed in float32, {name} is {parameter.dtype}")
    grid = _golden_grid(model, sparse)
    if layers is None:
        layers = range(len(model.blocks) if math.prod(grid) <= _MANY_TOKENS else 1)
    layers = list(layers)
    if any(not 0 <= layer < len(model.blocks) for layer in layers):
        raise ValueError(f"layers must be in 0..{len(model.blocks) - 1}, got {layers}")
    num_tiles = _layout(model, grid, torch.device("cpu")).num_video_tiles
    topk = max(1, num_tiles // 4) if model.selects else num_tiles

    tensors, cases = {}, []
    seeds = itertools.count()
    for layer in layers:
        layer_topk = num_tiles if layer in sparse.dense_layers else topk
        dense = layer in sparse.dense_layers and not model.selects
        by_data = sparse.settings is not None and not dense
        case_seed, case, out = _clear_case(model, layer, grid, layer_topk, num_tiles, seeds, dense, by_data)
        tensors[f"blocks.{layer}.hidden"] = case.hidden.contiguous()
        tensors[f"blocks.{layer}.out"] = out.float().cpu().contiguous()
        cases.append({"layer": layer, "topk": layer_topk, "seed": case_seed} | ({"dense": True} if dense else {}))
    # a single entry, since the library writes several in any order and the file should be deterministic
    header = {"golden": json.dumps({"grid_thw": grid, "num_tiles": num_tiles, "cases": cases})}
    with atomic_file(folder / GOLDEN) as temporary:
        save_tensors(tensors, temporary, header)
    write_sparse_config(folder, replace(sparse, golden=GOLDEN, golden_tolerance=tolerance))
    return folder / GOLDEN


def _golden_grid(model: Network, sparse: SparseAttentionConfig) -> Grid:
    # one config describes all layers
    method, *_ = model.attention_layers
    t, h, w = getattr(method, "tile_thw", None) or (4, 4, 4)
    # partial tiles on two axes, twelve tiles in all
    sizes = [t + 1, 2 * h + 1, 2 * w]
    if isinstance(method, NeighborhoodAttention):
        sizes = [_room(rule, *pair) for rule, *pair in zip(method.rules, sizes, sparse.grids[0], strict=True)]
    t, h, w = sizes
    return t, h, w


def _room(rule: AxisRule, least: int, trained: int) -> int:
    """Smallest size of an axis, from `least` on, that its window fits but does not cover; at most the trained size."""
    whole = {}
    for size in range(min(least, trained), trained + 1):
        with suppress(ValueError):
            whole[size] = rule.at(size).is_whole
    return min(whole, key=lambda size: (whole[size], size))


def _layout(model: Network, grid: Grid, device: torch.device) -> TileLayout:
    with warnings.catch_warnings():
        # partial tiles are intended here
        warnings.filterwarnings("ignore", message="tiles .* full")
        sizes = (n * patch for n, patch in zip(grid, model.patch_size, strict=True))
        return model.layout_for((model.in_channels, *sizes), device)


def _clear_case(
    model: Network,
    layer: int,
    grid: Grid,
    topk: int,
    num_tiles: int,
    seeds: itertools.count[int],
    dense: bool,
    by_data: bool,
) -> tuple[int, GoldenCase, Tensor]:
    """The first seed without a near tie in its selection, with its case and output."""
    margins: list[float] = []

    def recorder(layer_idx: int, tensors: dict[str, Tensor]) -> None:
        if "scores" not in tensors:
            # ranked by other numbers than logits; `_is_steady` moves them
            return
        scores = tensors["scores"].float()
        best = scores.topk(topk + 1, dim=-1).values
        margins.append(((best[..., -2] - best[..., -1]) / scores.std()).min().item())

    num_tokens = grid[0] * grid[1] * grid[2]
    for _ in range(_MAX_DRAWS):
        seed = next(seeds)
        hidden = torch.randn(1, num_tokens, model.dim, generator=torch.Generator().manual_seed(seed))
        case = GoldenCase(layer=layer, hidden=hidden, grid_thw=grid, topk=topk, dense=dense)
        margins.clear()
        out = attention_output(model, case, recorder if topk < num_tiles else None)
        if by_data and not _is_steady(model, case, seed):
            continue
        if not margins or margins[0] >= _MIN_MARGIN:
            return seed, case, out
    raise ValueError(f"layer {layer}: every one of {_MAX_DRAWS} inputs has tiles with equal scores")


def _is_steady(model: Network, case: GoldenCase, seed: int) -> bool:
    """Whether inputs that differ by rounding select the same tiles and skip the same products."""
    recorded: list[dict[str, Tensor]] = []

    def recorder(layer_idx: int, tensors: dict[str, Tensor]) -> None:
        recorded.append({name: tensors[name].clone() for name in (*INDEX, "skipped") if name in tensors})

    noise = torch.Generator().manual_seed(seed)
    for size in (0.0, _MIN_MARGIN, -_MIN_MARGIN):
        hidden = case.hidden * (1 + size * torch.randn(case.hidden.shape, generator=noise))
        attention_output(model, replace(case, hidden=hidden), recorder)
    return all(
        one.keys() == recorded[0].keys() and all(map(torch.equal, one.values(), recorded[0].values()))
        for one in recorded
    )


def check_golden(
    folder: str | Path, run: Engine, *, layers: Sequence[int] | None = None, tolerance: float = TOLERANCE
) -> list[GoldenError]:
    """Compare an engine with the golden tensors of an exported folder, layer by layer.

    Args:
        folder: folder with `sparse_attention.json` and the golden file that it references.
        run: engine under test: function that returns the self-attention output `[1, L, C]` of a case, in raster order,
            on any device and in any dtype. It needs only the folder's weights of that block.
        layers: layers that must have a case; None: every layer of the model. Others are not compared.
        tolerance: largest error that passes, see `TOLERANCE`; the folder may ask for a smaller one, not for a larger.

    Returns:
        one entry per layer; `failed` is true above the tolerance.

    Raises:
        ValueError: the golden file is missing or damaged, has no case of a layer or several, or allows a larger error
            than any dtype needs, or an output has another shape.
    """
    folder = Path(folder)
    sparse = read_sparse_config(folder)
    if sparse.golden is None or sparse.golden_tolerance is None:
        raise ValueError(f"{folder / SPARSE_CONFIG} names no golden file")
    path = folder / sparse.golden
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    expected = range(sparse.num_layers) if layers is None else sorted(set(layers))
    if not expected or not 0 <= expected[0] <= expected[-1] < sparse.num_layers:
        raise ValueError(f"layers must be in 0..{sparse.num_layers - 1}, got {[*expected]}")
    tolerance = min(tolerance, sparse.golden_tolerance)
    errors = []
    for case, golden in _cases(path, expected):
        out = run(case).detach().cpu().double()
        if out.shape != golden.shape:
            raise ValueError(f"layer {case.layer}: output has shape {tuple(out.shape)}, expected {tuple(golden.shape)}")
        error = ((out - golden).norm() / golden.norm()).item()
        errors.append(GoldenError(layer=case.layer, error=error, tolerance=tolerance))
    return errors


def _cases(path: Path, layers: Sequence[int]) -> Iterator[tuple[GoldenCase, Tensor]]:
    """The cases of some layers and their outputs in float64, in the order of the file; see `check_golden`."""
    try:
        with open_tensors(path) as file:
            header = parse_json((file.metadata() or {}).get("golden", ""), f"the header of {path}", _HEADER)
            rows, grid = header["cases"], cast(Grid, tuple(header["grid_thw"]))
            counts = Counter(row["layer"] for row in rows)
            if odd := [layer for layer in layers if counts[layer] != 1]:
                known = f"expected one; layers with cases, to name with --layers: {','.join(map(str, sorted(counts)))}"
                raise ValueError(f"{path} has {counts[odd[0]]} cases of layer {odd[0]}, {known}")
            for row in rows:
                layer = row["layer"]
                if layer not in layers:
                    continue
                hidden, golden = (file.get_tensor(f"blocks.{layer}.{name}") for name in ("hidden", "out"))
                if [len(grid), *hidden.shape[:-1]] != [3, 1, math.prod(grid)] or golden.shape != hidden.shape:
                    shapes = f"{list(hidden.shape)} and {list(golden.shape)}"
                    raise ValueError(f"{path}: the case of layer {layer} has shapes {shapes} on the grid {list(grid)}")
                dense = row.get("dense", False)
                case = GoldenCase(layer=layer, hidden=hidden, grid_thw=grid, topk=row["topk"], dense=dense)
                yield case, golden.double()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
