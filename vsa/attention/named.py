"""Attention methods that a file or a pipeline describes by a name and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from vsa.attention.base import AttentionMethod, described_settings
from vsa.attention.compressed_kv import CompressedKV
from vsa.attention.dynamic_hilbert import DynamicHilbertAttention
from vsa.attention.fine_grained.method import FineGrainedAttention
from vsa.attention.grouped import GroupedAttention
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.radial import RadialAttention
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.sparse_linear import SparseLinearAttention
from vsa.attention.staged import StagedAttention
from vsa.attention.tiling import Grid
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.settings import arguments_of, fits, hints_of, refusal

NAMED: Mapping[str, type[AttentionMethod]] = {
    "neighborhood": NeighborhoodAttention,
    "sparge": SpargeAttention,
    "fine_grained": FineGrainedAttention,
    "dynamic_hilbert": DynamicHilbertAttention,
    "pooled_tail": PooledTail,
    "sparse_linear": SparseLinearAttention,
    "compressed_kv": CompressedKV,
    "radial": RadialAttention,
    "grouped": GroupedAttention,
    "staged": StagedAttention,
    "video_sparse": VideoSparseAttention,
}
"""Classes by their name in a file."""


def name_of(method: AttentionMethod) -> str | None:
    """The name of a method in a file; None for a method that no file describes."""
    return next((name for name, method_class in NAMED.items() if type(method) is method_class), None)


def layers_of(method: type[AttentionMethod], settings: Mapping[str, Any], backend: str | None) -> partial[Any]:
    """Factory of a method's layers; ValueError for a backend where the method has none."""
    if "backend" in arguments_of(method):
        return partial(method, **settings, backend=backend)
    if backend is not None:
        raise ValueError(f"backend={backend} does not apply to {method.__name__}, which has no backends")
    return partial(method, **settings)


def example_of(factory: Callable[..., AttentionMethod]) -> AttentionMethod:
    """A small layer without memory, which tells what a method with these settings does and has."""
    with torch.device("meta"):
        return factory(dim=24, num_heads=1, head_dim=24)


def unusual(method: type[AttentionMethod], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, as JSON values, that differ from the defaults of a method."""
    defaults = {name: argument.default for name, argument in arguments_of(method).items()}
    defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {name: value for name, value in settings.items() if value != defaults[name]}


def refuse_settings(name: str, settings: Mapping[str, Any], grids: Sequence[Grid]) -> None:
    """Raise ValueError for missing, unknown or invalid settings of a method, or a grid on which it cannot run."""
    method = NAMED[name]
    hints, setting_names = hints_of(method), described_settings(method)
    missing, unknown = sorted(set(setting_names) - set(settings)), sorted(set(settings) - set(setting_names))
    if missing or unknown:
        raise ValueError(f"settings of {name}: missing {missing}, unknown {unknown}")
    wrong = [refusal(key, value, hints[key]) for key, value in settings.items() if not fits(value, hints[key])]
    if wrong:
        raise ValueError(f"settings of {name}: {'; '.join(wrong)}")
    for grid in grids:
        method.refuse_grid(grid, settings)
