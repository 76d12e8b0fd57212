"""Arguments of `vsa tiles`."""

from __future__ import annotations

from typing import Annotated

import typer


def tiles(
    grid: Annotated[tuple[int, int, int], typer.Argument(help="tokens along time, height, width", metavar="T H W")],
    volume: Annotated[int, typer.Option(help="tokens that a tile may have")] = 64,
    sparsity: Annotated[float, typer.Option(help="share of tiles that are skipped")] = 0.9,
    proposals: Annotated[int, typer.Option(help="how many tiles to propose")] = 8,
) -> None:
    """Show which tiles fill a grid of tokens, and what they cost; the first column is what a run or a sweep takes.

    The first row is the usual cube, the second runs along a space-filling curve, the others are proposed: among those
    whose slots are at least 90% full the nearest to a cube first. pairs and executed are shares of dense attention.

    \b
    vsa tiles 21 30 52
    vsa train tile_thw=[7,3,3]
    """
    from vsa.attention.tile_table import describe_tiles

    for line in describe_tiles(grid, volume, sparsity, proposals):
        print(line)
