"""What a model that does not fit into memory is told as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation on the CPU or a GPU failed."""
    # the CPU's allocator has no exception of its own
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def too_large(make: Callable[[], Any], error: BaseException | None) -> str:
    """What to say when `make` ran out of memory: the size of the network that it builds, and what failed."""
    # the CPU's allocator begins with its place in C++
    reason = str(error).partition("\n")[0].rpartition("Allocator: ")[2] or type(error).__name__
    try:
        with torch.device("meta"):
            built = make()
    except RuntimeError:
        built = None
    if not isinstance(built, nn.Module):
        return f"not enough memory: {reason}"
    count = sum(p.numel() for p in built.parameters())
    size = f"{count:,} parameters, {4 * count / 2**30:,.1f} GiB in fp32"
    return f"the model is too large for the memory here: {size} ({reason})"
