"""A complete pipeline of diffusers with converted transformers; its other parts are copies of those of a pipeline."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from vsa.attention.full import FullAttention
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.experts import expert_range, refuse_other_levels
from vsa.checkpoints.network_settings import network_of
from vsa.checkpoints.weight_files import read_json, refuse_existing
from vsa.checkpoints.weight_source import open_weights
from vsa.checkpoints.weights import WeightSource
from vsa.files import atomic_folder
from vsa.models.init import without_memory

FIRST, SECOND = "transformer", "transformer_2"


def convert_pipeline(
    source: WeightSource,
    second: WeightSource | None,
    pipeline: Path,
    out: Path,
    options: Conversion,
    *,
    like: str | None = None,
) -> list[str]:
    """Write a pipeline folder with the weights of one transformer, or of both experts of Wan2.2 A14B.

    Args:
        source: weights of the transformer; without `second` of either expert, which its noise levels say.
        second: weights of the expert of low noise; None: that of the pipeline is copied, or the other one.
        pipeline: folder of the pipeline that the weights come from.
        out: target folder, which must not exist.
        options: options of the conversion, of both.
        like: see `convert`.

    Returns:
        lines that report the result.

    Raises:
        ValueError: no such pipeline, or weights of another expert or another size than its.
    """
    if options.to != "diffusers":
        raise ValueError(f"--pipeline {pipeline} makes a pipeline of diffusers, got --to {options.to}")
    if not (pipeline / "model_index.json").is_file():
        raise ValueError(f"--pipeline {pipeline}: expected a folder with model_index.json (`hf download` makes one)")
    refuse_existing(out)
    sources = _placed(source, second, pipeline)
    for name, own in sources.items():
        with without_memory():
            open_weights(pipeline / name).refuse_other_architecture(network_of(own.config, FullAttention))
    with atomic_folder(out) as temporary:
        others = [part for part in pipeline.iterdir() if part.name not in sources and not part.name.startswith(".")]
        for part in others:
            (shutil.copytree if part.is_dir() else shutil.copyfile)(part, temporary / part.name)
        lines = [line for name, own in sources.items() for line in convert(own, temporary / name, options, like=like)]
        lines = [line.replace(str(temporary), str(out)) for line in lines]
    return [*lines, f"all else in {out} is copied from {pipeline}"]


def _placed(source: WeightSource, second: WeightSource | None, pipeline: Path) -> Mapping[str, WeightSource]:
    """Weights by their places in a pipeline."""
    if not (read_json(pipeline / "model_index.json").get(SECOND) or [None])[0]:
        if second is not None:
            raise ValueError(f"--transformer-2 {second.name} does not apply: {pipeline} has one transformer")
        return {FIRST: source}
    ranges = {name: expert_range(pipeline / name, {}) or (0.0, 1.0) for name in (FIRST, SECOND)}
    levels = source.noise_range
    if second is not None:
        sources = {FIRST: source, SECOND: second}
    elif levels is None:
        raise ValueError(
            f"{source.name} does not say its noise levels, and {pipeline} has two transformers: give the expert of low "
            "noise by --transformer-2"
        )
    else:
        sources = {FIRST if levels[0] >= ranges[FIRST][0] else SECOND: source}
    for name, own in sources.items():
        refuse_other_levels(own.name, own.noise_range, f"{pipeline / name} is", ranges[name])
    return sources
