"""Arguments of `vsa simulate`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from vsa.cli.options import option

Axes = tuple[int, int, int]
SETTING, TILES, END = "Setting", "Tiles", "End to end"


def simulate(
    grid: Annotated[Axes, typer.Argument(help="tokens along time, height, width; 1 without the axis", metavar="T H W")],
    window: Annotated[Axes, option("tokens that a query sees", panel=SETTING, metavar="T H W")],
    stride: Annotated[
        Axes | None, option("neighbours that share a window (1 1 1)", panel=SETTING, metavar="T H W")
    ] = None,
    sweep: Annotated[bool, option("try every stride, show those worth a look", "--sweep", panel=SETTING)] = False,
    dilation: Annotated[Axes | None, option("distance of keys (1 1 1)", panel=SETTING, metavar="T H W")] = None,
    causal: Annotated[
        tuple[bool, bool, bool] | None,
        option("1 for an axis on which no query sees a later key (0 0 0)", panel=SETTING, metavar="T H W"),
    ] = None,
    q_tile: Annotated[Axes | None, option("query tile (as the kv tile)", panel=TILES, metavar="T H W")] = None,
    kv_tile: Annotated[
        Axes | None,
        option("kv tile (as the query tile; without both the best of 64 tokens)", panel=TILES, metavar="T H W"),
    ] = None,
    tiling: Annotated[
        Literal["static", "dynamic"], option("dynamic kv tiles start at a query tile's first key", panel=TILES)
    ] = "static",
    one_d: Annotated[
        bool, option("tiles are runs of the flattened grid with as many tokens", "--one-d", panel=TILES)
    ] = False,
    attention_share: Annotated[float | None, option("share of a dense run that it takes", panel=END)] = None,
    steps: Annotated[int | None, option("of the sampler", panel=END)] = None,
    dense_steps: Annotated[int | None, option("that keep dense attention (0)", panel=END)] = None,
    paper_rounding: Annotated[
        bool, option("round the speed-up to one decimal before, as the paper does", "--paper-rounding", panel=END)
    ] = False,
) -> None:
    """Simulate neighborhood attention on a kernel that works on tiles: what a window visits, and what that can save.

    The speed-up over dense attention is all kv tiles over those of the worst query tile; beside it are that of the mean
    query tile and of the FLOPs. mask tells whether some visited tiles are only partly visible.

    \b
    vsa simulate 30 48 80 --window 18 24 24 --stride 16 8 8 --q-tile 4 8 8 --kv-tile 2 8 8
    vsa simulate 30 48 80 --window 18 24 24 --sweep --attention-share 0.607 --steps 50 --dense-steps 15
    vsa simulate 1 1 32768 --window 1 1 2048 --sweep --q-tile 1 1 256 --kv-tile 1 1 128

    Nothing is measured and no GPU is needed. A sweep takes seconds, with --one-d over three axes minutes to an hour.
    """
    given = locals()
    from vsa.attention.neighborhood.simulation_table import print_simulation

    print_simulation(given.pop("grid"), given.pop("window"), rounded=given.pop("paper_rounding"), **given)
