"""Prompts in, a folder of clips out: from a run of this project or through a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vsa.data.prompts import read_prompts
from vsa.errors import refuse_unwritable, usable_device
from vsa.integrations.diffusers import applied_attention
from vsa.integrations.diffusers.pipeline import (
    clip_settings,
    generate_videos,
    open_pipeline,
    token_grid,
    trained_settings,
)
from vsa.sampling.pipeline import LoadedRun, SampleSettings, clip_seeds, generate, load_run, settings_dict
from vsa.sampling.sample_writer import write_clips


def all_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of a command line and then those of a file.

    Raises:
        ValueError: there is none.
    """
    found = [*prompts, *(read_prompts(file) if file is not None else [])]
    if not found:
        raise ValueError("no prompts: give --prompt TEXT or --prompts FILE with one caption per line")
    return found


def samples_folder(run: str | Path) -> Path:
    """`samples` in the run folder, also when a checkpoint of it was named."""
    path = Path(run)
    return (path.parent.parent if path.parent.name == "checkpoints" else path) / "samples"


def sample_run(
    run: str | Path,
    prompts: Sequence[str],
    out: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    guidance: float | None = None,
    flow_shift: float | None = None,
    topk: int | None = None,
    sparsity: float | None = None,
    batch_size: int = 16,
    fps: float = 8,
    device: str | None = None,
    weights: Literal["ema", "model"] | None = None,
    latent_shape: Sequence[int] | None = None,
) -> tuple[LoadedRun, SampleSettings]:
    """Write the clips of a trained run to `out`; None takes what the run says. See `LoadedRun.settings`."""
    # clips that cannot be written would be lost
    refuse_unwritable(out)
    loaded = load_run(run, weights=weights, device=usable_device(device))
    settings = loaded.settings(
        seed=seed,
        steps=steps,
        guidance=guidance,
        flow_shift=flow_shift,
        topk=topk,
        sparsity=sparsity,
        latent_shape=latent_shape,
        batch_size=batch_size,
    )
    with sampling_progress() as progress:
        task = progress.add_task("sampling", total=len(prompts) * settings.steps)
        videos = generate(loaded, prompts, settings, lambda clips: progress.advance(task, clips))
    write_clips(out, prompts, videos, settings_dict(settings, loaded), fps=fps)
    return loaded, settings


def sample_pipeline(
    pipeline: str,
    prompts: Sequence[str],
    out: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    guidance: float | None = None,
    flow_shift: float | None = None,
    topk: int | None = None,
    sparsity: float | None = None,
    batch_size: int = 1,
    fps: float = 16,
    device: str | None = None,
    transformer: str | None = None,
    method: str | None = None,
    tile: Sequence[int] | None = None,
    dense_layers: Sequence[int] = (),
    dense_steps: int = 0,
    negative_prompt: str = "",
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    dtype: str | None = None,
) -> None:
    """Write the clips of a diffusers pipeline to `out`; see `open_pipeline` and `generate_videos`."""
    refuse_unwritable(out)
    device = usable_device(device)
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    pipe = open_pipeline(
        pipeline,
        transformer=transformer,
        method=method,
        sparsity=sparsity,
        topk=topk,
        dense_layers=dense_layers,
        dense_steps=dense_steps,
        tile_thw=tile,
        flow_shift=flow_shift,
        dtype=getattr(torch, dtype),
        device=device,
    )
    clip = clip_settings(pipe, size=size, frames=frames, guidance=guidance, steps=steps)
    trained, grid = trained_settings(pipe), token_grid(pipe, clip.size, clip.frames)
    if trained is not None and grid not in trained.grids:
        known = ", ".join("x".join(map(str, other)) for other in trained.grids)
        print(f"the clip's grid of {'x'.join(map(str, grid))} tokens is none of those trained on: {known}")
    with sampling_progress() as progress:
        task = progress.add_task("sampling", total=len(prompts) * clip.steps)
        videos = generate_videos(
            pipe,
            prompts,
            seeds=clip_seeds(seed, len(prompts)).tolist(),
            size=clip.size,
            frames=clip.frames,
            steps=steps,
            guidance=clip.guidance,
            negative_prompt=negative_prompt,
            batch_size=batch_size,
            progress=lambda clips: progress.advance(task, clips),
        )
    record = {
        "pipeline": pipeline,
        "transformer": transformer,
        "seed": seed,
        "steps": clip.steps,
        "size": list(clip.size),
        "frames": clip.frames,
        "guidance": clip.guidance,
        "negative_prompt": negative_prompt,
        "dtype": dtype,
        "batch_size": batch_size,
        # those of a sparse transformer are its own
        "dense_layers": list(dense_layers if trained is None else trained.dense_layers),
        "dense_steps": dense_steps if trained is None else trained.dense_steps,
        **_pipeline_record(pipe),
    }
    write_clips(out, prompts, videos, record, fps=fps)


def _pipeline_record(pipe: Any) -> dict[str, Any]:
    """The scheduler's settings, and what each transformer's attention kept in its last pass."""
    config = pipe.scheduler.config
    applied = {name: applied_attention(getattr(pipe, name)) for name in ("transformer", "transformer_2")}
    return {
        "step_list": config.get("step_list"),
        "flow_shift": config.get("flow_shift", config.get("shift")),
        "scheduler": type(pipe.scheduler).__name__,
        # a transformer that no step reached has nothing to tell
        "attention": {name: found.describe() for name, found in applied.items() if found is not None and found.ran},
    }


def sampling_progress() -> Progress:
    """A progress bar over clip-steps."""
    return Progress(TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
