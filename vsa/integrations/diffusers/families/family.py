"""What tile attention has to know of a transformer class of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from vsa.integrations.diffusers.families.parts import Parts
from vsa.integrations.diffusers.processors import Processor
from vsa.integrations.diffusers.tile_attention import Grid, Texts, TextSide

Arguments = Mapping[str, Any]
"""Arguments of a transformer's forward by name."""


def largest_timestep(arguments: Arguments) -> float:
    """The timestep of a clip: per-token timesteps are that of the clip, and 0 for condition tokens."""
    return float(torch.as_tensor(arguments["timestep"]).max())


class Family(NamedTuple):
    """One transformer class: its self-attention layers and the order of its tokens.

    Args:
        name: name of the class in diffusers.
        stacks: attributes with lists of blocks, in the order in which they run.
        attention: attribute of a block with its self-attention.
        original: class names of the processors that `processor` replaces.
        processor: class of our processor.
        grid: function from the model's config and the arguments of its forward to the token grid.
        text: side of a row on which the text is.
        texts: function from the arguments of forward and the token grid to the text segments; None: one segment
            without padding.
        timestep: function from the arguments of forward to the timestep, 1000 is pure noise and 0 is clean.
        query: attribute of the attention with the projection of queries.
        heads: attribute of the attention with its number of heads.
        gates_in: where gates are registered: the block, or its attention.
        gate_settings: settings of video_sparse that fit the published gates of the class; None: the defaults.
        replaced: arguments of forward that become None, because the method takes the place of what they set.
        guided_batch: whether classifier-free guidance runs both passes in one batch, the unconditional half first.
        pipeline: name of the pipeline of diffusers that makes videos of texts with it; None: there is none.
        trained_arguments: arguments of the pipeline's call with which it runs a model as it is trained here.
        parts: what training has to know of it; None: it is only sampled.
    """

    name: str
    stacks: tuple[str, ...]
    attention: str
    original: tuple[str, ...]
    processor: type[Processor]
    grid: Callable[[Any, Arguments], Grid]
    text: TextSide = "none"
    texts: Callable[[Arguments, Grid], Texts] | None = None
    timestep: Callable[[Arguments], float] = largest_timestep
    query: str = "to_q"
    heads: str = "heads"
    gates_in: Literal["block", "attention"] = "block"
    gate_settings: Mapping[str, Any] | None = None
    replaced: tuple[str, ...] = ()
    guided_batch: bool = False
    pipeline: str | None = None
    trained_arguments: Mapping[str, Any] = {}
    parts: Parts | None = None

    def blocks(self, transformer: Any) -> list[Any]:
        """The blocks of a transformer in the order in which they run."""
        return [block for stack in self.stacks for block in getattr(transformer, stack)]
