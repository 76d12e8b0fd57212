"""Arguments of `vsa compare-attention`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from vsa.cli import options as opt
from vsa.cli.options import MANY, option
from vsa.cli.values import PLAN, made_of, numbers, plan_options

MODEL, DRAWN, MEASURED = "With a model (--run or --pipeline)", "Synthetic fields (--synthetic)", "Measurement"


def compare_attention(
    run: Annotated[str | None, option("run folder, checkpoint or export; needs --clips, --prompt or both")] = None,
    captures: Annotated[Path | None, option("file of captures written by --save")] = None,
    synthetic: Annotated[
        opt.Grid | None, option("generate random fields over this grid", whole=(1, 4096), metavar="T H W")
    ] = None,
    method: Annotated[
        list[str] | None, option('"NAME topk=K key=value" as in configs/attention; may be repeated (all but presets)')
    ] = None,
    sparsity: Annotated[
        str | None, option("sparsities of all methods, without --method (0.5,0.75,0.875)", metavar="S,...")
    ] = None,
    tile: Annotated[
        opt.Grid | None, option("tokens per tile (the model's, 4 4 4)", whole=(1, 64), metavar="T H W")
    ] = None,
    out: Annotated[Path | None, option("output folder (comparison, in a run's folder)")] = None,
    device: opt.Device = None,
    seed: Annotated[int, option("seed of fields, noise and sampled queries", whole=(0, MANY))] = 0,
    clips: Annotated[str | None, option("folder of videos, a video, or the id of a sample", panel=MODEL)] = None,
    most_clips: Annotated[int, option("maximum number of videos of a folder", panel=MODEL, whole=(1, MANY))] = 2,
    layers: Annotated[
        str | None, option("layers to capture (first, middle, last)", panel=MODEL, metavar="N,...")
    ] = None,
    timesteps: Annotated[
        str | None, option("timesteps to capture, 1000 is noise (900,500,100)", panel=MODEL, metavar="T,...")
    ] = None,
    save: Annotated[Path | None, option("write q, k, v to this safetensors file", panel=MODEL)] = None,
    prompt: Annotated[
        list[str] | None, option("caption to denoise with every method; may be repeated", panel=MODEL)
    ] = None,
    prompts: Annotated[Path | None, option("text file with one caption per line, or .jsonl", panel=MODEL)] = None,
    held_out: Annotated[int, option("held-out captions of a run to denoise too", panel=MODEL, whole=(0, 4096))] = 0,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    flow_shift: opt.Shift = None,
    latents: Annotated[
        opt.Grid, option("latent size of a clip, if no run defines it", panel=MODEL, whole=(1, 4096), metavar="T H W")
    ] = (21, 60, 104),
    weights: Annotated[opt.Group | None, option("averaged (if any) or trained weights", panel=MODEL)] = None,
    pipeline: Annotated[
        str | None, option("WanPipeline to compare, or VAE and text encoder of an export", panel=MODEL)
    ] = None,
    dense_layers: opt.DenseLayers = None,
    dense_steps: opt.DenseSteps = None,
    topk_ranges: opt.TopkRanges = None,
    sparsity_ranges: opt.SparsityRanges = None,
    step_topk: opt.StepTopk = None,
    step_sparsity: opt.StepSparsity = None,
    refresh: opt.Refresh = None,
    shared_cache: opt.SharedCache = None,
    heads: Annotated[int, option("attention heads", panel=DRAWN, whole=(1, 1024))] = 4,
    head_dim: Annotated[int, option("head dim", panel=DRAWN, whole=(6, 1024))] = 64,
    queries: Annotated[int, option("query tokens for recall and error", panel=MEASURED, whole=(1, MANY))] = 256,
    repeats: Annotated[int, option("timed calls of each method", panel=MEASURED, whole=(1, 10_000))] = 5,
    dtype: Annotated[
        opt.Precision | None, option("dtype of q, k, v (GPU: bfloat16, CPU: float32)", panel=MEASURED)
    ] = None,
) -> None:
    """Compare attention methods: density, recall, error and time on the same q, k, v, and clips from the same noise.

    Queries, keys and values come from a model on clips, from a file, or from random fields with the locality of video
    and noise. Oracle tiles have the most recall of as many tiles, not always the least error. Clips are compared with
    those of dense attention: PSNR, SSIM and cosine of latents, with intervals over the prompts. Settings of the
    denoising apply to all methods except dense attention. Writes comparison.html (one file, works offline), PNGs, CSVs
    and comparison.json.

    \b
    vsa compare-attention --synthetic 8 16 16
    vsa compare-attention --run outputs/quickstart/default --clips VIDEOS --prompt "a red circle" --save Q.safetensors
    vsa compare-attention --pipeline Wan2.1-T2V-1.3B-Diffusers --prompt "a cat" --dense-steps 8 --refresh 4
    vsa compare-attention --captures Q.safetensors --method "video_sparse topk=8" --method "pooled_tail topk=8"
    """
    arguments = locals()
    from vsa.data.prompts import read_prompts
    from vsa.evaluation.comparison.folder import compare_attention
    from vsa.evaluation.comparison.settings import CompareSettings

    arguments |= {
        "methods": method,
        "prompts": [*(prompt or []), *(read_prompts(prompts) if prompts else [])],
        "sparsities": numbers("--sparsity", sparsity, float),
        "layers": numbers("--layers", layers, int),
        "timesteps": numbers("--timesteps", timesteps, float),
        "denoising": plan_options({name: arguments[name] for name in PLAN if arguments[name] is not None}),
    }
    print(f"page, figures and tables: {compare_attention(made_of(CompareSettings, arguments))}")
