"""Forward hooks that capture or modify the outputs of submodules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


@contextmanager
def capture_outputs(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of modules, by their keys, during the forward pass in the block; of several, the first.

    A later recomputation by activation checkpointing is not collected again.
    """
    outputs: dict[int, Tensor] = {}

    def keep(key: int, module: Any, inputs: Any, output: Any) -> None:
        outputs[key] = output[0] if isinstance(output, tuple) else output

    handles = [module.register_forward_hook(partial(keep, key)) for key, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def add_to_output(module: nn.Module, term: Tensor) -> Iterator[None]:
    """Add `term` to the output of the module during the forward pass in the block."""

    def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + term

    handle = module.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
