"""What a block keeps for its backward, and what it computes again.

The level says which part of a block is computed again in the backward pass:

    none            nothing
    attention       norms, products and RoPE of both attentions; not the attention itself, the most expensive part
    attention_mlp   the feed-forward layer too; not the attention itself
    full            everything: a block keeps its input alone

Each level keeps less than the one before it. What attention itself gives (outputs, their logsumexp, the selected
lists) is kept in the middle two, so that it runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Level = Literal["none", "attention", "attention_mlp", "full"]

LEVELS: tuple[Level, ...] = ("none", "attention", "attention_mlp", "full")
"""From the one that computes least again to the one that keeps least."""


def computed_again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`, computed again in the backward pass from its arguments alone."""
    return checkpoint(function, *args, use_reentrant=False)


def computed_again_without_attention(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`, computed again in the backward pass but for what attention operators gave."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(op)
    attends = name.startswith("vsa_kernels.") or "scaled_dot_product" in name or "flash_attention" in name
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE
