"""Forward hooks that capture or modify the outputs of submodules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


@contextmanager
def capture_outputs(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Collects the outputs of some modules in the forward run inside, by their keys.

    What activation checkpointing recomputes afterwards is not collected again.
    """
    outputs: dict[int, Tensor] = {}

    def keep(key: int, module: Any, inputs: Any, output: Tensor) -> None:
        outputs[key] = output

    handles = [module.register_forward_hook(partial(keep, key)) for key, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def add_to_output(module: nn.Module, term: Tensor) -> Iterator[None]:
    """Adds `term` to the module's output in the forward run inside."""

    def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + term

    handle = module.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
