"""What tile attention has to know of a transformer class of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vsa.integrations.diffusers.processors import Processor
from vsa.integrations.diffusers.tile_attention import Grid, TextSide

Arguments = Mapping[str, Any]
"""Arguments of a transformer's forward by name."""


class Family(NamedTuple):
    """One transformer class: its self-attention layers and the order of its tokens.

    Args:
        name: name of the class in diffusers.
        stacks: attributes with lists of blocks, in the order in which they run.
        attention: attribute of a block with its self-attention.
        original: class name of the processor that `processor` replaces.
        processor: class of our processor.
        grid: function from the model's config and the arguments of its forward to the token grid.
        text: side of a row on which the text is.
        text_mask: argument of forward with the key-padding mask of the text; None without padding.
        guided_batch: whether classifier-free guidance runs both passes in one batch, the unconditional half first.
    """

    name: str
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
