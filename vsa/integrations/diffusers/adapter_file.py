"""Adapter files merged into the weights of a transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vsa.checkpoints.adapter_changes import AdapterChanges, open_adapters
from vsa.checkpoints.original_names import named_class
from vsa.checkpoints.weight_files import finite, some


@torch.no_grad()
def merge_adapter(transformer: Any, file: str | Path, *, scale: float = 1.0) -> tuple[str, ...]:
    """Merge an adapter file into the weights of a transformer, in float32 at least; if it does not fit, nothing
    changes.

    Gates of the file need `apply(transformer, gates="coarse")` before.

    Args:
        transformer: a transformer with floating-point weights.
        file: safetensors file, or folder of such files, whose names of modules are those of the transformer's class in
            diffusers, or the original ones. A config of peft beside it, or in its metadata, says its scales.
        scale: factor of all differences; tensors that replace are not scaled.

    Returns:
        Names of the parameters that changed.

    Raises:
        ValueError: names keys that are unknown, without a parameter or their other factor, of another type or shape
            or not finite, and fields of a config that are not understood.
    """
    path = Path(file)
    parameters = dict(transformer.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    model = type(transformer)
    changes = AdapterChanges(open_adapters(path), shapes, str(path), model.__name__, named_class(model))
    if changes.new:
        hint = 'apply(transformer, sparsity=..., gates="coarse") registers them'
        raise ValueError(f"{path} has gates that the {model.__name__} lacks {some(changes.new)}: {hint}")
    for name in changes:
        if not (dtype := parameters[name].dtype).is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"{path}: {name} is stored as {dtype}, merge before quantising")
        finite(changes.changed(name, parameters[name], scale), name, f"{path}, merged")
    for name in changes:
        parameters[name].copy_(changes.changed(name, parameters[name], scale))
    return tuple(changes)
