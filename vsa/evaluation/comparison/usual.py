"""Methods of a comparison that names none, but for `PRESETS`, once or at a few budgets, at sizes that fit the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vsa.attention.base import AttentionMethod
from vsa.attention.layout import Segment
from vsa.attention.tiling import Grid
from vsa.config import attention_config
from vsa.evaluation.comparison.methods import SLIDING_TILE, Method, parse_methods

SPARSITIES = (0.5, 0.75, 0.875)
BLOCK, BLOCKS = 128, 16
"""Tokens of a block of the methods that work on runs of tokens, and the least number of blocks of a grid."""
PRESETS = ("nabla", "radial", "sla", "vsa", "vsa2", "spargeattention2", "llsa", "sol")
"""Configs without rows: options of a method that has its own, and methods that are compared by name."""
LAYERS = 5
"""Layers after which the group shapes of every shipped config repeat."""


def usual_methods(grid: Grid, sparsities: Sequence[float] = SPARSITIES, tile_thw: Grid = (4, 4, 4)) -> list[str]:
    """Default methods of a comparison: all but `PRESETS`, with oracle tiles (the most recall) and random tiles.

    Variants of VSA and of the pooled tail have the middle one of the sparsities only.

    Args:
        grid: token grid; blocks and windows are smaller on small grids.
        sparsities: sparsities of the methods that select tiles.
        tile_thw: tokens per tile; sub-blocks halve it.
    """
    half = tuple(n // 2 if n % 2 == 0 else n for n in tile_thw)
    scores = ["oracle", "mass", "random"]
    # sub-blocks of one token would equal the oracle
    if half != tuple(tile_thw) and math.prod(half) > 1:
        scores.insert(1, f"subblock_softmax score_thw={_list(half)}")
    curve, sparge, fine = _blocks(math.prod(grid))
    ranked = ["video_sparse", *(f"staged stages=f score={score}" for score in scores), "pooled_tail", curve]
    windows = ["neighborhood", _sliding_tile(grid, tile_thw), "strided_window", "spatial_temporal", "spatial_full"]
    fixed = [*windows, "compressed_kv", "staged stages=l", "staged stages=c_l"]
    shares = [f"{name}={share}" for name in (f"{sparge} tau", f"{fine} top_p") for share in (0.9, 0.6)]
    middle = sorted(sparsities)[len(sparsities) // 2]
    variants = [f"{name} sparsity={middle:g}" for name in ("staged stages=c_f_l", "staged stages=c_fl")]
    variants.append(f"pooled_tail order=2 sparsity={middle:g}")
    return [
        *("full", *fixed, *shares),
        *(f"{name} sparsity={sparsity:g}" for name in ranked for sparsity in sparsities),
        *variants,
    ]


def usual_on(
    grid: Grid,
    sparsities: Sequence[float] = SPARSITIES,
    tile_thw: Grid = (4, 4, 4),
    *,
    text_in_rows: bool = False,
) -> tuple[list[Method], list[str]]:
    """The `usual_methods` that suit the rows and differ on a grid, and notes on the others."""
    methods: list[Method] = []
    textless: list[str] = []
    missing: dict[str, list[str]] = {}
    budgets: set[tuple[str, int]] = set()
    for method in parse_methods(usual_methods(grid, sparsities, tile_thw), tile_thw=tile_thw):
        if text_in_rows and not _layer(method, 0).takes_text:
            textless.append(method.label)
        elif method.family != "full" and _is_dense_or_seen(method, grid, budgets):
            budget = "" if method.sparsity is None else f"sparsity={method.sparsity:g}"
            missing.setdefault(budget, []).append(method.label)
        else:
            methods.append(method)
    words = [*missing.pop("", []), *(f"{len(labels)} rows of {budget}" for budget, labels in missing.items())]
    where = f"left out on {'x'.join(map(str, grid))}, where they compute all pairs or as many tiles as another row"
    notes = [f"{where}: {', '.join(words)}"] if words else []
    if textless:
        notes.append(f"left out, since they take rows of one video and these hold text: {', '.join(textless)}")
    return methods, notes


def _is_dense_or_seen(method: Method, grid: Grid, budgets: set[tuple[str, int]]) -> bool:
    """Whether a method keeps all tiles, or as many as one of `budgets`, which it joins; or all pairs in every layer."""
    first, segments = _layer(method, 0), [Segment(grid)]
    if first.selects:
        layout = first.layout(segments, "cpu")
        own = (method.family, method.kept(layout))
        repeats = own in budgets or own[1] == layout.num_video_tiles
        budgets.add(own)
        return repeats
    if method.predicts:
        return False
    layers = (_layer(method, index) for index in range(LAYERS))
    return all(layer.pairs(layer.layout(segments, "cpu"), 1) >= math.prod(grid) ** 2 for layer in layers)


def _layer(method: Method, index: int) -> AttentionMethod:
    return method.make(dim=24, num_heads=1, head_dim=24, layer_idx=index)


def _blocks(tokens: int) -> tuple[str, str, str]:
    """`dynamic_hilbert`, `sparge` and `fine_grained`, with blocks of which a grid of `tokens` has several."""
    if tokens >= BLOCK * BLOCKS:
        return "dynamic_hilbert", "sparge", "fine_grained"
    block = 2 ** max(int(math.log2(max(tokens // BLOCKS, 1))), 2)
    return (
        f"dynamic_hilbert tokens={block} sub_tokens={max(block // 8, 2)}",
        f"sparge q_tokens={block} kv_tokens={block // 2}",
        f"fine_grained q_tokens={max(block // 2, 16)} kv_tokens={block // 2}",
    )


def _sliding_tile(grid: Grid, tile_thw: Grid) -> str:
    """Sliding tile attention with about the window of the shipped `neighborhood`, an odd number of tiles per axis.

    Tiles are smaller where fewer than three of them fit; an axis of one or two tokens is seen whole.
    """
    tiles, windows = [], []
    for size, side, share in zip(grid, tile_thw, attention_config("neighborhood")["window_thw"], strict=True):
        side = min(side, max(size // 3, 1))
        count = max(2 * math.ceil(share * size / side / 2) - 1, 3)
        tiles.append(side)
        windows.append(size if size < 3 else side * min(count, (size // side - 1) // 2 * 2 + 1))
    return f"{SLIDING_TILE} window_thw={_list(windows)} tile_thw={_list(tiles)}"


def _list(values: Sequence[int]) -> str:
    return f"[{','.join(map(str, values))}]"
