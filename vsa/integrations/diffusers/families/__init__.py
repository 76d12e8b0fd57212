"""The supported transformer classes of diffusers, one file a family; nothing here imports diffusers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from vsa.integrations.diffusers.families import (
    cogvideox,
    hunyuan_video,
    hunyuan_video15,
    kandinsky5,
    ltx2,
    ltx_video,
    minimax_h3,
    wan,
)
from vsa.integrations.diffusers.families.family import Family

_FILES = (wan, ltx_video, ltx2, cogvideox, hunyuan_video, hunyuan_video15, minimax_h3, kandinsky5)

FAMILIES: Mapping[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES}
"""Families by the name of their class, so that a look-up does not import diffusers."""


def family_of(transformer: nn.Module) -> Family:
    """The family of a transformer, also of a class derived from a supported one; ValueError for other classes."""
    for base in type(transformer).__mro__:
        if base.__name__ in FAMILIES and base.__module__.startswith("diffusers."):
            return FAMILIES[base.__name__]
    hint = ": pass its transformer" if hasattr(transformer, "transformer") else ""
    raise ValueError(
        f"expected one of the diffusers classes {', '.join(FAMILIES)}, got {type(transformer).__name__}{hint}"
    )
