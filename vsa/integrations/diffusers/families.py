"""Structure of the four supported diffusers transformer classes: their self-attention layers and token order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from vsa.integrations.diffusers.processors import CogVideoXProcessor, HunyuanVideoProcessor, Processor, VideoProcessor
from vsa.integrations.diffusers.tile_attention import Grid, TextSide

Arguments = Mapping[str, Any]


class Family(NamedTuple):
    """One transformer class.

    Args:
        stacks: attributes with lists of blocks, in the order in which they run.
        attention: attribute of a block with its self-attention.
        original: class name of the processor that `processor` replaces.
        processor: class of our processor.
        grid: function from the model's config and the arguments of its forward to the token grid.
        text: side of a row on which the text is.
        text_mask: argument of forward with the key-padding mask of the text; None without padding.
        guided_batch: whether classifier-free guidance runs both passes in one batch, the unconditional half first.
    """

    stacks: tuple[str, ...]
    attention: str
    original: str
    processor: type[Processor]
    grid: Callable[[Any, Arguments], Grid]
    text: TextSide = "none"
    text_mask: str | None = None
    guided_batch: bool = False

    def blocks(self, transformer: Any) -> list[Any]:
        """The blocks of a transformer in the order in which they run."""
        return [block for stack in self.stacks for block in getattr(transformer, stack)]


def _wan_grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = (n // p for n, p in zip(arguments["hidden_states"].shape[2:], config.patch_size, strict=True))
    return t, h, w


def _ltx_grid(config: Any, arguments: Arguments) -> Grid:
    # the latents arrive as flat token rows, so the grid comes from arguments
    t, h, w = (arguments.get(name) for name in ("num_frames", "height", "width"))
    if t is None or h is None or w is None:
        raise ValueError(f"LTX needs num_frames, height and width for its token grid, got {t}, {h}, {w}")
    return t, h, w


def _cogvideox_grid(config: Any, arguments: Arguments) -> Grid:
    _, t, _, h, w = arguments["hidden_states"].shape
    return t // (config.patch_size_t or 1), h // config.patch_size, w // config.patch_size


def _hunyuan_grid(config: Any, arguments: Arguments) -> Grid:
    t, h, w = arguments["hidden_states"].shape[2:]
    return t // config.patch_size_t, h // config.patch_size, w // config.patch_size


FAMILIES: Mapping[str, Family] = {
    "WanTransformer3DModel": Family(("blocks",), "attn1", "WanAttnProcessor", VideoProcessor, _wan_grid),
    "LTXVideoTransformer3DModel": Family(
        ("transformer_blocks",), "attn1", "LTXVideoAttnProcessor", VideoProcessor, _ltx_grid, guided_batch=True
    ),
    "CogVideoXTransformer3DModel": Family(
        ("transformer_blocks",),
        "attn1",
        "CogVideoXAttnProcessor2_0",
        CogVideoXProcessor,
        _cogvideox_grid,
        text="first",
        guided_batch=True,
    ),
    "HunyuanVideoTransformer3DModel": Family(
        ("transformer_blocks", "single_transformer_blocks"),
        "attn",
        "HunyuanVideoAttnProcessor2_0",
        HunyuanVideoProcessor,
        _hunyuan_grid,
        text="last",
        text_mask="encoder_attention_mask",
    ),
}
"""Supported transformers by class name, so that a look-up does not import diffusers."""


def family_of(transformer: nn.Module) -> Family:
    """The family of a transformer, also of a class derived from a supported one; ValueError for other classes."""
    for base in type(transformer).__mro__:
        if base.__name__ in FAMILIES and base.__module__.startswith("diffusers."):
            return FAMILIES[base.__name__]
    hint = ": pass its transformer" if hasattr(transformer, "transformer") else ""
    raise ValueError(
        f"expected one of the diffusers classes {', '.join(FAMILIES)}, got {type(transformer).__name__}{hint}"
    )
