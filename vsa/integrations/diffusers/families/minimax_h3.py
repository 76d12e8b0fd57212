"""MiniMax-H3: packed rows of text, conditions, audio, then the generated video, without padding.

Sources: diffusers 0.42 `MiniMaxH3Transformer3DModel` and its modular pipeline (order of the rows, timesteps); FastVideo
`video_sparse_attn_h3.py` (tiles never cross a segment, queries before the video are dense, their keys always visible,
coarse stage over all tiles, gates without bias).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vsa.diffusion.flow_matching import TIMESTEP_SCALE
from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.processors import Processor, project, refuse_mask
from vsa.integrations.diffusers.tile_attention import Grid, Texts


class MiniMaxH3Processor(Processor):
    """Joint attention of MiniMaxH3Transformer3DModel: norm per head, RoPE on the first channels of a head."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        refuse_mask(attention_mask)
        q, k, v = project(attn, hidden_states)
        if rotary_emb is not None:
            q, k = (_rotate(x, *rotary_emb) for x in (q, k))
        return attn.to_out[1](attn.to_out[0](self.attend(q, k, v, hidden_states)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of x `[B, L, H, D]` by tables `[L, R]`; pairs are R / 2 channels apart."""
    cos, sin = (table.to(x.dtype)[:, None] for table in (cos, sin))
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([turning * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def _grid(config: Any, arguments: Arguments) -> Grid:
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


def _texts(arguments: Arguments, grid: Grid) -> Texts:
    kinds = torch.zeros(len(arguments["position_ids"]), dtype=torch.int8)
    for kind, name in enumerate(("text_indices", "audio_indices"), start=1):
        kinds[arguments[name].cpu()] = kind
    prefix = kinds[: len(kinds) - grid[0] * grid[1] * grid[2]]
    segments = prefix.unique_consecutive(return_counts=True)[1].tolist()
    return (tuple(segments),) * len(arguments["hidden_states"])


def _timestep(arguments: Arguments) -> float:
    # of the generated video; here 1 is clean, and conditions are cleaner
    last = arguments["video_indices"][-1]
    return TIMESTEP_SCALE * (1 - float(arguments["timestep"][arguments["timestep_indices"][last]]))


FAMILY = Family(
    name="MiniMaxH3Transformer3DModel",
    stacks=("transformer_blocks",),
    attention="attn",
    original=("MiniMaxH3AttnProcessor",),
    processor=MiniMaxH3Processor,
    grid=_grid,
    text="first",
    texts=_texts,
    timestep=_timestep,
    gates_in="attention",
    gate_settings={"gate_bias": False, "coarse_text": True},
)
