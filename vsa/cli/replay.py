"""Arguments of `vsa replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    path: Annotated[Path, typer.Argument(help="folder of a dropped step: RUN/nan-dumps/step-N-NETWORK")],
    accelerator: Annotated[
        str, typer.Option(help="auto, cpu or gpu; other devices than the run's round otherwise")
    ] = "auto",
) -> None:
    """Run a step again whose gradients were not finite, and say which tensor was the first.

    Exit status 0 when the losses are the same bit for bit and something is not finite again, 1 otherwise. The data of
    the run must still be there.

    \b
    vsa replay outputs/quickstart/default/nan-dumps/step-00001200-model
    """
    from vsa.training.replay import replay_step

    result = replay_step(path, accelerator=accelerator)
    for line in result.lines():
        print(line)
    raise typer.Exit(0 if result.reproduced else 1)
