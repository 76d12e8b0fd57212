"""Kandinsky 5: video tokens in self-attention, text in cross-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa.integrations.diffusers.families.family import Arguments, Family
from vsa.integrations.diffusers.families.parts import Constants, Inputs, Parts, Sizes
from vsa.integrations.diffusers.processors import Processor, rotate
from vsa.integrations.diffusers.tile_attention import Grid

_LAYERS = ("to_query", "to_key", "to_value", "out_layer")


class Kandinsky5Processor(Processor):
    """Self-attention of Kandinsky5Transformer3DModel: norm per head, RoPE as matrices `[1, L, 1, D / 2, 2, 2]`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        sparse_params: Any = None,
    ) -> Tensor:
        q, k, v = (
            layer(hidden_states).unflatten(2, (attn.num_heads, -1))
            for layer in (attn.to_query, attn.to_key, attn.to_value)
        )
        q, k = attn.query_norm(q.float()).type_as(q), attn.key_norm(k.float()).type_as(k)
        if rotary_emb is not None:
            cos, sin = (rotary_emb[..., row, 0].repeat_interleave(2, dim=-1) for row in (0, 1))
            # the class rounds to bfloat16 whatever its dtype
            q, k = (rotate(x.float(), cos, sin).to(torch.bfloat16).type_as(x) for x in (q, k))
        return attn.out_layer(self.attend(q, k, v, hidden_states))


def _grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = (n // p for n, p in zip(arguments["hidden_states"].shape[1:4], config.patch_size, strict=True))
    return t, h, w


def _patch(config: Any) -> Grid:
    t, h, w = config.patch_size
    return t, h, w


def _sizes(config: Any) -> Sizes:
    channels = config.in_visual_dim, config.out_visual_dim
    return Sizes(*channels, text_dim=config.in_text_dim, ffn_dim=config.ff_dim, patch_size=_patch(config))


def _positions(grid: Grid, constants: Constants, device: torch.device) -> dict[str, Any]:
    # the pipeline shrinks positions by the size of a frame
    scale = constants["rope_scale"]
    return {"pos": [torch.arange(n, device=device) for n in grid], "scale_factor": (1.0, scale, scale)}


def _inputs(transformer: Any, given: Inputs, constants: Constants) -> dict[str, Any]:
    config, x = transformer.config, given.x.movedim(1, -1)
    if config.visual_cond:
        # no condition, and a mask that says so
        x = torch.cat([x, x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)], dim=-1)
    places = _positions(given.grid, constants, x.device)
    return {
        "hidden_states": x,
        "encoder_hidden_states": given.text,
        "timestep": given.timestep,
        "pooled_projections": given.text.new_full((len(x), config.in_text_dim2), constants["pooled_text"] or 0),
        "visual_rope_pos": places["pos"],
        "text_rope_pos": torch.arange(given.text.shape[1], device=x.device),
        "scale_factor": places["scale_factor"],
    }


def _velocity(output: Tensor, transformer: Any, given: Inputs, constants: Constants) -> Tensor:
    return output.movedim(-1, 1)


def _rotary(transformer: Any, grid: Grid, constants: Constants) -> Any:
    places = _positions(grid, constants, transformer.device)
    return transformer.visual_rope_embeddings((1, *grid), **places).flatten(1, 3)


PARTS = Parts(
    sizes=_sizes,
    inputs=_inputs,
    rotary=_rotary,
    velocity=_velocity,
    head="out_layer.out_layer.weight",
    # its output has a width of its own
    time_embedder=None,
    attention_output="self_attention.out_layer",
    after_blocks=("out_layer.",),
    after_attention=("self_attention.out_layer.", "cross_attention.", "feed_forward."),
    adapted_layers=(
        *(f"{kind}_attention.{name}" for kind in ("self", "cross") for name in _LAYERS),
        "feed_forward.in_layer",
        "feed_forward.out_layer",
    ),
    time_layers=("time_embeddings.", "pooled_text_embeddings.", "modulation."),
    text_layers=(
        "text_embeddings.",
        "text_transformer_blocks.",
        "cross_attention.to_key.",
        "cross_attention.to_value.",
    ),
    tables=("rope",),
    tokens="visual_embed",
    attention_rotary="rotary_emb",
    modulation=(),
    # its second text encoder is in no set; 2 for frames of at most 854 pixels, else 3.16 (Kandinsky5T2VPipeline)
    constants={"pooled_text": None, "rope_scale": 2.0},
    depths=("num_text_blocks", "num_visual_blocks"),
    takes_text_mask=False,
)

FAMILY = Family(
    name="Kandinsky5Transformer3DModel",
    stacks=("visual_transformer_blocks",),
    attention="self_attention",
    original=("Kandinsky5AttnProcessor",),
    processor=Kandinsky5Processor,
    grid=_grid,
    query="to_query",
    heads="num_heads",
    # masks of its own sparse attention, with another order of the tokens
    replaced=("sparse_params",),
    pipeline="Kandinsky5T2VPipeline",
    parts=PARTS,
)
