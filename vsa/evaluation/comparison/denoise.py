"""Whole denoising runs of a model with each method in place of its attention, against the dense run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vsa.evaluation.attention_map import denoise_once
from vsa.evaluation.comparison.computed import computed_pairs
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.video_metrics import psnr, ssim
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
    """A method in a whole denoising run.

    Args:
        method: its label.
        family: the label without the budget.
        density: computed token pairs over all pairs, the mean over the layers of one forward at half noise.
        psnr: of all pixels against the dense run in dB; None: it is the dense run, inf: the clips are equal.
        ssim: against the dense run, the mean over the clips; None: it is the dense run.
        seconds: of the sampling of all clips, without text encoder and codec.
    """

    method: str
    family: str
    density: float
    psnr: float | None
    ssim: float | None
    seconds: float


@torch.no_grad()
def compare_denoising(
    run: LoadedRun,
    prompts: Sequence[str],
    methods: Sequence[Method],
    settings: SampleSettings,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[Denoised]:
    """Sample the same prompts from the same noise with each method; the first one is dense attention, the reference.

    Methods are training-free: the model's weights without its own gates, gates of a method at their start. A trained
    one is the model as it is.

    Args:
        run: the model with codec and text encoder.
        prompts: N captions.
        methods: dense attention first.
        settings: how to sample; what is dense at some steps or layers is said here, the top-k is each method's.
        progress: called after every sampler step with the number of clips it advanced.
    """
    seeds = clip_seeds(settings.seed, len(prompts))
    rows: list[Denoised] = []
    reference, clean = None, None
    for method in methods:
        model = run.model if method.trained else run.model.with_attention(method.make)
        layout = model.layout_for(settings.latent_shape, run.device)
        own = settings if method.trained else replace(settings, topk=method.kept(layout))
        videos, seconds = [], 0.0
        for start in range(0, len(prompts), settings.batch_size):
            part = slice(start, start + settings.batch_size)
            begin = _now(run.device)
            latents = sample_latents(model, run.text_encoder, prompts[part], seeds[part], own, progress)
            seconds += _now(run.device) - begin
            clean = latents[:1] if clean is None else clean
            videos.append(decode_latents(run.codec, latents, run.statistics))
        video = torch.cat(videos)
        reference = video if reference is None else reference
        dense = reference is video
        assert clean is not None
        rows.append(
            Denoised(
                method=method.label,
                family=method.family,
                density=_density(run, model, clean, prompts[0], own),
                psnr=None if dense else psnr(video, reference),
                ssim=None if dense else sum(map(ssim, video, reference)) / len(video),
                seconds=seconds,
            )
        )
    return rows


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _density(run: LoadedRun, model: VideoDiT, clean: Tensor, prompt: str, settings: SampleSettings) -> float:
    """Mean density of the layers in a forward at half noise."""
    recorded: dict[int, dict[str, Tensor]] = {}
    text, mask = encode_prompts(run.text_encoder, [prompt], run.device, settings.text_padding)
    recorder = recorded.__setitem__
    denoise_once(model, clean, text, mask, sigma=0.5, topk=settings.topk, recorder=recorder, seed=settings.seed)
    layout = model.layout_for(settings.latent_shape, run.device)
    methods: list[Any] = [block.method for block in model.blocks]
    return fmean(computed_pairs(method, layout, recorded.get(i)).density for i, method in enumerate(methods))
