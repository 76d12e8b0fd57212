"""Denoising runs of a model with each method in place of its attention, compared with the dense run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vsa.attention.denoising import DenoisingPlan, Row, progress_of, row_at
from vsa.attention.sparsity import ConstantSparsity, constant_topk
from vsa.evaluation.attention_map import denoise_once
from vsa.evaluation.comparison.computed import computed_pairs
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.video_metrics import psnr, ssim
from vsa.machine import seconds_now
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import (
    LoadedRun,
    SampleSettings,
    clip_seeds,
    decode_latents,
    encode_prompts,
    sample_latents,
)


@dataclass(frozen=True, kw_only=True)
class Denoised:
    """Result of a method in a denoising run.

    Args:
        method: label of the method.
        family: label without the budget.
        density: computed token pairs over all pairs, averaged over steps and layers; for layers that are not dense it
            is measured in a forward at half noise.
        psnr: PSNR of all pixels against the dense run in dB; None for the dense run, inf for equal clips.
        ssim: SSIM against the dense run, averaged over the clips; None for the dense run.
        seconds: time of the sampling of all clips, without text encoder and codec.
    """

    method: str
    family: str
    density: float
    psnr: float | None
    ssim: float | None
    seconds: float


def comparison_plan(run: LoadedRun, methods: Sequence[Method], options: Mapping[str, Any]) -> DenoisingPlan:
    """Denoising plan of all methods except dense attention: the run's plan without its budgets, with the options."""
    plan = replace(run.settings().denoising.without_budgets(), **options)
    ConstantSparsity(topk=1, denoising=plan).topk_per_layer(0, 1, len(run.model.blocks))
    predicts = run.model.predicts or any(method.predicts for method in methods)
    selecting = any(method.topk is not None or method.sparsity is not None for method in methods)
    if not selecting and not run.model.selects:
        # options of the run itself that do not apply are ignored
        DenoisingPlan(**options).refuse_without_topk(", ".join(method.label for method in methods), predicts=predicts)
    return plan


def plan_text(plan: DenoisingPlan) -> str:
    """A plan as a suffix of a heading."""
    changes = ", ".join(f"{name}={value}" for name, value in plan.changes().items())
    return f"; all but dense attention with {changes}" if changes else ""


@torch.no_grad()
def compare_denoising(
    run: LoadedRun,
    prompts: Sequence[str],
    methods: Sequence[Method],
    settings: SampleSettings,
    plan: DenoisingPlan,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[Denoised]:
    """Sample the same prompts from the same noise with each method; the first one is dense attention, the reference.

    Methods are training-free: they use the model's weights without its own gates, and gates of a method at their
    initial values. A trained method is the model as it is.

    Args:
        run: the model with codec and text encoder.
        prompts: N captions.
        methods: dense attention first.
        settings: sampling settings; their top-k and plan are for the trained method.
        plan: plan of every method except dense attention; a method's own budget applies where the plan has none. A
            method that selects no tiles uses only the dense steps and layers.
        progress: called after every sampler step with the number of clips it advanced.
    """
    seeds = clip_seeds(settings.seed, prompts)
    rows: list[Denoised] = []
    reference, clean = None, None
    for method in methods:
        model = run.model if method.trained else run.model.with_attention(method.make)
        layout = model.layout_for(settings.latent_shape, run.device)
        own = settings
        if not method.trained:
            followed = DenoisingPlan() if not rows else plan.for_method(selects=model.selects, predicts=model.predicts)
            topk = constant_topk(method.kept(layout), followed, layout.num_video_tiles)
            own = replace(settings, topk=topk, denoising=followed)
        videos, seconds = [], 0.0
        for start in range(0, len(prompts), settings.batch_size):
            part = slice(start, start + settings.batch_size)
            begin = seconds_now(run.device)
            latents = sample_latents(model, run.text_encoder, prompts[part], seeds[part], own, progress)
            seconds += seconds_now(run.device) - begin
            clean = latents[:1] if clean is None else clean
            videos.append(decode_latents(run.codec, latents, run.statistics))
        video = torch.cat(videos)
        reference = video if reference is None else reference
        assert clean is not None
        density = _density(run, model, clean, prompts[0], own)
        rows.append(compared(method, video, reference, density=density, seconds=seconds))
    return rows


def compared(method: Method, video: Tensor, reference: Tensor, *, density: float, seconds: float) -> Denoised:
    """The result of a method with its clips uint8 `[N, T, H, W, 3]`; the clips of the dense run are the reference."""
    dense = video is reference
    return Denoised(
        method=method.label,
        family=method.family,
        density=density,
        psnr=None if dense else psnr(video, reference),
        ssim=None if dense else sum(map(ssim, video, reference)) / len(video),
        seconds=seconds,
    )


def _density(run: LoadedRun, model: VideoDiT, clean: Tensor, prompt: str, settings: SampleSettings) -> float:
    """Mean density over steps and layers, measured once for every top-k."""
    plan, count = settings.denoising, len(model.blocks)
    densities_by_row: dict[Row, list[float]] = {}
    steps = []
    for step, timestep in enumerate(settings.timesteps):
        dense = [step < plan.dense_steps or layer in plan.dense_layers for layer in range(count)]
        if not all(dense):
            row = row_at(settings.topk, progress_of(timestep), step)
            if row not in densities_by_row:
                densities_by_row[row] = _densities(run, model, clean, prompt, replace(settings, topk=row))
            steps.append(
                fmean(1.0 if whole else share for whole, share in zip(dense, densities_by_row[row], strict=True))
            )
        else:
            steps.append(1.0)
    return fmean(steps)


def _densities(run: LoadedRun, model: VideoDiT, clean: Tensor, prompt: str, settings: SampleSettings) -> list[float]:
    """Density of each layer in a forward at half noise without a plan."""
    recorded: dict[int, dict[str, Tensor]] = {}
    text, mask = encode_prompts(run.text_encoder, [prompt], run.device, settings.text_padding)
    recorder = recorded.__setitem__
    denoise_once(model, clean, text, mask, sigma=0.5, topk=settings.topk, recorder=recorder, seed=settings.seed)
    layout = model.layout_for(settings.latent_shape, run.device)
    methods: list[Any] = [block.method for block in model.blocks]
    return [computed_pairs(method, layout, recorded.get(i)).density for i, method in enumerate(methods)]
