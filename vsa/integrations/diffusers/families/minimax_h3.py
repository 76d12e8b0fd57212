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
from vsa.integrations.diffusers.families.parts import Constants, Inputs, Parts, Sizes, unpatchified
from vsa.integrations.diffusers.processors import Processor, project, refuse_mask
from vsa.integrations.diffusers.tile_attention import Grid, Texts
from vsa.models.embeddings import patchify


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


def _sizes(config: Any) -> Sizes:
    channels, (t, h, w) = config.in_channels, config.patch_size
    return Sizes(channels, channels, text_dim=config.text_dim, ffn_dim=config.ffn_dim, patch_size=(t, h, w))


def _packed(config: Any, grid: Grid, text: int, device: torch.device) -> dict[str, Tensor]:
    """The layout of a row of text and video: data hold no audio, and no conditions."""
    # imported where a row is made, because the module imports diffusers
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    t, h, w = (n * p for n, p in zip(grid, config.patch_size, strict=True))
    positions, tags, video, audio, texts, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        *(torch.ones(text), t, h, w, 0), config.patch_size, audio_channels=2, audio_tag=2, video_tag=0
    )
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    return {name: x.to(device) for name, x in zip(names, (positions, tags, video, audio, texts), strict=True)}


def _inputs(transformer: Any, given: Inputs, constants: Constants) -> dict[str, Any]:
    config, device = transformer.config, given.x.device
    row = _packed(config, given.grid, given.text.shape[1], device)
    return {
        "hidden_states": patchify(given.x, config.patch_size),
        "audio_hidden_states": given.x.new_zeros(len(given.x), 0, config.audio_in_channels),
        "encoder_hidden_states": given.text,
        # the samples of a pass have one timestep; here 1 is clean
        "timestep": 1 - given.timestep[:1] / TIMESTEP_SCALE,
        "timestep_indices": torch.zeros(len(row["token_tags"]), dtype=torch.long, device=device),
        **row,
    }


def _velocity(output: Tensor, transformer: Any, given: Inputs, constants: Constants) -> Tensor:
    # the class predicts data - noise
    return -unpatchified(output, given.grid, transformer.config.patch_size)


def _rotary(transformer: Any, grid: Grid, constants: Constants) -> Any:
    return transformer.rope(_packed(transformer.config, grid, 0, transformer.device)["position_ids"])


PARTS = Parts(
    sizes=_sizes,
    inputs=_inputs,
    rotary=_rotary,
    velocity=_velocity,
    head="proj_out.weight",
    time_embedder=None,
    # rows hold text too, and a batch may take several passes
    attention_output=None,
    after_blocks=("norm_out.", "proj_out.", "audio_proj_out."),
    after_attention=("attn.to_out.", "norm2.", "ff."),
    adapted_layers=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    time_layers=("time_embedder.", ".adaln_proj.", "norm_out.linear"),
    text_layers=("context_embedder.", "token_refiner."),
    joint_layers=("transformer_blocks.",),
    tables=("adaln_indices", "rotary_emb"),
    attention_rotary="rotary_emb",
    modulation=(),
    depths=("num_layers", "num_refiner_layers"),
    packed=True,
)

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
    parts=PARTS,
)
