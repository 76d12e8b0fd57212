"""Sample videos: prompts in, mp4 and GIF out, with a JSON of everything that made them.

From a run of this project:
python scripts/sample.py outputs/quickstart/default --prompt "a red circle moving left slowly"

Through a diffusers Wan pipeline, dense, with sparse attention put in, or with a sparse transformer we exported:
python scripts/sample.py --pipeline Wan2.1-T2V-1.3B-Diffusers --sparsity 0.9 --prompt "a cat on the beach"
python scripts/sample.py --pipeline Wan2.1-T2V-1.3B-Diffusers --transformer exported --prompt "a cat on the beach"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vsa.data.prompts import read_prompts
from vsa.errors import one_line_errors, refuse_unwritable, usable_device
from vsa.evaluation.attention_map import draw_attention
from vsa.integrations.diffusers import applied_attention
from vsa.integrations.diffusers.pipeline import (
    ClipSettings,
    clip_settings,
    generate_videos,
    open_pipeline,
    token_grid,
    trained_settings,
)
from vsa.sampling.pipeline import clip_seeds, generate, load_run, settings_dict
from vsa.sampling.sample_writer import write_clips

# what an option that was left out means, for a run and for a pipeline; the others have no meaning in the other mode.
# None: what the run or the export says
BOTH = {
    "steps": (None, None),
    "guidance": (None, None),
    "batch_size": (16, 1),
    "fps": (8, 16),
}
RUN_ONLY = {"weights": None, "latent_shape": None, "attention": False}
PIPELINE_ONLY = {
    "transformer": None,
    "method": None,
    "tile": None,
    "dense_layers": (),
    "dense_steps": 0,
    "negative_prompt": "",
    "size": None,
    "frames": None,
    "dtype": None,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of its mode filled in.

    Raises:
        ValueError: not exactly one of a run and a pipeline, or an option of the other mode.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="run folder (newest checkpoint) or checkpoint folder")
    parser.add_argument("--prompt", action="append", default=[], help="a caption; may be repeated")
    parser.add_argument("--prompts", type=Path, help="text file with one caption per line, or .jsonl")
    parser.add_argument("--out", type=Path, help="folder to write to (RUN/samples, or samples)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="sampler steps (as the run samples; 50; a distilled model: its own)")
    parser.add_argument(
        "--guidance", type=float, help="uncond + G * (cond - uncond); 1: one pass (as the run samples; 5; distilled: 1)"
    )
    parser.add_argument("--shift", type=float, help="flow shift (as the run samples; of the export, the scheduler)")
    parser.add_argument("--topk", type=int, help="tiles per query tile (that of the training)")
    parser.add_argument("--sparsity", type=float, help="share of tiles skipped, instead of --topk")
    parser.add_argument("--batch-size", type=int, help="clips computed together (16, 1)")
    parser.add_argument("--fps", type=float, help="of the files (8, 16)")
    parser.add_argument("--device", help="cpu, cuda, ... (cuda when there is one)")

    run = parser.add_argument_group("of a run")
    run.add_argument("--weights", choices=("ema", "model"), help="averaged (where there are any) or trained weights")
    run.add_argument("--latent-shape", type=int, nargs=4, metavar=("C", "T", "H", "W"), help="shape of one clip")
    run.add_argument(
        "--attention", action="store_true", default=None, help="draw which tiles the first clip's queries attend to"
    )

    pipeline = parser.add_argument_group("of a pipeline")
    pipeline.add_argument("--pipeline", help="diffusers WanPipeline: folder or hub id")
    pipeline.add_argument("--transformer", help="sparse transformer to use in it: folder or hub id of an export")
    pipeline.add_argument(
        "--method", help="attention to put in: video_sparse (default with --sparsity, --topk) or full"
    )
    pipeline.add_argument("--tile", type=int, nargs=3, metavar=("T", "H", "W"), help="tokens per tile (4 4 4)")
    pipeline.add_argument("--dense-layers", type=int, nargs="+", metavar="N", help="layers that keep all tiles")
    pipeline.add_argument("--dense-steps", type=int, help="first denoising steps that keep all tiles")
    pipeline.add_argument("--negative-prompt", help="caption of the unconditional pass")
    pipeline.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="pixels (as trained, 480 832)")
    pipeline.add_argument("--frames", type=int, help="of a clip (as trained, 81)")
    pipeline.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the networks (bfloat16, on the CPU float32)"
    )
    args = parser.parse_args(argv)
    if (args.run is None) == (args.pipeline is None):
        raise ValueError(f"give a run folder or --pipeline, got run={args.run} and pipeline={args.pipeline}")
    fill_defaults(args)
    return args


def fill_defaults(args: argparse.Namespace) -> None:
    """Values of the options that were left out.

    Raises:
        ValueError: an option of the other mode was given.
    """
    mode = 0 if args.pipeline is None else 1
    own, other = (RUN_ONLY, PIPELINE_ONLY) if mode == 0 else (PIPELINE_ONLY, RUN_ONLY)
    for name in other:
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is an option of {'--pipeline' if mode == 0 else 'a run folder'} only")
    for name, default in own.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    for name, defaults in BOTH.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[mode])


def sampling_progress() -> Progress:
    return Progress(TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    prompts = args.prompt + (read_prompts(args.prompts) if args.prompts is not None else [])
    if not prompts:
        raise ValueError("no prompts: give --prompt TEXT or --prompts FILE with one caption per line")
    if args.fps <= 0:
        raise ValueError(f"fps must be positive, got {args.fps}")
    out = args.out
    if out is None:
        out = Path("samples") if args.pipeline is not None else default_out(args.run)
    # clips that cannot be written would be lost
    refuse_unwritable(out)
    (sample_run if args.pipeline is None else sample_pipeline)(args, prompts, out)
    print(f"{len(prompts)} clips, contact sheet and samples.json in {out}")


def sample_run(args: argparse.Namespace, prompts: list[str], out: Path) -> None:
    """Clips of a trained run."""
    run = load_run(args.run, weights=args.weights, device=usable_device(args.device))
    settings = run.settings(
        seed=args.seed,
        steps=args.steps,
        guidance=args.guidance,
        flow_shift=args.shift,
        topk=args.topk,
        sparsity=args.sparsity,
        latent_shape=args.latent_shape,
        batch_size=args.batch_size,
    )
    with sampling_progress() as progress:
        task = progress.add_task("sampling", total=len(prompts) * settings.steps)
        videos = generate(run, prompts, settings, lambda clips: progress.advance(task, clips))
    write_clips(out, prompts, videos, settings_dict(settings, run), fps=args.fps)
    if args.attention:
        draw_attention(run, prompts[0], settings, out / "attention.png")


def sample_pipeline(args: argparse.Namespace, prompts: list[str], out: Path) -> None:
    """Clips of a diffusers pipeline."""
    device = usable_device(args.device)
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    pipe = open_pipeline(
        args.pipeline,
        transformer=args.transformer,
        method=args.method,
        sparsity=args.sparsity,
        topk=args.topk,
        dense_layers=args.dense_layers,
        dense_steps=args.dense_steps,
        tile_thw=args.tile,
        flow_shift=args.shift,
        dtype=getattr(torch, dtype),
        device=device,
    )
    size = None if args.size is None else tuple(args.size)
    clip = clip_settings(pipe, size=size, frames=args.frames, guidance=args.guidance, steps=args.steps)
    trained, grid = trained_settings(pipe), token_grid(pipe, clip.size, clip.frames)
    if trained is not None and grid not in trained.grids:
        known = ", ".join("x".join(map(str, other)) for other in trained.grids)
        print(f"the clip's grid of {'x'.join(map(str, grid))} tokens is none of those trained on: {known}")
    with sampling_progress() as progress:
        task = progress.add_task("sampling", total=len(prompts) * clip.steps)
        videos = generate_videos(
            pipe,
            prompts,
            seeds=clip_seeds(args.seed, len(prompts)).tolist(),
            size=clip.size,
            frames=clip.frames,
            steps=args.steps,
            guidance=clip.guidance,
            negative_prompt=args.negative_prompt,
            batch_size=args.batch_size,
            progress=lambda clips: progress.advance(task, clips),
        )
    write_clips(out, prompts, videos, pipeline_record(args, pipe, clip, dtype), fps=args.fps)


def pipeline_record(args: argparse.Namespace, pipe: Any, clip: ClipSettings, dtype: str) -> dict[str, Any]:
    """Plain values of the settings, and what each transformer's attention kept in its last pass."""
    config = pipe.scheduler.config
    models = {name: getattr(pipe, name) for name in ("transformer", "transformer_2")}
    applied = {name: applied_attention(model) for name, model in models.items()}
    # those of a sparse transformer are its own
    trained = trained_settings(pipe)
    dense = args if trained is None else trained
    return {
        "pipeline": str(args.pipeline),
        "transformer": args.transformer,
        "seed": args.seed,
        "steps": clip.steps,
        "step_list": config.get("step_list"),
        "size": list(clip.size),
        "frames": clip.frames,
        "guidance": clip.guidance,
        "flow_shift": config.get("flow_shift", config.get("shift")),
        "scheduler": type(pipe.scheduler).__name__,
        "negative_prompt": args.negative_prompt,
        "dtype": dtype,
        "batch_size": args.batch_size,
        "dense_layers": list(dense.dense_layers),
        "dense_steps": dense.dense_steps,
        # a transformer that no step reached has nothing to tell
        "attention": {name: found.describe() for name, found in applied.items() if found is not None and found.ran},
    }


def default_out(run: str) -> Path:
    """`samples` in the run folder, also when a checkpoint of it was named."""
    path = Path(run)
    return (path.parent.parent if path.parent.name == "checkpoints" else path) / "samples"


if __name__ == "__main__":
    with one_line_errors():
        main()
