"""Arguments of `vsa convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument

from vsa.cli.options import MANY, Group, Precision, option
from vsa.cli.values import made_of, numbers

GATES, SAMPLING = "Budget of gates without settings (FastVideo)", "Sampling settings to record"


def convert(
    source: Annotated[str, Argument(help="run, checkpoint folder, weights folder or hub id")],
    out: Annotated[Path, Argument(help="output folder, must not exist")],
    to: Annotated[
        Literal["diffusers", "wan", "fastvideo", "run", "lora-diffusers", "lora-comfyui", "lora-musubi"],
        option("layout of OUT; lora-...: adapters and gates of a run, unmerged"),
    ] = "diffusers",
    weights: Annotated[Group | None, option("weights of a run: averaged (if any) or trained")] = None,
    dtype: Annotated[Precision | None, option("dtype of the written tensors (as the source)")] = None,
    max_shard_gb: Annotated[float, option("largest size of a file, GB", real=(1e-6, 1e6))] = 5.0,
    pipeline: Annotated[
        Path | None, option("make OUT a whole pipeline; all else is copied from this folder", metavar="FOLDER")
    ] = None,
    transformer_2: Annotated[
        str | None, option("weights of the expert of low noise, with --pipeline (Wan2.2 A14B)", metavar="SOURCE")
    ] = None,
    like: Annotated[str | None, option("run whose codec and text encoder to use", metavar="RUN")] = None,
    golden: Annotated[bool, option("write golden tensors with sparse weights", "--golden/--no-golden")] = True,
    golden_layers: Annotated[str | None, option("layers with golden tensors (all)", metavar="N,N,...")] = None,
    topk: Annotated[int | None, option("kv tiles per query tile", panel=GATES, whole=(1, MANY))] = None,
    sparsity: Annotated[float | None, option("share of tiles skipped", panel=GATES, real=(0, 1))] = None,
    grid: Annotated[
        tuple[int, int, int] | None, option("token grid of the training", panel=GATES, whole=(1, 4096), metavar="T H W")
    ] = None,
    flow_shift: Annotated[float | None, option("flow shift of the sampler", panel=SAMPLING, real=(1e-3, 1e3))] = None,
    dense_steps: Annotated[int | None, option("first steps with all tiles", panel=SAMPLING, whole=(0, MANY))] = None,
    guidance: Annotated[float | None, option("recommended guidance scale", panel=SAMPLING, real=(-100, 100))] = None,
    guidance_form: Annotated[
        Literal["standard", "additive"] | None, option("form of the guidance scale", panel=SAMPLING)
    ] = None,
    step_list: Annotated[
        str | None, option("timesteps of a distilled generator", panel=SAMPLING, metavar="T,T,...")
    ] = None,
) -> None:
    """Convert weights between runs, diffusers, Wan's original layout and FastVideo's VSA checkpoints.

    The layout of the source is detected. Tensors are copied bit for bit without --dtype. Settings that sampling needs
    are kept in sampling.json, so that --to run restores a run that can be sampled.

    \b
    vsa convert outputs/finetune_wan_1_3b/default exported --dtype bfloat16
    vsa convert Wan2.1-T2V-1.3B wan-diffusers
    vsa convert HIGH out --transformer-2 LOW --pipeline Wan2.2-T2V-A14B-Diffusers
    vsa convert FastWan/transformer exported --topk 32 --grid 16 28 52
    """
    arguments = locals()
    from vsa.checkpoints.convert import Conversion
    from vsa.checkpoints.convert import convert as convert_weights
    from vsa.checkpoints.weight_source import open_weights

    arguments["golden_layers"] = numbers("--golden-layers", golden_layers, int)
    arguments["step_list"] = numbers("--step-list", step_list, float)
    options, own = made_of(Conversion, arguments), open_weights(source, weights)
    if pipeline is not None:
        from vsa.checkpoints.whole_pipeline import convert_pipeline

        second = None if transformer_2 is None else open_weights(transformer_2, weights)
        print(*convert_pipeline(own, second, pipeline, out, options, like=like), sep="\n")
        return
    if transformer_2 is not None:
        raise ValueError(f"--transformer-2 {transformer_2} needs --pipeline, the folder of both experts' pipeline")
    print(*convert_weights(own, out, options, like=like), sep="\n")
