"""Sampling of prompts to a folder of clips, from a run of this project or through a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsa.attention.denoising import DenoisingPlan
from vsa.checkpoints.published import RECORD
from vsa.checkpoints.run_weights import Group
from vsa.checkpoints.weight_source import is_run
from vsa.config import attention_config
from vsa.data.clip_rules import ClipRules, clip_size
from vsa.data.codecs import Codec, WanVAE
from vsa.data.prompts import read_prompts, tidy
from vsa.data.text import describe_cut
from vsa.errors import refuse_unwritable, usable_device
from vsa.files import own_folder
from vsa.integrations.diffusers import applied_attention
from vsa.integrations.diffusers.pipeline import (
    clip_settings,
    generate_videos,
    open_pipeline,
    token_grid,
    trained_settings,
)
from vsa.progress import progress_bar
from vsa.sampling.experts import with_low
from vsa.sampling.first_frames import with_pictures
from vsa.sampling.pipeline import SampleSettings, SamplingPipeline, clip_seeds, generate, load_run
from vsa.sampling.record import settings_dict
from vsa.sampling.sample_writer import write_clips
from vsa.secrets import without_secrets


def all_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of a command line, followed by those of a file."""
    captions = [without_secrets(tidy(prompt), named=False) for prompt in prompts]
    captions += read_prompts(file) if file is not None else []
    if not captions:
        raise ValueError("no prompts: expected --prompt TEXT or --prompts FILE with one caption per line")
    return captions


def samples_folder(run: str | Path, name: str = "samples") -> Path:
    """The folder `samples` of a run, or another one, given the run folder, one of its checkpoints, or a model.

    A model that is handed on (a hub id, an export, a pushed one) keeps its files: the folder is in the current one.
    """
    path = Path(run).parents[1] if Path(run).parent.name == "checkpoints" else Path(run)
    handed_on = not is_run(run) or (path / RECORD).exists()
    return own_folder((Path() if handed_on else path) / name)


def _free_folder(named: Path | None, usual: Path) -> Path:
    """A writable folder for new clips, checked first because clips that cannot be written would be lost."""
    numbered = (usual.with_name(f"{usual.name}-{number}") for number in count(2))
    folder = named or next(folder for folder in chain([usual], numbered) if not _clips_in(folder))
    refuse_unwritable(folder)
    if there := _clips_in(folder):
        raise ValueError(f"--out {folder} already holds clips ({there[0].name}): choose another folder")
    return folder


def _first_frames(files: Sequence[Path], prompts: int, codec: Codec, size: tuple[int, int]) -> list[Tensor]:
    """First frames uint8 `[H, W, 3]` from pictures or videos, in a size (H, W)."""
    if not files:
        return []
    if len(files) not in (1, prompts):
        raise ValueError(f"expected --first-frame once or once for each of {prompts} prompts, got {len(files)}")
    rules = ClipRules(size=size, frames=1)
    return [rules.cut(file, codec)[0][0] for file in files]


def _clips_in(folder: Path) -> list[Path]:
    return [path for name in ("samples.json", "contact_sheet.png", "*.mp4") for path in folder.glob(name)]


def sample_run(
    run: str | Path,
    prompts: Sequence[str],
    *,
    out: Path | None = None,
    fps: float | None = None,
    device: str | None = None,
    weights: Group | None = None,
    transformer_2: str | Path | None = None,
    first_frame: Sequence[Path] = (),
    attention: Callable[[SamplingPipeline, str, SampleSettings, Path], Any] | None = None,
    **settings: Any,
) -> Path:
    """Sample clips from a trained run and write them to a folder, which is returned.

    Args:
        run: run folder or checkpoint folder.
        prompts: N captions.
        out: output folder, which must hold no clips; None: in the run folder the first of `samples`, `samples-2`, ...
            without any.
        fps: frame rate of the files; None: that of the run's clips.
        device: device of the model; None: a GPU if there is one.
        weights: averaged or trained weights; None: averaged ones if there are any.
        transformer_2: run of the expert of low noise, if `run` is that of high noise (Wan2.2 A14B).
        first_frame: picture files, one for each prompt or one for all, that the clips continue.
        attention: function that draws the tiles that the first clip attends to
            (`vsa.evaluation.attention_map.draw_attention`).
        settings: arguments of `SamplingPipeline.settings`.
    """
    out = _free_folder(out, samples_folder(run))
    loaded = load_run(run, weights=weights, device=usable_device(device))
    if transformer_2 is not None:
        loaded = with_low(loaded, load_run(transformer_2, weights=weights, device=loaded.device), **settings)
    sample_settings = loaded.settings(**settings)
    if cut := describe_cut(loaded.text_encoder, prompts):
        print(cut)
    size = clip_size(loaded.codec, sample_settings.latent_shape)
    pictures = _first_frames(first_frame, len(prompts), loaded.codec, (size.height, size.width))
    if pictures:
        loaded = with_pictures(loaded, pictures)
    elif loaded.takes_images:
        raise ValueError(f"{loaded.source} is an image-to-video model: name a picture with --first-frame PICTURE")
    with progress_bar("sampling", len(prompts) * sample_settings.steps) as advance:
        videos = generate(loaded, prompts, sample_settings, advance)
    record = dict(settings_dict(sample_settings, loaded))
    if pictures:
        record["first_frame"] = [str(path) for path in first_frame]
    write_clips(out, prompts, videos, record, fps=fps or loaded.fps)
    if attention is not None:
        attention(loaded, prompts[0], sample_settings, out / "attention.png")
    return out


def sample_pipeline(
    pipeline: str,
    prompts: Sequence[str],
    *,
    out: Path | None = None,
    seed: int = 0,
    batch_size: int = 1,
    fps: float = 16,
    device: str | None = None,
    negative_prompt: str = "",
    dtype: str | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    guidance: float | None = None,
    steps: int | None = None,
    tile: Sequence[int] | None = None,
    method: str | None = None,
    first_frame: Sequence[Path] = (),
    **attention: Any,
) -> Path:
    """Sample clips from a diffusers pipeline and write them to a folder, which is returned.

    Args:
        pipeline: folder or hub id of the pipeline.
        prompts: N captions.
        out: see `sample_run`; None: `samples`.
        seed: seed of the noise.
        batch_size: clips sampled together.
        fps: frame rate of the files.
        device: device of the pipeline; None: a GPU if there is one.
        negative_prompt: caption of the unconditional pass.
        dtype: dtype of the networks; None: bfloat16, on a CPU float32.
        size: see `clip_settings`.
        frames: see `clip_settings`.
        guidance: see `clip_settings`.
        steps: see `clip_settings`.
        tile: tokens per tile, see `apply`.
        method: name of a method, followed by its settings except for video_sparse: `neighborhood window_thw=[9,16,24]`.
        first_frame: see `sample_run`; for pipelines of Wan2.2 TI2V.
        attention: further arguments of `open_pipeline`.
    """
    out = _free_folder(out, Path("samples"))
    device = usable_device(device)
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    own = {"tile_thw": tile, "continues": bool(first_frame), **_named(method)}
    pipe = open_pipeline(pipeline, dtype=getattr(torch, dtype), device=device, **own, **attention)
    clip = clip_settings(pipe, size=size, frames=frames, guidance=guidance, steps=steps)
    trained, grid = trained_settings(pipe), token_grid(pipe, clip.size, clip.frames)
    if trained is not None and grid not in trained.grids:
        known_grids = ", ".join("x".join(map(str, other)) for other in trained.grids)
        print(
            f"the model was not trained on the clip's grid of {'x'.join(map(str, grid))} tokens, but on: {known_grids}"
        )
    pictures = _first_frames(first_frame, len(prompts), WanVAE(pipeline), clip.size) if first_frame else []
    shared = {"negative_prompt": negative_prompt, "batch_size": batch_size}
    with progress_bar("sampling", len(prompts) * clip.steps) as advance:
        seeds = clip_seeds(seed, prompts).tolist()
        # a few-step generator has its own steps
        options = {**clip._asdict(), "steps": steps, **shared}
        videos = generate_videos(pipe, prompts, seeds=seeds, pictures=pictures, progress=advance, **options)
    applied = applied_attention(pipe.transformer or pipe.transformer_2)
    plan = DenoisingPlan() if applied is None else applied.plan
    record = {
        "pipeline": pipeline,
        **{name: attention.get(name) for name in ("transformer", "transformer_2")},
        "seed": seed,
        **clip._asdict(),
        **shared,
        "dtype": dtype,
        "dense_layers": list(plan.dense_layers),
        "dense_steps": plan.dense_steps,
        "denoising": plan.changes(),
        **_pipeline_record(pipe),
        **({"first_frame": [str(path) for path in first_frame]} if pictures else {}),
    }
    write_clips(out, prompts, videos, record, fps=fps)
    return out


def _named(method: str | None) -> dict[str, Any]:
    """Name and settings of a method from the command line, completed by the defaults of its config."""
    if method is None:
        return {}
    name, *words = method.split() or [""]
    if name == "video_sparse":
        if words:
            raise ValueError(f"--method {name}: its settings are --tile, --sparsity and --topk, got {' '.join(words)}")
        return {"method": name}
    node = attention_config(name, words)
    return {"method": name, "settings": {key: value for key, value in node.items() if not key.startswith("_")}}


def _pipeline_record(pipe: Any) -> dict[str, Any]:
    """Settings of the scheduler, and the attention of each transformer in its last pass."""
    config = pipe.scheduler.config
    applied = {name: applied_attention(getattr(pipe, name)) for name in ("transformer", "transformer_2")}
    return {
        "step_list": config.get("step_list"),
        "flow_shift": config.get("flow_shift", config.get("shift")),
        "scheduler": type(pipe.scheduler).__name__,
        # without transformers that no step has used
        "attention": {name: method.describe() for name, method in applied.items() if method is not None and method.ran},
    }
