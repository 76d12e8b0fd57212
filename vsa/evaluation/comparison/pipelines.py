"""q, k, v and whole denoising runs of a diffusers Wan pipeline: its own transformer, sampler and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPlan
from vsa.attention.full import FullAttention
from vsa.attention.layout import Segment
from vsa.attention.sparsity import ConstantSparsity
from vsa.attention.tiling import Grid
from vsa.data.clip_rules import clip_size
from vsa.data.codecs import WanVAE
from vsa.diffusion.flow_matching import TIMESTEP_SCALE, add_noise, noise_like
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.evaluation.comparison.captures import Capture, Captures, Watched
from vsa.evaluation.comparison.computed import computed_pairs
from vsa.evaluation.comparison.denoise import Denoised, compared
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.inspection.clip import Clip, read_clip
from vsa.integrations.diffusers import apply, remove
from vsa.integrations.diffusers.pipeline import (
    ClipSettings,
    clip_settings,
    generate_videos,
    open_pipeline,
    token_grid,
    trained_settings,
)
from vsa.machine import seconds_now
from vsa.progress import progress_bar
from vsa.sampling.pipeline import clip_seeds


class OpenedPipeline:
    """A dense pipeline, opened for a comparison.

    Args:
        source: folder or hub id.
        latents: latent frames, rows and columns of a clip.
        flow_shift: of the scheduler; None: its own.
        dtype: of the networks.
        device: where they go.
    """

    def __init__(self, source: str, latents: Grid, *, flow_shift: float | None, dtype: torch.dtype, device: str):
        self.source, self.device = source, device
        self.pipe = open_pipeline(source, flow_shift=flow_shift, dtype=dtype, device=device)
        if trained_settings(self.pipe) is not None:
            raise ValueError(f"--pipeline {source} has a sparse transformer: give it as --run {source}")
        self.codec = WanVAE(source)
        self.shape = (self.codec.channels, *latents)
        if (channels := transformers(self.pipe)[0].config.in_channels) != self.codec.channels:
            raise ValueError(
                f"--pipeline {source} takes {channels} latent channels, its VAE makes {self.codec.channels}"
            )
        self.num_layers = len(transformers(self.pipe)[0].blocks)
        t, h, w = (n // side for n, side in zip(latents, transformers(self.pipe)[0].config.patch_size, strict=True))
        self.grid_thw: Grid = (t, h, w)

    def plan(
        self, methods: Sequence[Method], options: Mapping[str, Any], *, steps: int | None, guidance: float | None
    ) -> DenoisingPlan:
        """What all methods but dense attention follow in `denoise`; see `pipeline_plan`."""
        clip = clip_size(self.codec, self.shape)
        size = (clip.height, clip.width)
        self.clip = clip_settings(self.pipe, size=size, frames=clip.frames, guidance=guidance, steps=steps)
        return pipeline_plan(self.pipe, methods, self.clip, options)

    def capture(self, videos: Sequence[str], layers: Sequence[int], timesteps: Sequence[float], seed: int) -> Captures:
        """q, k, v of videos; see `capture_pipeline`."""
        clips = [read_clip(Path(name), self.codec, [self.shape], device=self.device) for name in videos]
        assert self.codec.statistics is not None
        mean, std = self.codec.statistics
        with progress_bar("capturing", len(clips) * len(timesteps), transient=True) as advance:
            return capture_pipeline(
                self.pipe,
                clips,
                LatentStatistics(mean=mean, std=std),
                source=self.source,
                layers=layers,
                timesteps=timesteps,
                seed=seed,
                progress=advance,
            )

    def denoise(
        self, prompts: Sequence[str], methods: Sequence[Method], plan: DenoisingPlan, seed: int
    ) -> tuple[list[Denoised], Mapping[str, Any]]:
        """Rows of `compare_pipeline`, and how was sampled."""
        with progress_bar("denoising", len(prompts) * self.clip.steps * len(methods), transient=True) as advance:
            rows = compare_pipeline(self.pipe, prompts, methods, self.clip, plan, seed=seed, progress=advance)
        weights = f"diffusers, {transformers(self.pipe)[0].dtype}".replace("torch.", "")
        own = {"checkpoint": self.source, "weights": weights, "seed": seed, "latent_shape": list(self.shape)}
        return rows, {**own, **self.clip._asdict(), "scheduler": dict(self.pipe.scheduler.config)}


def transformers(pipe: Any) -> list[Any]:
    """The networks of a pipeline: one, or those of high and of low noise (Wan2.2)."""
    return [model for model in (pipe.transformer, pipe.transformer_2) if model is not None]


def transformer_at(pipe: Any, timestep: float) -> Any:
    """The network that denoises at a timestep in [0, 1000]."""
    boundary = pipe.config.boundary_ratio
    if pipe.transformer is None or pipe.transformer_2 is None or boundary is None:
        return transformers(pipe)[0]
    return pipe.transformer if timestep >= boundary * pipe.scheduler.config.num_train_timesteps else pipe.transformer_2


@torch.no_grad()
def capture_pipeline(
    pipe: Any,
    clips: Sequence[Clip],
    statistics: LatentStatistics,
    *,
    source: str,
    layers: Sequence[int],
    timesteps: Sequence[float],
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Captures:
    """What layers of a pipeline's transformer see of clips at noise levels, with its dense attention.

    Args:
        pipe: dense, from `open_pipeline`.
        clips: of its VAE.
        statistics: of the VAE's latents.
        source: of the pipeline, for a reader.
        layers: numbers.
        timesteps: in [0, 1000].
        seed: of the noise.
        progress: called with 1 after each forward.
    """
    items: list[Capture] = []
    for clip in clips:
        text, _ = pipe.encode_prompt(clip.caption, do_classifier_free_guidance=False, max_sequence_length=512)
        latents = statistics.normalise(clip.latents[None])
        noise = noise_like(latents, clip_seeds(seed, [""]))
        for timestep in timesteps:

            def keep(layer: int, ctx: AttnContext, q, k, v, extra, name=clip.name, timestep=timestep) -> None:
                if layer in layers:
                    # the layout of dense attention is in raster order
                    grid = ctx.layout.only_video("a capture").grid_thw
                    q, k, v = (x.cpu() for x in (q, k, v))
                    items.append(Capture(name=name, grid_thw=grid, q=q, k=k, v=v, layer=layer, timestep=timestep))

            model = transformer_at(pipe, timestep)
            x_t = add_noise(latents, noise, torch.full((1,), timestep / TIMESTEP_SCALE, device=latents.device))
            with attending([model], lambda keep=keep, **layer: Watched(FullAttention(**layer), keep)):
                model(
                    hidden_states=x_t.to(model.dtype),
                    timestep=torch.full((1,), timestep, device=latents.device),
                    encoder_hidden_states=text.to(model.dtype),
                )
            if progress is not None:
                progress(1)
    return Captures(items=items, source=source)


@contextmanager
def attending(models: Sequence[Any], factory: Callable[..., AttentionMethod], **budget: Any) -> Iterator[None]:
    """Attention of a factory in transformers; `budget` is that of `apply`."""
    with ExitStack() as stack:
        for model in models:
            apply(model, factory, **budget)
            stack.callback(remove, model)
        yield


def pipeline_plan(
    pipe: Any, methods: Sequence[Method], clip: ClipSettings, options: Mapping[str, Any]
) -> DenoisingPlan:
    """What all methods but dense attention follow."""
    plan, grid = DenoisingPlan(**options), token_grid(pipe, clip.size, clip.frames)
    ConstantSparsity(topk=1, denoising=plan).topk_per_layer(0, 1, len(transformers(pipe)[0].blocks))
    for method in methods:
        method.kept(method.make(dim=24, num_heads=1, head_dim=24, layer_idx=0).layout([Segment(grid)], "cpu"))
    if not any(map(_selects, methods)):
        predicts = any(method.predicts for method in methods)
        plan.refuse_without_topk(", ".join(method.label for method in methods), predicts=predicts)
    return plan


@torch.no_grad()
def compare_pipeline(
    pipe: Any,
    prompts: Sequence[str],
    methods: Sequence[Method],
    clip: ClipSettings,
    plan: DenoisingPlan,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[Denoised]:
    """Sample the same prompts from the same noise with each method; the first one is dense attention, the reference.

    Args:
        pipe: dense, from `open_pipeline`.
        prompts: N captions.
        methods: dense attention first; gates are at their start.
        clip: size, frames, guidance and steps.
        plan: from `pipeline_plan`.
        seed: of the noise.
        progress: see `generate_videos`.

    Returns:
        a row for each method; seconds are those of the transformer's passes.
    """
    seeds = clip_seeds(seed, prompts).tolist()
    rows: list[Denoised] = []
    reference: Tensor | None = None
    for method in methods:
        own = plan.for_method(selects=_selects(method), predicts=method.predicts)
        followed = own if rows else DenoisingPlan()
        densities, clock = _Densities(), _Clock()
        factory = partial(_watched, method, densities)
        with clock.of(transformers(pipe)):
            budget = {"topk": method.topk, "sparsity": method.sparsity, "denoising": followed}
            with attending(transformers(pipe), factory, **budget):
                video = generate_videos(pipe, prompts, seeds=seeds, progress=progress, **clip._asdict())
        reference = video if reference is None else reference
        seconds = clock.seconds - densities.seconds
        rows.append(compared(method, video, reference, density=fmean(densities.calls), seconds=seconds))
    return rows


def _selects(method: Method) -> bool:
    return method.topk is not None or method.sparsity is not None


def _watched(method: Method, densities: _Densities, **layer: Any) -> Watched:
    attention = method.make(**layer)
    return Watched(attention, partial(densities.add, attention))


class _Densities:
    """Computed token pairs over all pairs of every call: measured once for a layer at a top-k, in each call where the
    data decide; what that takes are `seconds`."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.seconds = 0.0
        self._known: dict[tuple[Any, ...], float] = {}

    def add(self, method: AttentionMethod, layer: int, ctx: AttnContext, q, k, v, extra: dict[str, Tensor]) -> None:
        key = (layer, ctx.topk, ctx.dense)
        if key not in self._known or (method.predicts and not ctx.dense):
            self._known[key] = 1.0 if ctx.dense else self._measure(method, ctx, q, k, v, extra)
        self.calls.append(self._known[key])

    def _measure(self, method: AttentionMethod, ctx: AttnContext, q, k, v, extra: dict[str, Tensor]) -> float:
        begin, recorded = seconds_now(q.device), {}
        # a call of its own, which neither reads nor leaves a selection
        apart = replace(ctx, denoising=None, selection=None, recorder=lambda _, tensors: recorded.update(tensors))
        method.attend_combine(q, k, v, extra, apart)
        density = computed_pairs(method, ctx.layout, recorded).density
        self.seconds += seconds_now(q.device) - begin
        return density


class _Clock:
    """Seconds of the forward passes of networks."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    @contextmanager
    def of(self, models: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for model in models:
                stack.callback(model.register_forward_pre_hook(self._begin).remove)
                stack.callback(model.register_forward_hook(self._end).remove)
            yield

    def _begin(self, model: Any, args: Any) -> None:
        self._began = seconds_now(model.device)

    def _end(self, model: Any, args: Any, out: Any) -> None:
        self.seconds += seconds_now(model.device) - self._began
