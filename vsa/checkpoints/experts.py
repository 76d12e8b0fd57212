"""The two experts of Wan2.2 A14B: one network for high noise, one for low, told apart by folder or file name.

Sources: `boundary_ratio` of diffusers' `WanPipeline` (0.42): the first transformer has the timesteps from the boundary
on; boundaries of Wan's own layout: Wan2.2, `wan/configs/wan_t2v_A14B.py` (0.875) and `wan_i2v_A14B.py` (0.9).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vsa import files

_HIGH, _LOW = ("transformer", "high_noise_model"), ("transformer_2", "low_noise_model")
EXPERTS = (*_HIGH, *_LOW)
"""Folders of the experts, in a pipeline of diffusers and in Wan's own layout."""

NoiseRange = tuple[float, float]


def expert_range(place: Path, config: Mapping[str, Any]) -> NoiseRange | None:
    """Noise levels of the expert at a place; None: the network there is for all of them.

    Args:
        place: folder of a transformer, or file.
        config: its config; that it takes an image moves the boundary in Wan's own layout.

    Raises:
        ValueError: a pipeline with two transformers names no boundary.
    """
    boundary = 0.875 if config.get("in_channels") == config.get("out_channels") else 0.9
    is_high, is_low = place.name in _HIGH, place.name in _LOW
    if place.is_file():
        is_high, is_low = ("high_noise" in place.name, "low_noise" in place.name)
    elif place.name in (_HIGH[0], _LOW[0]):
        index = place.parent / "model_index.json"
        parts = files.read_json(index) if index.is_file() else {}
        if not (parts.get(_LOW[0]) or [None])[0] and not parts.get("boundary_ratio"):
            return None
        if not parts.get("boundary_ratio"):
            raise ValueError(f"{index} has two transformers and no boundary_ratio between their noise levels")
        boundary = float(parts["boundary_ratio"])
    if not (is_high or is_low):
        return None
    return (boundary, 1.0) if is_high else (0.0, boundary)


def refuse_experts(spec: str | Path, place: Path) -> None:
    """Raise ValueError for a folder with both experts, which names each of them."""
    for high, low in zip(_HIGH, _LOW, strict=True):
        if (place / high).is_dir() and expert_range(place / high, {}) is not None:
            raise ValueError(
                f"{spec} has two transformers, one per range of noise levels (Wan2.2 A14B): name one, {spec}/{high} "
                f"(high noise) or {spec}/{low}"
            )


def refuse_other_levels(name: str, levels: NoiseRange | None, place: str, expected: NoiseRange) -> None:
    """Raise ValueError for weights of other noise levels than those of a place; unknown levels fit every place.

    Args:
        name: the weights.
        levels: their noise levels.
        place: the place and "is", as the subject of what it is for.
        expected: its noise levels.
    """
    if levels is not None and not expected[0] <= levels[0] < levels[1] <= expected[1]:
        (low, high), (least, most) = levels, expected
        raise ValueError(f"{name} is an expert for noise levels {low:g} to {high:g}, {place} for {least:g} to {most:g}")
