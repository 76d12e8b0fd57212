"""Agreement of clips that differ in nothing but their attention: the same weights, prompts and noise.

N clips, T H W frames, height and width, C t h w latent channels, frames, rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsa.evaluation.bootstrap import mean_interval
from vsa.evaluation.video_metrics import psnr, ssim
from vsa.sampling.contact_sheet import pick_frames

SHOWN_PROMPTS, SHOWN_FRAMES = 3, 4
"""Number of clips of a method that the page shows, and of their frames."""


class Sampled(NamedTuple):
    """Clips of a method.

    Args:
        videos: uint8 `[N, T, H, W, 3]`.
        latents: normalised latents `[N, C, t, h, w]`, of which the clips are decoded.
        density: computed token pairs over all pairs.
        seconds: time of the sampling, without text encoder and codec.
    """

    videos: Tensor
    latents: Tensor
    density: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Denoised:
    """Result of a method in a denoising run. What compares it with the dense run is None or empty for the dense run.

    Intervals are those of `mean_interval` over the prompts; None with a single one.

    Args:
        method: label of the method.
        family: label without the budget.
        density: computed token pairs over all pairs, averaged over steps and layers; in a run, layers that are not
            dense are measured in a forward at half noise.
        seconds: time of the sampling of all clips, without text encoder and codec.
        frames: at most `SHOWN_FRAMES` frames of the first clips, uint8 `[n, F, H, W, 3]`.
        psnr: PSNR of the pixels of all clips against the dense run in dB; inf for equal clips.
        psnr_low, psnr_high: its interval.
        cosine: cosine similarity of normalised latents with those of the dense run, averaged over the clips.
        cosine_low, cosine_high: its interval.
        ssim: SSIM against the dense run, averaged over the clips.
        clip_psnr: PSNR of each clip, in the order of the prompts.
        clip_cosine: cosine similarity of each clip.
    """

    method: str
    family: str
    density: float
    seconds: float
    frames: Tensor
    psnr: float | None = None
    psnr_low: float | None = None
    psnr_high: float | None = None
    cosine: float | None = None
    cosine_low: float | None = None
    cosine_high: float | None = None
    ssim: float | None = None
    clip_psnr: Sequence[float] = ()
    clip_cosine: Sequence[float] = ()


def numbers_of(clips: Sampled, dense: Sampled | None) -> dict[str, Any]:
    """The numbers and frames of a `Denoised`: of its clips, and of those compared with the ones of dense attention."""
    frames = torch.stack([pick_frames(video, SHOWN_FRAMES) for video in clips.videos[:SHOWN_PROMPTS]])
    numbers: dict[str, Any] = {"density": clips.density, "seconds": clips.seconds, "frames": frames}
    if dense is None:
        return numbers
    clip_psnr = [psnr(*pair) for pair in zip(clips.videos, dense.videos, strict=True)]
    clip_cosine = [_cosine(*pair) for pair in zip(clips.latents, dense.latents, strict=True)]
    clip_ssim = list(map(ssim, clips.videos, dense.videos))
    return numbers | _means(clip_psnr, clip_cosine, clip_ssim)


def joined(parts: Sequence[Denoised]) -> Denoised:
    """One `Denoised` of a method from those of its prompts, one each; without their frames."""
    numbers = {"density": fmean(part.density for part in parts), "seconds": sum(part.seconds for part in parts)}
    if parts[0].clip_psnr:
        clip_psnr, clip_cosine = ([x for part in parts for x in getattr(part, n)] for n in ("clip_psnr", "clip_cosine"))
        numbers |= _means(clip_psnr, clip_cosine, [part.ssim or 0.0 for part in parts])
    return replace(parts[0], **numbers, frames=parts[0].frames[:0])


def _means(clip_psnr: Sequence[float], clip_cosine: Sequence[float], clip_ssim: Sequence[float]) -> dict[str, Any]:
    """The numbers of a `Denoised` that compare its clips with the dense ones."""
    numbers: dict[str, Any] = {"clip_psnr": clip_psnr, "clip_cosine": clip_cosine, "ssim": fmean(clip_ssim)}
    # a mean of decibels would be infinite with one equal clip
    errors = _errors(clip_psnr)
    if len(errors) > 1:
        numbers["psnr_high"], numbers["psnr_low"] = map(_decibels, mean_interval(errors))
        numbers["cosine_low"], numbers["cosine_high"] = mean_interval(clip_cosine)
    return numbers | {"psnr": _decibels(fmean(errors)), "cosine": fmean(clip_cosine)}


def is_closer(first: Denoised, second: Denoised) -> bool:
    """Whether the first method's squared errors are smaller clip by clip, with an interval that excludes 0."""
    errors = zip(_errors(second.clip_psnr), _errors(first.clip_psnr), strict=True)
    return mean_interval([theirs - ours for theirs, ours in errors])[0] > 0


def _errors(clip_psnr: Sequence[float]) -> list[float]:
    """Mean squared errors of clips relative to the squared range of the pixels; 0 for equal clips."""
    return [10 ** (-value / 10) for value in clip_psnr]


def _decibels(error: float) -> float:
    return -10 * math.log10(error) if error else math.inf


def _cosine(x: Tensor, y: Tensor) -> float:
    """Cosine similarity of all values together, exactly 1 for equal tensors."""
    x, y = x.double().flatten(), y.double().flatten()
    return float((x * y).sum() / ((x * x).sum() * (y * y).sum()).sqrt())
