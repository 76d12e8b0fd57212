"""Weights of Wan as people hold them: one file under any prefix, shards, variants of a dtype, with or without a config.

Sources of the layouts: diffusers 0.42 (`_add_variant` of its names), ComfyUI's `diffusion_models` files and merged
checkpoints (prefix `model.diffusion_model.`), whose keys are Wan's own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

FORMATS = (".safetensors", ".gguf", ".pth", ".pt", ".ckpt", ".bin")
"""Endings of files of weights."""

WEIGHTS = "diffusion_pytorch_model"
"""Usual name of a file of weights, without its ending."""

HEAD_DIM, EPS = 128, 1e-6
"""Published values of all Wan models, which no shape determines."""

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "")
"""What may stand before the names in a file of a transformer."""

_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_FIRST = "patch_embedding.weight"
_ADAPTER = re.compile(r"\.(lora_\w+|diff|diff_b|hada_\w+|alpha)(\.|$)")
_SCALE = re.compile(r"(^|\.)(scale_weight|scale_input|scaled_fp8|weight_scale|input_scale)$")


def holds_file(place: Path) -> bool:
    """Whether a place is a file, or a folder that holds weights and neither in itself nor in transformer/ a config."""
    if place.is_file():
        return True
    described = any((folder / "config.json").is_file() for folder in (place, place / "transformer"))
    return not described and any(file.suffix in FORMATS for file in place.iterdir())


def weights_file(place: Path) -> Path:
    """The file of the weights at a place, or the index of their shards.

    Args:
        place: a file, or a folder with `WEIGHTS.safetensors`, with one variant of it (`WEIGHTS.bf16.safetensors`), or
            with one file of weights of any name; shards have an index.

    Raises:
        ValueError: there are none, several, or only files of another format.
    """
    if place.is_file():
        if place.suffix != ".safetensors" and not place.name.endswith(".json"):
            raise ValueError(other_format(place))
        return place
    whole = [file for file in sorted(place.glob("*.safetensors")) if not _SHARD.search(file.name)]
    indexes = sorted(place.glob("*.safetensors.index*.json"))
    for start in (f"{WEIGHTS}.safetensors", f"{WEIGHTS}.", ""):
        # an index comes before a file of the same name
        found = [file for file in (*indexes, *whole) if file.name.startswith(start)]
        if len(found) == 1 or (found and start == f"{WEIGHTS}.safetensors"):
            return found[0]
        if found:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"{place} has several files of weights, {names}: name the file of one")
    others = [file for ending in FORMATS[1:] for file in sorted(place.glob(f"*{ending}"))]
    if others:
        raise ValueError(other_format(others[0]))
    raise ValueError(f"{place} has no {WEIGHTS}.safetensors and no index of shards")


def other_format(file: Path) -> str:
    """Message for a file of weights that is not of safetensors."""
    if file.suffix == ".gguf":
        return f"{file} is quantized for inference (GGUF), which cannot be trained: name the bf16 .safetensors file"
    return f"{file} is no safetensors file: name the .safetensors file of the same weights"


def refuse_quantized(path: Path, key: str, dtype: str) -> None:
    """Raise ValueError for a tensor of weights scaled to 8 bits."""
    if dtype.startswith("F8") or _SCALE.search(key):
        raise ValueError(
            f"{path} is quantized to fp8 ({key} has dtype {dtype}), which cannot be trained: name the bf16 or fp16 "
            "file of the same model"
        )


def unprefixed(keys: Collection[str], what: str) -> dict[str, str]:
    """Keys of a Wan model by their names without a prefix such as `model.diffusion_model.`; others are left out.

    Raises:
        ValueError: no key is the first one of such a model, or several are; `what` names the file.
    """
    prefixes = [key.removesuffix(_FIRST) for key in keys if key.endswith(_FIRST)]
    prefixes = [prefix for prefix in prefixes if not prefix or prefix.endswith(".")]
    if len(prefixes) == 1:
        return {key.removeprefix(prefixes[0]): key for key in keys if key.startswith(prefixes[0])}
    first = min(keys, default="none")
    if any(map(_ADAPTER.search, keys)):
        raise ValueError(f"{what} holds adapters ({first}), not a model: init_from takes the model that they adapt")
    raise ValueError(
        f"{what} has {len(prefixes)} keys {_FIRST}, a Wan model has one; its first key is {first}; a file of another "
        "class needs the config.json of its transformer in diffusers beside it"
    )


def nearest(key: str, known: Collection[str]) -> str:
    """The end of a message: the known name that is most like an unknown one."""
    match = get_close_matches(key, known, 1, 0.4)
    return f"; the nearest is {match[0]}" if match else ""


def config_of_shapes(
    shapes: Mapping[str, Sequence[int]], *, heads: int | None = None, eps: float = EPS
) -> dict[str, Any]:
    """`config.json` of the `WanTransformer3DModel` whose tensors have these shapes.

    Args:
        shapes: shapes by diffusers name.
        heads: attention heads; None: those of Wan's published head width.
        eps: epsilon of the norms.

    Raises:
        ValueError: a tensor is missing or has another number of dimensions, or heads do not divide the width.
    """

    def shape(name: str, dims: int) -> Sequence[int]:
        if name not in shapes:
            raise ValueError(f"a Wan checkpoint needs {name}, it is missing")
        if len(shapes[name]) != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got {list(shapes[name])}")
        return shapes[name]

    embed = "condition_embedder."
    dim, channels, *patch = shape(_FIRST, 5)
    if dim % (heads or HEAD_DIM):
        divisor = f"num_heads, got {dim} and {heads}" if heads else f"Wan's head width {HEAD_DIM}, got {dim}"
        raise ValueError(f"dim must be a multiple of {divisor}")
    blocks = [int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))]
    image = shapes.get(f"{embed}image_embedder.norm1.weight")
    return {
        "_class_name": "WanTransformer3DModel",
        "patch_size": patch,
        "num_attention_heads": heads or dim // HEAD_DIM,
        "attention_head_dim": dim // heads if heads else HEAD_DIM,
        "in_channels": channels,
        "out_channels": shape("proj_out.weight", 2)[0] // (patch[0] * patch[1] * patch[2]),
        "text_dim": shape(f"{embed}text_embedder.linear_1.weight", 2)[1],
        "freq_dim": shape(f"{embed}time_embedder.linear_1.weight", 2)[1],
        "ffn_dim": shape("blocks.0.ffn.net.0.proj.weight", 2)[0],
        "num_layers": max(blocks) + 1,
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "eps": eps,
        "image_dim": None if image is None else image[0],
        "added_kv_proj_dim": None if image is None else dim,
    }
