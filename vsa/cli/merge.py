"""Arguments of `vsa merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vsa.cli.options import option
from vsa.cli.values import numbers


def merge(
    base: Annotated[str, Argument(help="dense weights from which both others were trained")],
    out: Annotated[Path, Argument(help="output folder, must not exist")],
    sparse: Annotated[str, Option(metavar="SOURCE", help="the base adapted to sparse attention")],
    few_step: Annotated[str, Option(metavar="SOURCE", help="the base distilled to few steps, dense")],
    sparse_weight: Annotated[float, option("factor on sparse - base", real=(-100, 100), metavar="A")] = 1.0,
    few_step_weight: Annotated[float, option("factor on few_step - base", real=(-100, 100), metavar="B")] = 1.0,
    step_list: Annotated[
        str | None, Option(metavar="T,T,...", help="timesteps of --few-step weights without a step list")
    ] = None,
) -> None:
    """Merge a sparse adaptation and a few-step distillation of one dense base into one generator.

    merged = base + A * (sparse - base) + B * (few_step - base). Gates, which only the sparse weights have, are copied.
    Each source is a run, a checkpoint folder, a weights folder or a hub id. If the sparse weights are a run, the result
    is a run folder with weights only, otherwise a weights folder.

    \b
    vsa merge BASE OUT --sparse ADAPTED --few-step DISTILLED
    vsa merge BASE OUT --sparse EXPORT --few-step FOLDER --step-list 1000,757,522
    """
    from vsa.checkpoints.merge import merge_checkpoints

    steps, factors = numbers("--step-list", step_list, float), (sparse_weight, few_step_weight)
    print(*merge_checkpoints(base, out, sparse=sparse, few_step=few_step, factors=factors, steps=steps), sep="\n")
