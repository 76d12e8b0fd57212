"""Attention methods without parameters, which a file or a pipeline describes by a name and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vsa.attention.base import AttentionMethod, own_settings
from vsa.attention.dynamic_hilbert import DynamicHilbertAttention
from vsa.attention.fine_grained.method import FineGrainedAttention
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.tiling import Grid
from vsa.settings import fits, hints_of, refusal

WITHOUT_PARAMETERS: Mapping[str, type[AttentionMethod]] = {
    "neighborhood": NeighborhoodAttention,
    "sparge": SpargeAttention,
    "fine_grained": FineGrainedAttention,
    "dynamic_hilbert": DynamicHilbertAttention,
}
"""Classes by the name of their config. Other methods have their own fields in a file, or cannot be described."""


def name_of(method: AttentionMethod) -> str | None:
    """The name of a method without parameters; None for any other."""
    return next((name for name, method_class in WITHOUT_PARAMETERS.items() if type(method) is method_class), None)


def refuse_settings(name: str, settings: Mapping[str, Any], grids: Sequence[Grid]) -> None:
    """Raise ValueError for missing, unknown or invalid settings of a method, or a grid on which it cannot run."""
    method = WITHOUT_PARAMETERS[name]
    hints, setting_names = hints_of(method), own_settings(method)
    missing, unknown = sorted(set(setting_names) - set(settings)), sorted(set(settings) - set(setting_names))
    if missing or unknown:
        raise ValueError(f"settings of {name}: missing {missing}, unknown {unknown}")
    wrong = [refusal(key, value, hints[key]) for key, value in settings.items() if not fits(value, hints[key])]
    if wrong:
        raise ValueError(f"settings of {name}: {'; '.join(wrong)}")
    for grid in grids:
        method.refuse_grid(grid, settings)
