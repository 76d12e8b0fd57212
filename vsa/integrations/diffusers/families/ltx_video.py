"""LTX-Video: rows of video tokens that arrive flat, text in cross-attention."""

from __future__ import annotations

from typing import Any

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.processors import VideoProcessor
from vsa.integrations.diffusers.tile_attention import Grid


def flat_grid(config: Any, arguments: Arguments) -> Grid:
    """Token grid of latents that arrive as rows of tokens, from the arguments beside them."""
    t, h, w = (arguments.get(name) for name in ("num_frames", "height", "width"))
    if t is None or h is None or w is None:
        raise ValueError(f"LTX needs num_frames, height and width for its token grid, got {t}, {h}, {w}")
    return t, h, w


FAMILY = Family(
    name="LTXVideoTransformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn1",
    original=("LTXVideoAttnProcessor",),
    processor=VideoProcessor,
    grid=flat_grid,
    guided_batch=True,
)
