"""Arguments of `vsa sweep`."""

from __future__ import annotations

from typing import Annotated

import typer

# flags of Hydra pass through
CONTEXT_SETTINGS = {"ignore_unknown_options": True}


def sweep(
    name: Annotated[str, typer.Argument(help="a file of configs/sweep")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings and flags of Hydra")
    ] = None,
) -> None:
    """Train many variants with an equal budget, one run per GPU; `python train.py -m sweep=NAME` is the same.

    \b
    vsa sweep topk experiment=quickstart
    vsa sweep stages experiment=quickstart flop_budget=2e12 sweep.seeds=[0,1,2]
    vsa sweep table1 experiment=quickstart sweep.lr=3              first three learning rates per variant
    vsa sweep topk experiment=quickstart model=dit_tiny,dit_60m    every point of the sweep with both models

    The same command continues an interrupted sweep. `vsa config sweep` lists its settings.
    """
    from vsa.sweeps.command import launch_sweep

    launch_sweep(["-m", f"sweep={name}", *(settings or [])])
