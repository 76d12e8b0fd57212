"""Arguments of `vsa inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vsa.cli import options as opt
from vsa.cli.options import MANY, option
from vsa.cli.values import made_of, numbers

LOOK, PAGE = "Measurement", "Page"


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="run folder (newest checkpoint), checkpoint or sparse export")],
    clip: Annotated[str, typer.Argument(help="video (a.mp4, its caption in a.txt), or id of a sample of its data")],
    out: Annotated[Path | None, option("output folder (RUN/inspect, or beside CLIP)", "--out", "--output")] = None,
    caption: Annotated[str | None, option("caption of the clip (its own)")] = None,
    timesteps: Annotated[
        str | None, option("timesteps, 1000 is noise (900 to 100; distilled: its own)", panel=LOOK, metavar="T,...")
    ] = None,
    layers: Annotated[
        str | None, option("layers to measure and draw (all; drawn: what fits)", panel=LOOK, metavar="N,...")
    ] = None,
    topk: Annotated[int | None, option("tiles per query tile (as trained)", panel=LOOK, whole=(1, MANY))] = None,
    sparsity: Annotated[float | None, option("share of tiles skipped", panel=LOOK, real=(0, 1))] = None,
    tokens: Annotated[int, option("query tokens for recall", panel=LOOK, whole=(1, MANY))] = 256,
    seed: Annotated[int, option("seed of the noise", panel=LOOK, whole=(0, MANY))] = 0,
    weights: Annotated[opt.Group | None, option("averaged (if any) or trained weights of a run", panel=LOOK)] = None,
    pipeline: Annotated[str | None, option("Wan pipeline with an export's VAE and text encoder", panel=LOOK)] = None,
    device: opt.Device = None,
    heads: Annotated[str | None, option("heads to draw (what fits)", panel=PAGE, metavar="N,...")] = None,
    queries: Annotated[str | None, option("query tiles to draw (what fits)", panel=PAGE, metavar="N,...")] = None,
    megabytes: Annotated[float, option("approximate size limit of the page, MB", panel=PAGE, real=(1, 1000))] = 12,
) -> None:
    """Show what a model attends to in a clip: selected tiles over its frames, recall, gates, overlap and popularity.

    The clip is encoded and noised, and the model runs once per timestep. Writes inspect.html (one file, works offline),
    PNGs, inspection.json and tables by head, layer and tile.

    \b
    vsa inspect outputs/quickstart/default clip.mp4
    vsa inspect outputs/quickstart/default clip.mp4 --caption "a red circle" --timesteps 800,400 --layers 0,3
    vsa inspect outputs/quickstart/default toy-0-000003
    """
    arguments = locals()
    from vsa.evaluation.inspection.folder import InspectSettings, inspect_checkpoint

    for name, kind in (("timesteps", float), ("layers", int), ("heads", int), ("queries", int)):
        arguments[name] = numbers(f"--{name}", arguments[name], kind)
    folder, inspection, note = inspect_checkpoint(made_of(InspectSettings, arguments))
    recall, random = (float(inspection.table(name).nanmean()) for name in ("recall", "recall_random"))
    print(f"recall {recall:.1%}, random tiles {random:.1%}", *filter(None, [note]), sep="\n")
    print(f"inspect.html, pictures and tables in {folder}")
