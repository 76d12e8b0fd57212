"""Shared parts of the commands: checked numbers, and options that several commands have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """Parser of a finite number in `least..most`; typer's range accepts NaN and does not print the value."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            what = "an integer" if kind is int else "a number"
            raise typer.BadParameter(f"expected {what} from {least:g} to {most:g}, got {text}")
        return value

    return parse


def option(
    text: str,
    *names: str,
    panel: str | None = None,
    whole: tuple[int, int] | None = None,
    real: tuple[float, float] | None = None,
    metavar: str | None = None,
) -> Any:
    """A typer option with its help text.

    Args:
        text: help text.
        names: names of the option; by default that of the argument.
        panel: heading in the help.
        whole: range of an integer.
        real: range of a float.
        metavar: placeholder of the value.
    """
    kind, bounds = (int, whole) if whole is not None else (float, real)
    parser = None if bounds is None else number(kind, *bounds)
    placeholder = metavar or (None if bounds is None else "INTEGER" if whole is not None else "FLOAT")
    return typer.Option(*names, help=text, rich_help_panel=panel, parser=parser, metavar=placeholder)


MANY = 1_000_000_000


Grid = tuple[int, int, int]
Precision = Literal["float32", "bfloat16", "float16"]
Group = Literal["ema", "model"]
Weights = Annotated[Group | None, option("averaged (if any) or trained weights")]
Prompts = Annotated[list[str] | None, option("a caption; may be repeated", "--prompt")]
PromptFile = Annotated[Path | None, option("text file with one caption per line, or .jsonl", "--prompts")]
Device = Annotated[str | None, option("cpu, cuda, cuda:1, ... (cuda if available)")]
BatchSize = Annotated[int | None, option("clips sampled together (16; pipeline: 1)", whole=(1, 65_536))]
Steps = Annotated[int | None, option("sampler steps (the run's, 50; distilled: its own)", whole=(1, 10_000))]
Guidance = Annotated[
    float | None, option("guidance G, uncond + G * (cond - uncond) (the run's, 5; distilled: 1)", real=(-100, 100))
]
LowExpert = Annotated[
    str | None,
    option("run of the expert of low noise (Wan2.2 A14B); with a pipeline, its sparse export", metavar="RUN|EXPORT"),
]
Shift = Annotated[
    float | None, option("flow shift (that of the run, the export or the scheduler)", "--shift", real=(1e-3, 1e3))
]

DENOISING = "Changes during the denoising"
DenseLayers = Annotated[str | None, option("layers that are dense", panel=DENOISING, metavar="N,...")]
DenseSteps = Annotated[int | None, option("number of first steps that are dense", panel=DENOISING, whole=(0, MANY))]
TopkRanges = Annotated[str | None, option("top-k by progress, 0 is noise", panel=DENOISING, metavar="START:STOP:K,...")]
SparsityRanges = Annotated[str | None, option("sparsity by progress", panel=DENOISING, metavar="START:STOP:S,...")]
StepTopk = Annotated[str | None, option("top-k from a step on", panel=DENOISING, metavar="STEP:K,...")]
StepSparsity = Annotated[str | None, option("sparsity from a step on", panel=DENOISING, metavar="STEP:S,...")]
Refresh = Annotated[
    str | None, option("steps that share a selection (1), or by step", panel=DENOISING, metavar="N|STEP:N,...")
]
SharedCache = Annotated[
    bool | None, option("share selections with the unconditional pass", "--shared-cache/--own-cache", panel=DENOISING)
]
