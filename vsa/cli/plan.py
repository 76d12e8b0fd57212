"""Arguments of `vsa plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from vsa.cli.options import option

# flags of Hydra pass through
CONTEXT_SETTINGS = {"ignore_unknown_options": True}


def plan(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings of the run, as for vsa train")
    ] = None,
    gpu: Annotated[str, typer.Option(help="kind of GPU")] = "H200",
    memory: Annotated[float | None, option("GiB of one GPU; default: the kind's", real=(0.01, 1e5))] = None,
    grid: Annotated[
        tuple[int, int, int] | None,
        option("tokens along time, height, width; default: those of the data", whole=(1, 4096), metavar="T H W"),
    ] = None,
) -> None:
    """Estimate a run's memory by part, step time by part, largest micro-batch and cost, before a GPU is rented.

    Exits with status 1 and names a setting that would fit if the run does not. `dry_run=true` does the same in
    `vsa train`.

    \b
    vsa plan experiment=pretrain_120m --grid 16 32 32 trainer.accumulate_grad_batches=128
    vsa plan experiment=finetune_wan_1_3b --grid 16 28 52 trainer.devices=8 --gpu H100
    """
    from vsa.training.launch import launch
    from vsa.training.plan import planning

    launch(settings or [], planning(gpu, memory, grid))
