"""Arguments of `vsa replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    path: Annotated[Path, typer.Argument(help="folder of a dropped step: RUN/nan-dumps/step-N-NETWORK")],
    accelerator: Annotated[
        str, typer.Option(help="auto, cpu or gpu; another device than the run's rounds differently")
    ] = "auto",
) -> None:
    """Repeat a step whose gradients were not finite, and find the first non-finite tensor.

    Exits with status 0 if the losses are equal bit for bit and a tensor is not finite again, with 1 otherwise. Needs
    the data of the run.

    \b
    vsa replay outputs/quickstart/default/nan-dumps/step-00001200-model
    """
    from vsa.training.replay import replay_step

    result = replay_step(path, accelerator=accelerator)
    for line in result.lines():
        print(line)
    raise typer.Exit(0 if result.reproduced else 1)
