"""Adapter files merged into the weights of a transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vsa.checkpoints.adapter_changes import AdapterChanges
from vsa.checkpoints.weight_files import TensorFiles, finite, some

_MERGED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def merge_adapter(transformer: Any, file: str | Path, *, scale: float = 1.0) -> tuple[str, ...]:
    """Merge an adapter file into the weights of a transformer, in float32 at least; if it does not fit, nothing
    changes.

    Gates of the file need `apply(transformer, gates="coarse")` before.

    Args:
        transformer: a transformer with floating-point weights.
        file: safetensors file whose names of modules are those of the transformer's class in diffusers, or Wan's.
        scale: factor of all differences; tensors that replace are not scaled.

    Returns:
        Names of the parameters that changed.

    Raises:
        ValueError: names keys that are unknown, without a parameter or their other factor, of another shape or not
            finite.
    """
    path = Path(file)
    tensors = TensorFiles(path.parent, [path.name])
    parameters = dict(transformer.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    changes = AdapterChanges(tensors, shapes, str(path), type(transformer).__name__)
    if changes.new:
        hint = 'apply(transformer, sparsity=..., gates="coarse") registers them'
        raise ValueError(f"{path} has gates that the {type(transformer).__name__} lacks {some(changes.new)}: {hint}")
    for name in changes:
        if (dtype := parameters[name].dtype) not in _MERGED:
            raise ValueError(f"{path}: {name} is stored as {dtype}, merge before quantising")
    for key in tensors.keys:
        finite(tensors.read(key), key, str(path))
    for name in changes:
        parameters[name].copy_(changes.changed(name, parameters[name], scale))
    return tuple(changes)
