"""How much of the dense attention's mass the selected tiles hold, for several ways to cut and to rank them.

    python -m scripts.recall --run RUN --tile 2 2 2
    python -m scripts.recall --grid 21 30 52 --sparsity 0.9

With a run, queries and keys are those of its layers at steps of a denoising of its own; otherwise smooth random fields
stand for them, whose neighbours are alike and which say nothing about a trained model. Every row keeps the same share
of kv tiles; `pairs` is the share of token pairs in them, which is more where a score prefers full tiles to short ones,
and what a selection at random would recall.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.attention import stats
from vsa.attention.layout import Segment
from vsa.attention.sparsity import resolve_topk
from vsa.attention.staged import StagedAttention
from vsa.attention.tiling import Grid, propose_tile
from vsa.errors import one_line_errors
from vsa.files import atomic_file
from vsa.sampling.pipeline import generate, load_run


class Recorded(NamedTuple):
    """Queries and keys `[B, L, H, D]` in raster order of one layer at one step."""

    grid: Grid
    q: Tensor
    k: Tensor


def variants(tile: Grid, grid: Grid) -> dict[str, dict[str, Any]]:
    """Options of `StagedAttention` by name; those of finer tiles are left out where a tile has no halves."""
    t, h, w = tile
    half_t, half_h, half_w = (n // 2 if n % 2 == 0 else n for n in tile)
    half, quarter = (half_t, half_h, half_w), (half_t, h, half_w)
    found: dict[str, dict[str, Any]] = {
        "mean": {"tile_thw": tile},
        "mass": {"tile_thw": tile, "score": "mass"},
        "two tiles, one list": {"tile_thw": (t, 2 * h, w), "kv_tile_thw": tile, "pool_thw": tile},
        "of logits": {"tile_thw": (t, 2 * h, w), "kv_tile_thw": tile, "pool_thw": tile, "pooled_map": "logits"},
        "coarse tile, fine four": {"tile_thw": (t, 2 * h, 2 * w), "pool_thw": tile},
        "four tiles as one": {"tile_thw": (t, 2 * h, 2 * w)},
        "along a curve": {"tile_thw": tile, "partition": "hilbert_run"},
        "proposed tile": {"tile_thw": propose_tile(grid, math.prod(tile))},
    }
    if half != tile:
        found["subblock_lse"] = {"tile_thw": tile, "score": "subblock_lse", "score_thw": half}
    if quarter != tile:
        found["smaller kv tiles"] = {"tile_thw": tile, "kv_tile_thw": quarter}
        found["smaller query tiles"] = {"tile_thw": quarter, "kv_tile_thw": tile}
    return found


def measure(options: dict[str, Any], recorded: Sequence[Recorded], sparsity: float, tokens: int) -> dict[str, Any]:
    """A row of the table; recall is the mean over layers, steps, samples, heads and `tokens` queries."""
    layout, topk, values = None, 0, []
    for grid, q, k in recorded:
        heads, dim = q.shape[2:]
        method = StagedAttention(dim=heads * dim, num_heads=heads, head_dim=dim, stages="f", **options)
        layout = method.layout([Segment(grid)], q.device)
        topk = resolve_topk(sparsity, layout.num_video_tiles)
        q, k = layout.permute(q), layout.permute(k)
        selected = method.selection(q, k, layout, topk).to_dense(layout.num_video_tiles)
        # the same queries in every order
        raster = stats.sample_tokens(layout.num_tokens, tokens)
        chosen = layout.inverse[raster.to(q.device)].sort().values
        mass = stats.tile_mass(q, k, chosen, layout.kv_blocks)
        recall = stats.selection_recall(mass, selected, chosen, layout.blocks).selected
        rows, columns = (blocks.sizes.double() / layout.num_tokens for blocks in (layout.blocks, layout.kv_blocks))
        pairs = rows @ selected.double().mean((0, 1)) @ columns
        values.append((float(recall.mean()), float(pairs)))
    assert layout is not None
    slots = math.prod(layout.tile_thw or (1,)) * layout.num_blocks
    recall, pairs = (sum(column) / len(values) for column in zip(*values, strict=True))
    return {
        "queries": layout.num_blocks,
        "tiles": layout.num_video_tiles,
        "fill": layout.num_tokens / slots,
        "topk": topk,
        "recall": recall,
        "pairs": pairs,
    }


def of_run(path: str, clips: int, steps: int) -> list[Recorded]:
    """What the layers of a run see while it denoises clips, in the first, middle and last third of the way."""
    run = load_run(path)
    settings = run.settings(steps=None if run.step_list is not None else steps)
    steps = steps if run.step_list is None else len(run.step_list)
    looked_at = {steps // 6, steps // 2, steps - 1 - steps // 6}
    passes, recorded, layers = 0, [], len(run.model.blocks)
    for index, block in enumerate(run.model.blocks):
        method: Any = block.method
        plain = method.attend_combine

        def attend(q, k, v, extra, ctx, plain=plain, index=index):
            nonlocal passes
            if passes in looked_at:
                grid = ctx.layout.only_video("recall").grid_thw
                recorded.append(Recorded(grid, ctx.layout.unpermute(q).float(), ctx.layout.unpermute(k).float()))
            passes += index == layers - 1
            return plain(q, k, v, extra, ctx)

        method.attend_combine = attend
    prompts = [f"a {colour} circle moving left slowly" for colour in ("red", "green", "blue", "yellow")]
    with torch.no_grad():
        generate(run, prompts[:clips], settings)
    return recorded


def smooth_fields(grid: Grid, heads: int, dim: int) -> list[Recorded]:
    """Random q and k whose correlation falls off over 1, 2 and 4 tokens along every axis, by heads in turn."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for head in range(heads):
        width = 2 ** (head % 3)
        kernel = torch.exp(-0.5 * (torch.arange(-3 * width, 3 * width + 1) / width) ** 2)
        field = torch.randn(1, 2 * dim, *grid, generator=generator)
        for axis in range(3):
            shape = [1, 1, 1, 1, 1]
            shape[axis + 2] = len(kernel)
            padding = [0, 0, 0]
            padding[axis] = 3 * width
            weight = kernel.view(shape).expand(2 * dim, -1, -1, -1, -1)
            field = F.conv3d(field, weight, padding=padding, groups=2 * dim)
        field = field / field.std()
        # logits with a standard deviation of 3, keys half made of what the query is
        q, k = field.flatten(2).transpose(1, 2).chunk(2, dim=-1)
        parts.append((math.sqrt(3) * q, math.sqrt(3) * (q + k) / math.sqrt(2)))
    q, k = (torch.stack(some, dim=2) for some in zip(*parts, strict=True))
    return [Recorded(grid, q, k)]


def lines(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield f"{'':<24} {'q tiles':>8} {'kv tiles':>8} {'fill':>6} {'top-k':>6} {'pairs':>7} {'recall':>7}"
    for name, row in rows.items():
        yield (
            f"{name:<24} {row['queries']:>8} {row['tiles']:>8} {row['fill']:>6.1%} {row['topk']:>6} "
            f"{row['pairs']:>7.1%} {row['recall']:>7.1%}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="run folder or checkpoint")
    parser.add_argument("--grid", type=int, nargs=3, default=(8, 16, 16), help="of smooth fields, without --run")
    parser.add_argument("--heads", type=int, default=3, help="of smooth fields")
    parser.add_argument("--head-dim", type=int, default=32, help="of smooth fields")
    parser.add_argument("--tile", type=int, nargs=3, default=(4, 4, 4))
    parser.add_argument("--sparsity", type=float, default=0.875)
    parser.add_argument("--clips", type=int, default=2, help="that the run denoises, at most 4")
    parser.add_argument("--steps", type=int, default=12, help="of the denoising")
    parser.add_argument("--tokens", type=int, default=256, help="query tokens that are looked at")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="tiles .* full")
    t, h, w = options.grid
    recorded = (
        of_run(options.run, options.clips, options.steps)
        if options.run
        else smooth_fields((t, h, w), options.heads, options.head_dim)
    )
    tile: Grid = (options.tile[0], options.tile[1], options.tile[2])
    found = variants(tile, recorded[0].grid)
    rows = {name: measure(how, recorded, options.sparsity, options.tokens) for name, how in found.items()}
    print(f"grid {recorded[0].grid}, tile {tile}, sparsity {options.sparsity}, {len(recorded)} layers and steps")
    for line in lines(rows):
        print(line)
    if options.out is not None:
        settings = {"grid": recorded[0].grid, "tile": tile, "sparsity": options.sparsity, "run": options.run}
        with atomic_file(options.out) as temporary:
            temporary.write_text(json.dumps({**settings, "options": found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
