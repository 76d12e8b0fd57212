"""Sampling with a diffusers Wan pipeline, dense or with an attention method in its transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsa.attention.denoising import DenoisingPlan
from vsa.checkpoints.sparse_config import Grid, SparseAttentionConfig, has_sparse_config, read_sparse_config
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import WeightFiles, local_folder, pretrained_folder, read_json
from vsa.data.pretrained import component_folder
from vsa.integrations.diffusers.install import applied_attention, apply
from vsa.integrations.diffusers.pretrained import load_sparse

PIPELINE = "WanPipeline"
FIRST, SECOND = "transformer", "transformer_2"


class ClipSettings(NamedTuple):
    """Settings of a clip besides its prompt, its noise and the scheduler.

    Args:
        size: height and width in pixels.
        frames: frames of the clip.
        guidance: guidance scale, `uncond + guidance * (cond - uncond)`.
        steps: steps of the scheduler.
    """

    size: tuple[int, int]
    frames: int
    guidance: float
    steps: int


# published settings of Wan 2.1
DEFAULTS = ClipSettings(size=(480, 832), frames=81, guidance=5.0, steps=50)


def open_pipeline(
    source: str | Path,
    *,
    transformer: str | Path | None = None,
    transformer_2: str | Path | None = None,
    method: str | None = None,
    sparsity: float | None = None,
    topk: int | None = None,
    denoising: Mapping[str, Any] | None = None,
    tile_thw: Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    flow_shift: float | None = None,
    continues: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """Open a `WanPipeline` with the requested attention in its transformers.

    A transformer with `sparse_attention.json`, in the pipeline or as an argument, runs with its gates and settings.
    sparsity or topk then replace its budget and `denoising` single options of its plan; the other options do not apply
    to it. Its flow shift has priority over that of the scheduler, and with a step list a `FewStepScheduler` replaces
    the scheduler. Any other transformer stays dense without a method, tiles, a budget or a denoising plan.

    Args:
        source: pipeline folder or hub id.
        transformer: folder or hub id of a sparse transformer that replaces the pipeline's.
        transformer_2: the same for the second transformer, that of low noise (Wan2.2 A14B).
        method: see `apply`; None: video_sparse if there is a sparsity or a top-k.
        sparsity: share of tiles skipped per query tile.
        topk: tiles kept per query tile.
        denoising: options of a `DenoisingPlan`.
        tile_thw: see `apply`.
        settings: see `apply`.
        flow_shift: flow shift of the scheduler; None: that of the sparse transformer, else the scheduler's own.
        continues: open it as the `WanImageToVideoPipeline` that continues a first frame (Wan2.2 TI2V).
        dtype: dtype of transformers and text encoder; the VAE computes in float32.
        device: device of the pipeline.
    """
    try:
        from diffusers import WanImageToVideoPipeline, WanPipeline
    except ImportError:
        raise ValueError("pipelines need diffusers: pip install 'vsa-train[wan]'") from None
    from vsa.integrations.diffusers.few_step import FewStepScheduler

    index = Path(source) / "model_index.json"
    if Path(source).exists() and (name := read_json(index).get("_class_name")) != PIPELINE:
        raise ValueError(f"{index}: expected a {PIPELINE}, got {name}")
    for name in ("vae", "text_encoder", "transformer"):
        if (Path(source) / name).is_dir():
            component_folder(source, name)
    sparse = {FIRST: transformer, SECOND: transformer_2}
    if not (local_folder(source, SECOND) / SECOND).is_dir():
        if transformer_2 is not None:
            raise ValueError(f"transformer_2={transformer_2} does not apply: {source} has one transformer")
        del sparse[SECOND]
    for name, given in sparse.items():
        if given is None and _is_sparse(pretrained_folder(source, name)):
            sparse[name] = source
    sparse_sources = {name: given for name, given in sparse.items() if given is not None}
    own = dict(method=method, tile_thw=tile_thw, settings=settings)
    parts, step_lists = {}, set()
    for name, sparse_source in sparse_sources.items():
        for option, value in own.items():
            if value:
                raise ValueError(f"{option}={value} does not apply to the sparse transformer {sparse_source}")
        trained = read_sparse_config(pretrained_folder(sparse_source, name))
        step_lists.add(trained.step_list)
        if trained.step_list is not None:
            _refuse_for_list("flow shift", flow_shift, trained.step_list)
            parts["scheduler"] = FewStepScheduler(trained.step_list)
        elif flow_shift is None:
            flow_shift = trained.flow_shift
        parts[name] = load_sparse(
            sparse_source, subfolder=name, dtype=dtype, sparsity=sparsity, topk=topk, denoising=denoising
        )
    if len(step_lists) > 1:
        raise ValueError(f"the transformers of {source} are sampled in different steps: {step_lists}")
    if continues:
        # without the CLIP tokens of Wan2.1
        parts |= {"image_encoder": None, "image_processor": None}
    types = {"default": dtype, "vae": torch.float32}
    pipe = (WanImageToVideoPipeline if continues else WanPipeline).from_pretrained(source, dtype=types, **parts)
    if continues and not pipe.config["expand_timesteps"]:
        raise ValueError(f"--first-frame needs a pipeline with expand_timesteps (Wan2.2 TI2V), {source} has not")
    models = [model for model in (pipe.transformer, pipe.transformer_2) if model is not None]
    if not sparse_sources and any((*own.values(), sparsity is not None, topk is not None, denoising)):
        for model in models:
            apply(
                model,
                method or "video_sparse",
                sparsity=sparsity,
                topk=topk,
                denoising=DenoisingPlan(**(denoising or {})),
                tile_thw=tile_thw,
                settings=settings,
            )
    if flow_shift is not None:
        set_shift(pipe, flow_shift)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def trained_settings(pipe: Any) -> SparseAttentionConfig | None:
    """Settings of the first sparse transformer in a pipeline from `open_pipeline`, None without one."""
    models = [model for model in (pipe.transformer, pipe.transformer_2) if model is not None]
    applied = [applied_attention(model) for model in models]
    return next((each.trained for each in applied if each is not None), None)


def clip_settings(
    pipe: Any,
    *,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    guidance: float | None = None,
    steps: int | None = None,
) -> ClipSettings:
    """Settings of a clip; None values are taken from the sparse transformer, or from `DEFAULTS`.

    Size and frames are those of the first trained grid that matches the given ones. A few-step generator without a
    guidance setting runs a single pass, since its weights include the guidance.

    Args:
        pipe: pipeline from `open_pipeline`.
        size: height and width in pixels.
        frames: frames of the clip.
        guidance: see `ClipSettings`.
        steps: see `ClipSettings`; a few-step generator has its own.
    """
    trained = trained_settings(pipe)
    if trained is None:
        clips, scale = [(DEFAULTS.size, DEFAULTS.frames)], None
    else:
        t, h, w = _token_pixels(pipe)
        # the first latent frame holds a single frame
        missing = pipe.vae_scale_factor_temporal - 1
        clips = [((grid[1] * h, grid[2] * w), grid[0] * t - missing) for grid in trained.grids]
        scale = trained.guidance_scale
        if scale is not None and trained.guidance_form == "additive":
            # cond + s * (cond - uncond) = uncond + (s + 1) * (cond - uncond)
            scale += 1
    if scale is None:
        scale = DEFAULTS.guidance if _step_list(pipe) is None else 1.0
    fitting = [clip for clip in clips if size in (None, clip[0]) and frames in (None, clip[1])]
    own_size, own_frames = (fitting or clips)[0]
    return ClipSettings(
        size=own_size if size is None else size,
        frames=own_frames if frames is None else frames,
        guidance=scale if guidance is None else guidance,
        steps=_steps(pipe, steps),
    )


def token_grid(pipe: Any, size: tuple[int, int], frames: int) -> Grid:
    """Number of tokens of a clip along time, height and width.

    Args:
        pipe: pipeline from `open_pipeline`.
        size: height and width in pixels.
        frames: frames of the clip.
    """
    for name, value in (("frames", frames), ("size", min(size))):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    t, h, w = _token_pixels(pipe)
    for value, cell in zip(size, (h, w), strict=True):
        if value % cell:
            raise ValueError(f"height and width must be multiples of {cell}, got {size[0]}x{size[1]}")
    stride = pipe.vae_scale_factor_temporal
    if frames % stride != 1:
        raise ValueError(f"frames must be 1 + a multiple of {stride}, got {frames}")
    return (frames + stride - 1) // t, size[0] // h, size[1] // w


def _token_pixels(pipe: Any) -> tuple[int, int, int]:
    """Frames, height and width of one token, in pixels."""
    t, h, w = (pipe.transformer or pipe.transformer_2).config.patch_size
    space = pipe.vae_scale_factor_spatial
    return t * pipe.vae_scale_factor_temporal, h * space, w * space


def generate_videos(
    pipe: Any,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int],
    size: tuple[int, int],
    frames: int,
    steps: int | None = None,
    guidance: float,
    negative_prompt: str = "",
    batch_size: int = 1,
    pictures: Sequence[Tensor] = (),
    progress: Callable[[int], None] | None = None,
    keep: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Videos for prompts; a clip depends on its prompt, its seed and the settings.

    Args:
        pipe: pipeline from `open_pipeline`.
        prompts: N captions.
        seeds: N seeds of the clips' noise.
        size: height and width in pixels.
        frames: frames of a clip.
        steps: steps of the scheduler; None: those of the list of a few-step generator, else 50.
        guidance: guidance scale, `uncond + guidance * (cond - uncond)`; 1 skips the unconditional pass.
        negative_prompt: caption of the unconditional pass.
        batch_size: clips sampled together; changes them only by rounding. With pictures it is 1.
        pictures: uint8 `[H, W, 3]` in the size of the clips, one for each prompt or one for all, that the clips of a
            pipeline that `continues` begin with.
        progress: function called after every step with the number of clips it advanced; N * steps in all.
        keep: function called with the normalised latents `[B, C, t, h, w]` of each batch of clips.

    Returns:
        uint8 `[N, T, H, W, 3]`.
    """
    steps = _steps(pipe, steps)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if len(seeds) != len(prompts):
        raise ValueError(f"expected one seed for each of the {len(prompts)} prompts, got {len(seeds)}")
    # raises for sizes that the pipeline would silently round
    token_grid(pipe, size, frames)
    if pictures:
        # the pipeline encodes a batch of pictures once for each of its generators
        batch_size = 1
    videos = []
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        first = {"image": pictures[start % len(pictures)].permute(2, 0, 1)[None] / 255} if pictures else {}
        texts = list(prompts[part])

        def on_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any], num_clips: int = len(texts)) -> dict:
            if progress is not None:
                progress(num_clips)
            if keep is not None and step == steps - 1:
                keep(tensors["latents"])
            return tensors

        result = pipe(
            prompt=texts,
            negative_prompt=[negative_prompt] * len(texts),
            height=size[0],
            width=size[1],
            num_frames=frames,
            num_inference_steps=steps,
            guidance_scale=guidance,
            **_noise(pipe, seeds[part], size, frames),
            **first,
            output_type="pt",
            callback_on_step_end=on_step,
        )
        # [B, T, 3, H, W] in 0..1
        videos.append((result.frames.float() * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).cpu())
    return torch.cat(videos)


def _step_list(pipe: Any) -> Sequence[float] | None:
    """Timesteps of a few-step generator; None for any other model."""
    return pipe.scheduler.config.get("step_list")


def _steps(pipe: Any, steps: int | None) -> int:
    """Number of steps of a clip: those of a few-step generator, the requested ones, or the default."""
    step_list = _step_list(pipe)
    if step_list is not None:
        _refuse_for_list("steps", steps, step_list)
        return len(step_list)
    steps = DEFAULTS.steps if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return steps


def _noise(pipe: Any, seeds: Sequence[int], size: tuple[int, int], frames: int) -> dict[str, Any]:
    """Arguments from which a pipeline gets the noise of its clips."""
    if _step_list(pipe) is None:
        return {"generator": [torch.Generator("cpu").manual_seed(int(seed)) for seed in seeds]}
    t = (frames - 1) // pipe.vae_scale_factor_temporal + 1
    h, w = (n // pipe.vae_scale_factor_spatial for n in size)
    latents = torch.empty(len(seeds), pipe.transformer.config.in_channels, t, h, w)
    return {"latents": pipe.scheduler.start(latents, torch.tensor(seeds, dtype=torch.int64))}


def _refuse_for_list(name: str, value: float | None, step_list: Sequence[float]) -> None:
    if value is not None:
        raise ValueError(f"{name} {value} does not apply: the transformer is distilled to the steps {list(step_list)}")


def _is_sparse(folder: Path) -> bool:
    # includes gates without settings, which diffusers would skip with a line in its log
    return has_sparse_config(folder) or any(is_gate(key) for key in WeightFiles(folder).keys)


def set_shift(pipe: Any, flow_shift: float) -> None:
    """Give the scheduler of a pipeline a flow shift, in place of one that depends on the size; ValueError where it has
    none."""
    if not flow_shift > 0:
        raise ValueError(f"flow shift must be above 0, got {flow_shift}")
    config = pipe.scheduler.config
    name = next((name for name in ("flow_shift", "shift") if name in config), None)
    if name is None:
        raise ValueError(f"scheduler {type(pipe.scheduler).__name__} has no flow shift to set to {flow_shift}")
    # a dynamic shift ignores the given one
    fixed = {"use_dynamic_shifting": False} if config.get("use_dynamic_shifting") else {}
    pipe.scheduler = type(pipe.scheduler).from_config(config, **{name: flow_shift}, **fixed)
