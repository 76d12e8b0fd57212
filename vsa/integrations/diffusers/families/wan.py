"""Wan 2.1 and 2.2: video tokens in self-attention, text and image in cross-attention."""

from __future__ import annotations

from typing import Any

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.processors import VideoProcessor
from vsa.integrations.diffusers.tile_attention import Grid


def _grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = (n // p for n, p in zip(arguments["hidden_states"].shape[2:], config.patch_size, strict=True))
    return t, h, w


FAMILY = Family(
    name="WanTransformer3DModel",
    stacks=("blocks",),
    attention="attn1",
    original=("WanAttnProcessor",),
    processor=VideoProcessor,
    grid=_grid,
)
