"""The table of `vsa simulate`: one row per setting of neighborhood attention, with visited tiles and speed-ups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from vsa.attention.neighborhood.simulate import axis_windows, end_to_end, simulate, sweep_strides
from vsa.attention.neighborhood.tile import best_tile
from vsa.attention.neighborhood.visits import Tiling


def print_simulation(
    grid: Sequence[int],
    window: Sequence[int],
    *,
    stride: Sequence[int] | None = None,
    sweep: bool = False,
    dilation: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
    q_tile: Sequence[int] | None = None,
    kv_tile: Sequence[int] | None = None,
    tiling: Tiling = "static",
    one_d: bool = False,
    attention_share: float | None = None,
    steps: int | None = None,
    dense_steps: int | None = None,
    rounded: bool = False,
) -> None:
    """Simulate one stride, or all of them, and print a table.

    Args:
        grid, window, stride, dilation, causal, tiling, one_d: see `simulate`.
        sweep: whether the strides of `sweep_strides` are printed instead of one.
        q_tile, kv_tile: a missing one takes the other's value; without both, the `best_tile` of 64 tokens.
        attention_share, steps, dense_steps, rounded: see `end_to_end`; without a share the column is left out.
    """
    if sweep and stride is not None:
        raise ValueError(f"expected one of --sweep and --stride, got both (--stride {' '.join(map(str, stride))})")
    if attention_share is None and (steps, dense_steps, rounded) != (None, None, False):
        raise ValueError("--steps, --dense-steps and --paper-rounding need an --attention-share")
    bound = None
    if attention_share is not None:
        counts = {"steps": steps, "dense_steps": dense_steps}
        counts = {name: count for name, count in counts.items() if count is not None}
        bound = partial(end_to_end, attention_share=attention_share, rounded=rounded, **counts)
        # a sweep may take long, so invalid options raise their error before it
        bound(1.0)
    kv_tile = kv_tile or q_tile or best_tile(axis_windows(grid, window, stride, dilation, causal))[1]
    q_tile = q_tile or kv_tile
    if sweep:
        settings = sweep_strides(
            grid, window, q_tile=q_tile, kv_tile=kv_tile, dilation=dilation, causal=causal, tiling=tiling, one_d=one_d
        )
    else:
        settings = [
            simulate(
                grid,
                window,
                q_tile=q_tile,
                kv_tile=kv_tile,
                stride=stride,
                dilation=dilation,
                causal=causal,
                tiling=tiling,
                one_d=one_d,
            )
        ]
    headings = ["stride", "worst tile", "mean tile", "all", "speed-up", "mean speed-up", "by FLOPs", "mask"]
    headings += ["end to end"] * (bound is not None)
    rows = [
        (
            _sides(row.stride),
            str(row.worst_tiles),
            f"{row.mean_tiles:.1f}",
            str(row.total_tiles),
            f"{row.speedup:.2f}x",
            f"{row.mean_speedup:.2f}x",
            f"{row.flop_speedup:.2f}x",
            "none" if row.perfect else "some",
            *([] if bound is None else [f"{bound(row.speedup):.2f}x"]),
        )
        for row in settings
    ]
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for place, heading in enumerate(headings):
        # a heading is folded between its words; no word and no number is cut
        whole = max(map(len, [*heading.split(), *(row[place] for row in rows)]))
        table.add_column(heading, justify="right", min_width=whole)
    for row in rows:
        table.add_row(*row)
    cut = "runs of {} query and {} kv tokens" if one_d else "query tile {}, kv tile {}"
    shapes = (math.prod(q_tile), math.prod(kv_tile)) if one_d else (_sides(q_tile), _sides(kv_tile))
    print(
        f"{_sides(grid)} = {math.prod(grid)} tokens, window {_sides(window)}, {cut.format(*shapes)}, {tiling} kv tiles"
    )
    Console().print(table)
    if sweep:
        print(f"{len(settings)} of {math.prod(window)} strides: each other one is coarser than one here and no faster")


def _sides(values: Sequence[int]) -> str:
    return "x".join(map(str, values))
