"""Arguments of `vsa tiles`."""

from __future__ import annotations

from typing import Annotated

import typer


def tiles(
    grid: Annotated[tuple[int, int, int], typer.Argument(help="tokens along time, height, width", metavar="T H W")],
    volume: Annotated[int, typer.Option(help="maximum number of tokens of a tile")] = 64,
    sparsity: Annotated[float, typer.Option(help="share of tiles skipped")] = 0.9,
    proposals: Annotated[int, typer.Option(help="number of tiles to propose")] = 8,
) -> None:
    """Show tiles that fill a grid of tokens, with their cost; the first column holds the settings for a run or a sweep.

    The first row is the usual cube, the second uses runs along a space-filling curve, the others are proposals: those
    that are at least 90% full come first, the most cubic one in front. pairs and executed are relative to dense
    attention.

    \b
    vsa tiles 21 30 52
    vsa train tile_thw=[7,3,3]
    """
    from vsa.attention.tile_table import describe_tiles

    for line in describe_tiles(grid, volume, sparsity, proposals):
        print(line)
