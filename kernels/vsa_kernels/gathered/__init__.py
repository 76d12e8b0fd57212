"""Attention of groups of scattered query tiles over the key tiles that a group lists: FG-Attn's kernel."""

from __future__ import annotations

from vsa_kernels.gathered.api import gathered_attn, group_tiles
from vsa_kernels.gathered.groups import TileGroups, longest_first

__all__ = ["TileGroups", "gathered_attn", "group_tiles", "longest_first"]
