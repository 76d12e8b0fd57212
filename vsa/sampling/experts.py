"""The two experts of Wan2.2 A14B, each trained as a run, sampled together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vsa.sampling.pipeline import SamplingPipeline


def with_low(high: SamplingPipeline, low: SamplingPipeline, **settings: Any) -> SamplingPipeline:
    """The run of an expert of high noise together with that of low noise (Wan2.2 A14B).

    Args:
        high: run of the expert of high noise, whose settings count.
        low: run of the expert of low noise.
        settings: arguments of `SamplingPipeline.settings` for both.

    Raises:
        ValueError: other noise levels than those of two experts, or runs that differ in what both need.
    """
    ranges = [run.noise_range or (0.0, 1.0) for run in (high, low)]
    if ranges != [(ranges[0][0], 1), (0, ranges[0][0])]:
        theirs = " and ".join(f"{least:g} to {most:g}" for least, most in ranges)
        raise ValueError(
            f"{high.source} and {low.source} are for noise levels {theirs}: expected the expert of high noise, then "
            "with --transformer-2 that of all levels below"
        )
    pairs = {
        "data.codec": (high.codec.hash, low.codec.hash),
        "data.text_encoder": (high.text_encoder.hash, low.text_encoder.hash),
        "data.text_padding": (high.text_padding, low.text_padding),
        "latent_mean": (high.latent_mean.tolist(), low.latent_mean.tolist()),
        "latent_std": (high.latent_std.tolist(), low.latent_std.tolist()),
        "data.image_encoder": (high.image_encoder, low.image_encoder),
        "model.in_channels": (high.model.in_channels, low.model.in_channels),
        "model.patch_size": (high.model.patch_size, low.model.patch_size),
    }
    if all(ours == theirs for ours, theirs in pairs.values()):
        settings = {"latent_shape": high.settings(**settings).latent_shape, **settings}
        own = [run.settings(**settings) for run in (high, low)]
        pairs = {name: (getattr(own[0], name), getattr(own[1], name)) for name in ("topk", "denoising", "step_list")}
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ValueError(f"{high.source} has {name}={ours}, {low.source} has {theirs}: both experts need the same")
    return replace(high, low=low)
