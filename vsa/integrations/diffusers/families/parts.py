"""What training has to know of a transformer class of diffusers, beside its `Family`.

B batch, C T H W latent channels, frames, rows, columns, L video tokens, S text tokens, E text width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsa.integrations.diffusers.tile_attention import Grid

Constants = Mapping[str, Any]
"""Inputs of a class that no data give, by name."""


class Sizes(NamedTuple):
    """Sizes of a network, from the config of its class; names as in `Network`."""

    in_channels: int
    out_channels: int
    text_dim: int
    ffn_dim: int
    patch_size: Grid
    image_dim: int | None = None


class Inputs(NamedTuple):
    """Inputs of one pass.

    Args:
        x: `[B, C, T, H, W]` noisy latents, conditions included.
        timestep: `[B]` or `[B, L]`, 0 is clean, 1000 is noise.
        text: `[B, S, E]`.
        mask: bool `[B, S]`, True where a text token is real; None: all are.
        image: `[B, I, image_dim]` image tokens of image-to-video models.
        grid: token grid.
    """

    x: Tensor
    timestep: Tensor
    text: Tensor
    mask: Tensor | None
    image: Tensor | None
    grid: Grid


def latents_of(grid: Grid, patch_size: Grid, device: torch.device) -> Tensor:
    """Latents of a token grid, for functions that read their shape and device only."""
    return torch.empty(1, device=device).expand(1, 1, *(n * p for n, p in zip(grid, patch_size, strict=True)))


def as_it_is(output: Tensor, transformer: Any, given: Inputs, constants: Constants) -> Tensor:
    """The velocity `[B, C, T, H, W]` of a class whose output it is."""
    return output


def unpatchified(rows: Tensor, grid: Grid, patch_size: Grid) -> Tensor:
    """Latents `[B, C, T, H, W]` from patches `[B, L, C * p_t * p_h * p_w]`, as `patchify` made them."""
    x = rows.unflatten(2, (-1, *patch_size)).unflatten(1, grid)
    return x.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class Parts(NamedTuple):
    """Sizes, inputs and names of a transformer class.

    Names are as in `Network`, where those of the last block count: `after_attention` is of its kind.

    Args:
        sizes: function from the config to the sizes; ValueError for a config that cannot be trained.
        inputs: function from the transformer, the inputs of a pass and the constants to the arguments of its forward.
        rotary: function from the transformer, a grid and the constants to the rotary tables in raster order, as the
            attention gets them; None without.
        head: see `Network`.
        time_embedder: see `Network`.
        attention_output: see `Network`.
        after_blocks: see `Network`.
        after_attention: see `Network`.
        adapted_layers: see `Network`.
        time_layers: beginnings and parts of the names of the linear layers that get one row per sample.
        text_layers: the same of those that get the text tokens.
        image_layers: the same of those that get the image tokens.
        joint_layers: the same of those that get video and text tokens.
        tables: arguments of a block with rotary tables, `[B, L, ...]` or `[L, ...]` each.
        token_rows: arguments of a block that have one row per token where timesteps do.
        tokens: argument of a block with the tokens of the video, in packed rows all tokens.
        attention_rotary: argument of the attention with the rotary tables.
        modulation: see `Network`.
        velocity: function from the output, and what `inputs` gets, to the flow-matching velocity.
        constants: values of inputs that no data give, by name; None: a training has to set it.
        depths: settings with the numbers of layers.
        takes_text_mask: see `Network`.
        takes_token_times: whether every token may have its own timestep.
        packed: whether a block gets rows of text and video in one tensor, and a batch has one timestep and one length
            of its texts.
    """

    sizes: Callable[[Any], Sizes]
    inputs: Callable[[Any, Inputs, Constants], dict[str, Any]]
    rotary: Callable[[Any, Grid, Constants], Any]
    head: str
    time_embedder: str | None
    attention_output: str | None
    after_blocks: tuple[str, ...]
    after_attention: tuple[str, ...]
    adapted_layers: tuple[str, ...]
    time_layers: tuple[str, ...]
    text_layers: tuple[str, ...]
    image_layers: tuple[str, ...] = ()
    joint_layers: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    token_rows: tuple[str, ...] = ()
    tokens: str = "hidden_states"
    attention_rotary: str = "image_rotary_emb"
    modulation: tuple[str, ...] = ("scale_shift_table",)
    velocity: Callable[[Tensor, Any, Inputs, Constants], Tensor] = as_it_is
    constants: Constants | None = None
    depths: tuple[str, ...] = ("num_layers",)
    takes_text_mask: bool = True
    takes_token_times: bool = False
    packed: bool = False
