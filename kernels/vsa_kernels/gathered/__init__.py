"""Gathered attention (FG-Attn): groups of scattered query tiles attend to the kv tiles that their group lists."""

from __future__ import annotations

from vsa_kernels.gathered.api import gathered_attn, group_tiles
from vsa_kernels.gathered.groups import TileGroups, longest_first

__all__ = ["TileGroups", "gathered_attn", "group_tiles", "longest_first"]
