"""Arguments of `vsa sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vsa.cli import options as opt
from vsa.cli.options import MANY, option
from vsa.cli.values import PLAN, plan_options, refuse_options

RUN, PIPELINE = "With a run", "With a pipeline"


def sample(
    run: Annotated[str | None, typer.Argument(help="run, checkpoint, export or pushed model (folder, hub id)")] = None,
    prompt: opt.Prompts = None,
    prompts: opt.PromptFile = None,
    out: Annotated[Path | None, option("new output folder (RUN/samples, or samples-2, ...; otherwise samples)")] = None,
    seed: Annotated[int | None, option("seed of the noise (0)", whole=(0, MANY))] = None,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    flow_shift: opt.Shift = None,
    topk: Annotated[int | None, option("kv tiles per query tile (as in training)", whole=(1, MANY))] = None,
    sparsity: Annotated[float | None, option("share of tiles skipped, instead of --topk", real=(0, 1))] = None,
    batch_size: opt.BatchSize = None,
    fps: Annotated[float | None, option("frame rate of the files (as trained; pipeline: 16)", real=(0.01, 240))] = None,
    device: opt.Device = None,
    transformer_2: opt.LowExpert = None,
    weights: Annotated[opt.Group | None, option("averaged (if any) or trained weights", panel=RUN)] = None,
    latent_shape: Annotated[
        tuple[int, int, int, int] | None,
        option("latent shape of a clip", panel=RUN, whole=(1, 4096), metavar="C T H W"),
    ] = None,
    first_frame: Annotated[
        list[Path] | None, option("picture that the clips continue; may be repeated, one a prompt")
    ] = None,
    attention: Annotated[bool | None, option("draw the tiles that are attended to", "--attention", panel=RUN)] = None,
    pipeline: Annotated[str | None, option("diffusers WanPipeline (folder, hub id)", panel=PIPELINE)] = None,
    transformer: Annotated[
        str | None, option("sparse export for the pipeline (folder, hub id)", panel=PIPELINE)
    ] = None,
    method: Annotated[
        str | None,
        option("attention method: video_sparse (with --sparsity, --topk), full, or 'NAME key=value'", panel=PIPELINE),
    ] = None,
    tile: Annotated[
        tuple[int, int, int] | None,
        option("tokens per tile of video_sparse (4 4 4)", panel=PIPELINE, whole=(1, 64), metavar="T H W"),
    ] = None,
    negative_prompt: Annotated[str | None, option("caption of the unconditional pass", panel=PIPELINE)] = None,
    size: Annotated[
        tuple[int, int] | None,
        option("clip size in pixels (as trained, 480 832)", panel=PIPELINE, whole=(1, 8192), metavar="H W"),
    ] = None,
    frames: Annotated[
        int | None, option("frames of a clip (as trained, 81)", panel=PIPELINE, whole=(1, 10_000))
    ] = None,
    dtype: Annotated[
        opt.Precision | None, option("dtype of the networks (bfloat16; CPU: float32)", panel=PIPELINE)
    ] = None,
    dense_layers: opt.DenseLayers = None,
    dense_steps: opt.DenseSteps = None,
    topk_ranges: opt.TopkRanges = None,
    sparsity_ranges: opt.SparsityRanges = None,
    step_topk: opt.StepTopk = None,
    step_sparsity: opt.StepSparsity = None,
    refresh: opt.Refresh = None,
    shared_cache: opt.SharedCache = None,
) -> None:
    """Sample videos from prompts as mp4 and GIF files, with a JSON file of all settings.

    From a run of this project, or through a diffusers Wan pipeline: dense, sparse, or with an exported transformer.

    \b
    vsa sample outputs/quickstart/default --prompt "a red circle moving left slowly"
    vsa sample --pipeline Wan2.1-T2V-1.3B-Diffusers --sparsity 0.9 --prompt "a cat on the beach"
    vsa sample --pipeline Wan2.1-T2V-1.3B-Diffusers --method "neighborhood window_thw=[9,16,24]" --prompt "a cat"
    vsa sample --pipeline Wan2.1-T2V-1.3B-Diffusers --transformer EXPORT --prompt "a cat on the beach"
    """
    arguments = {name: value for name, value in locals().items() if value is not None}
    from vsa.sampling.clip_folder import all_prompts, sample_pipeline, sample_run

    if (run is None) == (pipeline is None):
        raise ValueError(f"expected a run folder or --pipeline, got run={run} and pipeline={pipeline}")
    other, owner = (PIPELINE, "--pipeline") if pipeline is None else (RUN, "a run folder")
    refuse_options(sample, arguments, other, owner)
    captions = all_prompts(arguments.pop("prompt", []), arguments.pop("prompts", None))
    if plan := plan_options({name: arguments.pop(name) for name in PLAN if name in arguments}):
        arguments["denoising"] = plan
    if attention:
        from vsa.evaluation.attention_map import draw_attention

        arguments["attention"] = draw_attention
    folder = (sample_run if pipeline is None else sample_pipeline)(prompts=captions, **arguments)
    print(f"{len(captions)} clip{'s' * (len(captions) != 1)}, contact sheet and samples.json in {folder}")
