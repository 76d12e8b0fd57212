"""Arguments of `vsa tune-sparge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from vsa.cli import options as opt
from vsa.cli.options import MANY, option
from vsa.cli.values import made_of, numbers

MODEL, SEARCH = "Of a model (--run)", "What is tried"


def tune_sparge(
    run: Annotated[str | None, option("run folder, checkpoint or export, with --clips")] = None,
    captures: Annotated[
        Path | None, option("file of q, k, v of every layer, from compare-attention --layers 0,1,... --save")
    ] = None,
    out: Annotated[Path | None, option("folder to write to, or to go on with (sparge)")] = None,
    q_tokens: Annotated[int, option("tokens of a query block", whole=(4, 65_536))] = 128,
    kv_tokens: Annotated[int, option("tokens of a kv block", whole=(1, 65_536))] = 64,
    order: Annotated[Literal["raster", "hilbert"], option("of the tokens that blocks are cut from")] = "hilbert",
    device: opt.Device = None,
    dtype: Annotated[opt.Precision | None, option("of q, k, v (GPU bfloat16, CPU float32)")] = None,
    l1: Annotated[float | None, option("bound of the first stage's error (0.05)", panel=SEARCH, real=(0, 10))] = None,
    l2: Annotated[float | None, option("bound of both stages' error (0.06)", panel=SEARCH, real=(0, 10))] = None,
    taus: Annotated[str | None, option("shares of the softmax (0.5 to 0.99)", panel=SEARCH, metavar="TAU,...")] = None,
    thetas: Annotated[
        str | None, option("similarities, negative: no judge (-1 to 0.8)", panel=SEARCH, metavar="THETA,...")
    ] = None,
    thresholds: Annotated[
        str | None, option("lambdas of the second stage (-1 to -15)", panel=SEARCH, metavar="LAMBDA,...")
    ] = None,
    clips: Annotated[str | None, option("folder of videos, a video, or a sample's id", panel=MODEL)] = None,
    most_clips: Annotated[int, option("videos of a folder that are used", panel=MODEL, whole=(1, MANY))] = 1,
    timesteps: Annotated[str | None, option("1000: noise (900,700,500,300,100)", panel=MODEL, metavar="T,...")] = None,
    latents: Annotated[
        tuple[int, int, int], option("of a clip, for a dense export", panel=MODEL, whole=(1, 4096), metavar="T H W")
    ] = (21, 60, 104),
    weights: Annotated[opt.Group | None, option("averaged or trained", panel=MODEL)] = None,
    pipeline: Annotated[str | None, option("Wan pipeline with an export's VAE and text encoder", panel=MODEL)] = None,
    seed: Annotated[int, option("of the noise", panel=MODEL, whole=(0, MANY))] = 0,
) -> None:
    """Tune SpargeAttn: tau, theta and lambda of every layer and head, the sparsest whose error stays below l1 and l2.

    Every layer is tuned on the queries, keys and values that it sees in the model. Written are tuned.json, for
    attention=sparge attention.tuned=FILE, and tuning.html with error against sparsity. Finished layers are kept: after
    an interruption the same command goes on.

    \b
    vsa tune-sparge --run outputs/quickstart/default --clips VIDEOS --q-tokens 32 --kv-tokens 16 --out TUNED
    vsa tune-sparge --captures Q.safetensors --l1 0.07 --l2 0.08
    vsa compare-attention --captures Q.safetensors --method "sparge tuned=TUNED/tuned.json q_tokens=32 kv_tokens=16"
    """
    given = locals()
    from vsa.attention.sparge.tune import Search
    from vsa.evaluation.sparge_tuning import tune_sparge

    lists = {name: numbers(f"--{name}", given.pop(name), float) for name in ("taus", "thetas", "thresholds")}
    given["search"] = made_of(Search, lists | {name: given.pop(name) for name in ("l1", "l2")})
    given["timesteps"] = numbers("--timesteps", timesteps, float)
    print(f"settings of every head: {tune_sparge(**given)}")
