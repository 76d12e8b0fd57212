"""The compiled body that all blocks of a model share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vsa.models.blocks import TransformerBlock

RECOMPILE_LIMIT = 64
"""Most graphs of one compiled block; the default of torch is 8."""

INDUCTOR_OPTIONS: dict[str, Any] = {
    # from torch 2.10 on, gradients of shift and scale of a batch of one sample would be memory that nobody wrote, or of
    # a wrong shape (github.com/pytorch/pytorch/issues/193061), and sums over tokens may include rows that do not exist
    # (195845); an option, because from torch 2.12 on a change of the configuration is of the thread that makes it
    "triton.mix_order_reduction": False,
}
"""Options with which the code that torch generates is right."""


def compiled_body(
    body: Callable[..., Any] = TransformerBlock.body, *, backend: str = "inductor", dynamic: bool | None = None
) -> Callable[..., Any]:
    """The compiled body of a block, for its attribute `run`.

    Args:
        body: the function to compile, which all blocks of a network share.
        backend: backend of `torch.compile`.
        dynamic: whether sizes are symbols; None: once they change.
    """
    # imported here, because the import takes a second
    from torch._dynamo import config as dynamo

    # torch counts graphs per function, which all networks of a process share (three roles, batch sizes, top-k)
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    options = INDUCTOR_OPTIONS if backend == "inductor" else None
    return torch.compile(body, fullgraph=True, backend=backend, options=options, dynamic=dynamic)
