"""Reconstruction quality of the embedded codecs, an upper bound for models that are trained on its latents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vsa.data.codecs import Codec, DctCodec, EmbeddedCodec, HaarCodec

# PSNR in dB below which the loss is clearly visible
_POOR = 25.0
# numbers of bands to suggest instead; those between 48 and 192 add detail of single frames and colour, which is little
_MORE_BANDS = (24, 48, 192)
# frames of a clip that are measured
_FRAMES = 16


def reconstruction_error(video: Tensor, codec: EmbeddedCodec) -> float:
    """Mean squared error of the pixels of a clip's first frames after encoding and decoding.

    Args:
        video: uint8 `[T, H, W, 3]` that the codec takes.
        codec: codec to measure.
    """
    video = video[: codec.frames_that_fit(min(len(video), _FRAMES))]
    return mean_error(codec.decode(codec.encode(video)), video, codec)


def mean_error(rebuilt: Tensor, video: Tensor, codec: Codec) -> float:
    """Mean squared error of the first frames of a clip, uint8 `[T, H, W, 3]`; an image is rebuilt as several."""
    count = codec.frames_that_fit(min(len(video), _FRAMES))
    return float((rebuilt[:count].to(torch.int32) - video[:count]).square().double().mean())


def decibel(error: float) -> float:
    """Peak signal-to-noise ratio 10 log10(255^2 / error) in dB of a mean squared error, inf for 0."""
    return 10 * math.log10(255**2 / error) if error > 0 else math.inf


def describe_errors(errors: Mapping[str, float]) -> str:
    """The quality of a codec, by the mean squared errors of some clips."""
    worst = max(errors, key=lambda name: errors[name])
    mean = decibel(math.fsum(errors.values()) / len(errors))
    return f"{mean:.1f} dB PSNR, the worst of {len(errors)} measured at {decibel(errors[worst]):.1f} dB ({worst})"


def describe_reconstruction(clips: Iterable[tuple[str, Tensor]], codec: EmbeddedCodec) -> list[str]:
    """Messages on the reconstruction quality for some clips, and on the number of bands that would improve it.

    Args:
        clips: name and uint8 video `[T, H, W, 3]` of some clips; without any there are no lines.
        codec: codec in use; others of its kind are measured beside it.
    """
    kind = DctCodec if codec.name == DctCodec.name else HaarCodec
    codecs = [kind(n) for n in (codec.channels, *(n for n in _MORE_BANDS if n > codec.channels))]
    errors = {name: [reconstruction_error(video, one) for one in codecs] for name, video in clips}
    if not errors:
        return []
    mean, *better = (decibel(math.fsum(column) / len(errors)) for column in zip(*errors.values(), strict=True))
    quality = describe_errors({name: column[0] for name, column in errors.items()})
    lines = [f"the codec {codecs[0].id} rebuilds the clips at {quality}"]
    if mean < _POOR:
        offers = [f"{psnr:.1f} dB with --channels {c.channels}" for psnr, c in zip(better, codecs[1:], strict=True)]
        lines.append(
            f"below {_POOR:g} dB fine detail is lost, and no training on these latents brings it back: "
            f"{', '.join([*offers, 'or a trained codec with --model'])}"
        )
    return lines
