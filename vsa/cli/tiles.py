"""Arguments of `vsa tiles`."""

from __future__ import annotations

from typing import Annotated

import typer

from vsa.cli.options import number, option


def tiles(
    grid: Annotated[
        tuple[int, int, int],
        typer.Argument(help="tokens along time, height, width", metavar="T H W", parser=number(int, 1, 4096)),
    ],
    volume: Annotated[int, option("most tokens of a tile", whole=(1, 65_536))] = 64,
    sparsity: Annotated[float, option("share of tiles that are skipped", real=(0, 1))] = 0.9,
    proposals: Annotated[int, option("number of tiles to propose", whole=(0, 1000))] = 8,
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
