"""Activation checkpointing of a block.

The level names the part of a block that the backward pass recomputes:

    none            nothing
    attention       norms, projections and RoPE of both attention layers, without the attention operator
    attention_mlp   the feed-forward layer as well, without the attention operator
    full            everything: a block keeps only its input

Each level keeps fewer activations than the one before it. The middle two keep the results of the attention operator
(outputs, their logsumexp, the selected lists), so that this most expensive part runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from vsa_kernels.operators import operator_of

Result = TypeVar("Result")
Level = Literal["none", "attention", "attention_mlp", "full"]

LEVELS: tuple[Level, ...] = ("none", "attention", "attention_mlp", "full")
"""Ordered by increasing recomputation."""


def checkpointed(function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)`, recomputed in the backward pass from its arguments."""
    return checkpoint(function, *args, use_reentrant=False)


def checkpointed_except_attention(function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)`, recomputed in the backward pass except for the results of attention operators."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(op)
    attends = "scaled_dot_product" in name or "flash_attention" in name
    if name.startswith("vsa_kernels."):
        attends = not operator_of(name.split(".")[1]).elementwise
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE
