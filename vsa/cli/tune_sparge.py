"""Arguments of `vsa tune-sparge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from vsa.cli import options as opt
from vsa.cli.options import MANY, option
from vsa.cli.values import made_of, numbers

MODEL, SEARCH = "With a model (--run)", "Search"


def tune_sparge(
    run: Annotated[str | None, option("run folder, checkpoint or export; needs --clips")] = None,
    captures: Annotated[
        Path | None, option("file of q, k, v of every layer, from compare-attention --layers 0,1,... --save")
    ] = None,
    out: Annotated[Path | None, option("output folder, or one to continue (sparge)")] = None,
    q_tokens: Annotated[int, option("tokens of a query block", whole=(4, 65_536))] = 128,
    kv_tokens: Annotated[int, option("tokens of a kv block", whole=(1, 65_536))] = 64,
    order: Annotated[Literal["raster", "hilbert"], option("order of the tokens")] = "hilbert",
    device: opt.Device = None,
    dtype: Annotated[opt.Precision | None, option("dtype of q, k, v (GPU: bfloat16, CPU: float32)")] = None,
    l1: Annotated[float | None, option("bound of the first stage's error (0.05)", panel=SEARCH, real=(0, 10))] = None,
    l2: Annotated[float | None, option("bound of both stages' error (0.06)", panel=SEARCH, real=(0, 10))] = None,
    taus: Annotated[str | None, option("shares of the softmax (0.5 to 0.99)", panel=SEARCH, metavar="TAU,...")] = None,
    thetas: Annotated[
        str | None, option("similarities, negative: ignored (-1 to 0.8)", panel=SEARCH, metavar="THETA,...")
    ] = None,
    thresholds: Annotated[
        str | None, option("lambdas of the second stage (-1 to -15)", panel=SEARCH, metavar="LAMBDA,...")
    ] = None,
    clips: Annotated[str | None, option("folder of videos, a video, or the id of a sample", panel=MODEL)] = None,
    most_clips: Annotated[int, option("maximum number of videos of a folder", panel=MODEL, whole=(1, MANY))] = 1,
    timesteps: Annotated[
        str | None, option("timesteps, 1000 is noise (900,700,500,300,100)", panel=MODEL, metavar="T,...")
    ] = None,
    latents: Annotated[
        tuple[int, int, int],
        option("latent size of a clip, for a dense export", panel=MODEL, whole=(1, 4096), metavar="T H W"),
    ] = (21, 60, 104),
    weights: Annotated[opt.Group | None, option("averaged (if any) or trained weights", panel=MODEL)] = None,
    pipeline: Annotated[str | None, option("Wan pipeline with an export's VAE and text encoder", panel=MODEL)] = None,
    seed: Annotated[int, option("seed of the noise", panel=MODEL, whole=(0, MANY))] = 0,
) -> None:
    """Tune SpargeAttn: find the sparsest tau, theta and lambda of every layer and head with errors below l1 and l2.

    Every layer is tuned on its own queries, keys and values in the model. Writes tuned.json, for attention=sparge
    attention.tuned=FILE, and tuning.html with errors against sparsity. Finished layers are kept, so that the same
    command continues after an interruption.

    \b
    vsa tune-sparge --run outputs/quickstart/default --clips VIDEOS --q-tokens 32 --kv-tokens 16 --out TUNED
    vsa tune-sparge --captures Q.safetensors --l1 0.07 --l2 0.08
    vsa compare-attention --captures Q.safetensors --method "sparge tuned=TUNED/tuned.json q_tokens=32 kv_tokens=16"
    """
    arguments = locals()
    from vsa.evaluation.sparge_tuning import TuneSettings, tune_sparge

    for name in ("taus", "thetas", "thresholds", "timesteps"):
        arguments[name] = numbers(f"--{name}", arguments[name], float)
    print(f"settings of every head: {tune_sparge(made_of(TuneSettings, arguments))}")
