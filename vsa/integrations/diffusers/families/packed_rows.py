"""The rows of MiniMax-H3: text, conditions, audio, then the generated video, without padding.

Source: diffusers 0.42, the modular pipeline of MiniMax-H3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.families.family import Arguments
from vsa.integrations.diffusers.tile_attention import Grid, Texts


def grid_of(config: Any, arguments: Arguments) -> Grid:
    """Token grid of the generated video in a call of the class; ValueError if it is not the last of the rows."""
    # the latents arrive as flat token rows, so the grid comes from the positions of the rows after the prefix
    others = [arguments[name] for name in ("text_indices", "audio_indices")]
    start = 1 + max(int(indices.max()) if len(indices) else -1 for indices in others)
    positions = arguments["position_ids"][start:].cpu()
    frames = _runs(positions[:, 0])
    rows = _runs(positions[: len(positions) // frames, 1])
    grid = frames, rows, len(positions) // (frames * rows)
    if math.prod(grid) == len(positions) > 0:
        video = positions.view(*grid, 3)
        axes = video[:, :1, :1, 0], video[:1, :, :1, 1], video[:1, :1, :, 2]
        rises = bool((axes[0].diff(dim=0) > 0).all())
        if rises and torch.equal(video, torch.stack(torch.broadcast_tensors(*axes), dim=-1)):
            return grid
    raise ValueError(
        f"position_ids of the {len(positions)} rows after text and audio are no grid in raster order, got {frames} "
        f"times and {rows} rows in the first: the generated video has to be last"
    )


def _runs(values: Tensor) -> int:
    """Number of runs of equal values."""
    return 1 + int((values[1:] != values[:-1]).sum())


def texts_of(arguments: Arguments, grid: Grid) -> Texts:
    """Lengths of the segments before the generated video, for each sample."""
    kinds = torch.zeros(len(arguments["position_ids"]), dtype=torch.int8)
    for kind, name in enumerate(("text_indices", "audio_indices"), start=1):
        kinds[arguments[name].cpu()] = kind
    prefix = kinds[: len(kinds) - grid[0] * grid[1] * grid[2]]
    segments = prefix.unique_consecutive(return_counts=True)[1].tolist()
    return (tuple(segments),) * len(arguments["hidden_states"])


def packed(config: Any, grid: Grid, text: int, device: torch.device) -> dict[str, Tensor]:
    """The layout of a row of text and video: data hold no audio, and no conditions."""
    # imported where a row is made, because the module imports diffusers
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    t, h, w = (n * p for n, p in zip(grid, config.patch_size, strict=True))
    positions, tags, video, audio, texts, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        *(torch.ones(text), t, h, w, 0), config.patch_size, audio_channels=2, audio_tag=2, video_tag=0
    )
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    return {name: x.to(device) for name, x in zip(names, (positions, tags, video, audio, texts), strict=True)}
