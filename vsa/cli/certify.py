"""Arguments of `vsa certify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vsa.cli import options as opt
from vsa.cli.options import MANY, option
from vsa.cli.values import made_of, numbers

DENSE, CLIPS = "With a dense model", "Recall and renders"


def certify(
    model: Annotated[str, typer.Argument(help="export, or a dense pipeline or transformer (folder, hub id)")],
    out: Annotated[Path | None, option("output folder, or one to continue (NAME-certificate beside MODEL)")] = None,
    pipeline: Annotated[str | None, option("pipeline with an export's VAE and text encoder")] = None,
    latents: Annotated[
        opt.Grid | None, option("latent size of a clip (as trained, 21 60 104)", whole=(1, 4096), metavar="T H W")
    ] = None,
    dtype: Annotated[opt.Precision | None, option("dtype of the networks (bfloat16; CPU: float32)")] = None,
    device: opt.Device = None,
    seed: Annotated[int, option("seed of inputs and noise", whole=(0, MANY))] = 0,
    repeats: Annotated[int, option("timed steps", whole=(1, 10_000))] = 5,
    method: Annotated[
        str | None, option('"NAME key=value" as in configs/attention (video_sparse)', panel=DENSE)
    ] = None,
    topk: Annotated[int | None, option("kv tiles per query tile", panel=DENSE, whole=(1, MANY))] = None,
    sparsity: Annotated[float | None, option("share of tiles skipped", panel=DENSE, real=(0, 1))] = None,
    tile: Annotated[opt.Grid, option("tokens per tile", panel=DENSE, whole=(1, 64), metavar="T H W")] = (4, 4, 4),
    prompt: Annotated[list[str] | None, option("caption to render; may be repeated", panel=CLIPS)] = None,
    prompts: Annotated[Path | None, option("text file with one caption per line, or .jsonl", panel=CLIPS)] = None,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    flow_shift: opt.Shift = None,
    clips: Annotated[
        str | None, option("folder of videos or a video, for recall (a dense clip of the first prompt)", panel=CLIPS)
    ] = None,
    most_clips: Annotated[int, option("maximum number of videos of a folder", panel=CLIPS, whole=(1, MANY))] = 2,
    layers: Annotated[
        str | None, option("layers of recall (first, middle, last)", panel=CLIPS, metavar="N,...")
    ] = None,
    timesteps: Annotated[
        str | None, option("timesteps of recall, 1000 is noise (900,500,100)", panel=CLIPS, metavar="T,...")
    ] = None,
    queries: Annotated[int, option("query tokens of recall", panel=CLIPS, whole=(1, MANY))] = 256,
) -> None:
    """Certify a model with sparse attention where its weights are: is it right, how good is it, how fast is it?

    Parity: with all tiles, our attention equals that of diffusers' own class; an export also equals this project's
    network and its golden tensors. Then the time of a step, recall by head, and clips of the same noise, dense and
    sparse. Writes certificate.html and certificate.json; the same command continues after an interruption. What needs
    a VAE and a text encoder is named and left out without them. Exits with status 1 if parity fails.

    \b
    vsa certify EXPORT --pipeline Wan2.1-T2V-1.3B-Diffusers --prompts PROMPTS.txt
    vsa certify Wan2.1-T2V-1.3B-Diffusers --sparsity 0.9 --prompt "a cat on the beach" --prompt "a red car"
    """
    arguments = locals()
    from vsa.data.prompts import read_prompts
    from vsa.evaluation.certificate.folder import certify
    from vsa.evaluation.certificate.subject import CertifySettings

    arguments |= {
        "prompts": [*(prompt or []), *(read_prompts(prompts) if prompts else [])],
        "layers": numbers("--layers", layers, int),
        "timesteps": numbers("--timesteps", timesteps, float),
    }
    print(f"page and results: {certify(made_of(CertifySettings, arguments))}")
