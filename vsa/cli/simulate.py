"""Arguments of `vsa simulate`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from vsa.cli.options import option

Axes = tuple[int, int, int]
SETTING, TILES, END = "Setting", "Tiles", "End to end"


def simulate(
    grid: Annotated[Axes, typer.Argument(help="tokens along time, height, width; 1 if absent", metavar="T H W")],
    window: Annotated[Axes, option("visible tokens of a query", panel=SETTING, metavar="T H W")],
    stride: Annotated[
        Axes | None, option("queries that share a window (1 1 1)", panel=SETTING, metavar="T H W")
    ] = None,
    sweep: Annotated[bool, option("try every stride and show the best ones", "--sweep", panel=SETTING)] = False,
    dilation: Annotated[
        Axes | None, option("distance of neighbouring keys (1 1 1)", panel=SETTING, metavar="T H W")
    ] = None,
    causal: Annotated[
        tuple[bool, bool, bool] | None,
        option("1 for a causal axis, without later keys (0 0 0)", panel=SETTING, metavar="T H W"),
    ] = None,
    q_tile: Annotated[Axes | None, option("query tile (as the kv tile)", panel=TILES, metavar="T H W")] = None,
    kv_tile: Annotated[
        Axes | None,
        option("kv tile (as the query tile; without both, the best of 64 tokens)", panel=TILES, metavar="T H W"),
    ] = None,
    tiling: Annotated[
        Literal["static", "dynamic"], option("dynamic kv tiles start at a query tile's first key", panel=TILES)
    ] = "static",
    one_d: Annotated[
        bool, option("tiles are runs of the flattened grid with as many tokens", "--one-d", panel=TILES)
    ] = False,
    attention_share: Annotated[float | None, option("share of attention in the time of a dense run", panel=END)] = None,
    steps: Annotated[int | None, option("sampler steps", panel=END)] = None,
    dense_steps: Annotated[int | None, option("number of first steps with dense attention (0)", panel=END)] = None,
    paper_rounding: Annotated[
        bool, option("round the speed-up to one decimal first, as the paper does", "--paper-rounding", panel=END)
    ] = False,
) -> None:
    """Simulate neighborhood attention on a kernel that works on tiles: visited tiles and possible speed-up of a window.

    The speed-up over dense attention is the number of all kv tiles over that of the worst query tile; the table also
    has those of the mean query tile and of the FLOPs. mask shows whether some visited tiles are visible in part only.

    \b
    vsa simulate 30 48 80 --window 18 24 24 --stride 16 8 8 --q-tile 4 8 8 --kv-tile 2 8 8
    vsa simulate 30 48 80 --window 18 24 24 --sweep --attention-share 0.607 --steps 50 --dense-steps 15
    vsa simulate 1 1 32768 --window 1 1 2048 --sweep --q-tile 1 1 256 --kv-tile 1 1 128

    The simulation needs no GPU. A sweep takes seconds, with --one-d over three axes minutes to an hour.
    """
    arguments = locals()
    from vsa.attention.neighborhood.simulation_table import print_simulation

    print_simulation(
        arguments.pop("grid"), arguments.pop("window"), rounded=arguments.pop("paper_rounding"), **arguments
    )
