"""Adapter files merged into the weights of a transformer.

The keys are those of diffusers, peft, ComfyUI and FastVideo: low-rank factors, differences of whole tensors, and
tensors that replace those of the model, such as the gates of FastVideo's MiniMax-H3 students. A file means
`W + (alpha / rank) * B A`, alpha = rank unless it says another, then `W + diff`, then `W = set`.

Source: FastVideo `fastvideo-lora-v2` ("W = W_base + lora_B @ lora_A; then .diff/.diff_b added and .set_weight
assigned").
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsa.checkpoints.weight_files import TensorFiles, finite, refuse_other_tensors, some
from vsa.files import open_tensors

_ENDINGS = {
    ".lora_A.weight": (".weight", "down"),
    ".lora_B.weight": (".weight", "up"),
    ".lora_down.weight": (".weight", "down"),
    ".lora_up.weight": (".weight", "up"),
    ".alpha": (".weight", "alpha"),
    ".diff": (".weight", "diff"),
    ".diff_b": (".bias", "diff"),
    ".diff_param": ("", "diff"),
    ".set_weight": (".weight", "set"),
    ".set_param": ("", "set"),
    # files with nothing but gates have their plain names
    ".to_gate_compress.weight": (".to_gate_compress.weight", "set"),
    ".to_gate_compress.bias": (".to_gate_compress.bias", "set"),
}
"""Endings of keys: the ending of the parameter instead, and what the tensor is to it."""

_MERGED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PREFIXES = ("transformer.", "diffusion_model.", "base_model.model.")


@torch.no_grad()
def merge_adapter(transformer: Any, file: str | Path, *, scale: float = 1.0) -> tuple[str, ...]:
    """Merge an adapter file into the weights of a transformer, in float32; if it does not fit, nothing changes.

    Gates of the file need `apply(transformer, gates="coarse")` before.

    Args:
        transformer: a transformer with floating-point weights.
        file: safetensors file whose names of modules are those of the transformer's class in diffusers.
        scale: factor of all differences; tensors that replace are not scaled.

    Returns:
        Names of the parameters that changed.

    Raises:
        ValueError: names keys that are unknown, without a parameter or their other factor, of another shape or not
            finite.
    """
    path = Path(file)
    tensors = TensorFiles(path.parent, [path.name])
    if "lora_adapter_metadata" in (open_tensors(path).metadata() or {}):
        raise ValueError(f"{path} has its scales in its metadata: load it by load_lora_weights of the pipeline")
    parameters = dict(transformer.named_parameters())
    changes = _changes(tensors, parameters, path, type(transformer).__name__)
    expected: dict[str, tuple[int, ...]] = {}
    for name, parts in changes.items():
        shape = tuple(parameters[name].shape)
        if parameters[name].dtype not in _MERGED:
            raise ValueError(f"{path}: {name} is stored as {parameters[name].dtype}, merge before quantising")
        rank = (*tensors.shapes.get(parts.get("down", ""), ()), 0)[0]
        shapes = {"down": (rank, math.prod(shape[1:])), "up": (shape[0], rank), "alpha": None}
        # an alpha is one number, with or without a dimension
        expected |= {key: shapes.get(part, shape) or tensors.shapes[key] for part, key in parts.items()}
    refuse_other_tensors(expected, tensors.shapes, str(path))
    for key in tensors.keys:
        finite(tensors.read(key), key, str(path))
    for name, parts in changes.items():
        parameter = parameters[name]
        read = {part: tensors.read(key).to(parameter.device).float() for part, key in parts.items()}
        parameter.copy_(_changed(parameter.float(), read, scale))
    return tuple(changes)


def _changes(
    tensors: TensorFiles, parameters: dict[str, Any], path: Path, class_name: str
) -> dict[str, dict[str, str]]:
    """Keys of a file by the parameter that they change and by their part in the change."""
    changes: dict[str, dict[str, str]] = {}
    unknown = []
    for key in tensors.keys:
        plain = key.replace(".default.weight", ".weight")
        plain = next((plain.removeprefix(prefix) for prefix in _PREFIXES if plain.startswith(prefix)), plain)
        ending = next((ending for ending in _ENDINGS if plain.endswith(ending)), None)
        if ending is None:
            unknown.append(key)
            continue
        parameter_ending, part = _ENDINGS[ending]
        changes.setdefault(plain.removesuffix(ending) + parameter_ending, {})[part] = key
    if unknown:
        raise ValueError(f"{path} has keys of no known form {some(unknown)}, known are {', '.join(_ENDINGS)}")
    missing = [name for name in changes if name not in parameters]
    if gates := [name for name in missing if ".to_gate_" in name]:
        hint = 'apply(transformer, sparsity=..., gates="coarse") registers them'
        raise ValueError(f"{path} has gates that the {class_name} lacks {some(gates)}: {hint}")
    if missing:
        raise ValueError(f"{path} changes parameters that {class_name} lacks {some(missing)}")
    factors = {name: {"down", "up", "alpha"} & parts.keys() for name, parts in changes.items()}
    if single := [name for name, own in factors.items() if own and not {"down", "up"} <= own]:
        raise ValueError(f"{path} has one of two factors of {some(single)}")
    return changes


def _changed(value: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """A parameter after a change."""
    if "down" in parts:
        rank = len(parts["down"])
        alpha = parts["alpha"].item() if "alpha" in parts else rank
        value = value + scale * alpha / max(rank, 1) * (parts["up"] @ parts["down"]).view_as(value)
    if "diff" in parts:
        value = value + scale * parts["diff"]
    return parts.get("set", value)
