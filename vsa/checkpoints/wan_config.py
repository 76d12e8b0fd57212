"""`config.json` of diffusers' `WanTransformer3DModel`: conversion to and from the arguments of a `VideoDiT`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from vsa.config_files import config_folder
from vsa.models.embeddings import ResidualNorm
from vsa.models.network import Network

CLASS_NAME = "WanTransformer3DModel"
SPARSE_FLAG = "sparse_attention"
"""Key of an exported `config.json` with the name of the file that describes the gates."""

# defaults for missing keys of a config.json (diffusers 0.42)
_DEFAULTS: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
}
# keys of which this model supports a single value
_FIXED = {"qk_norm": "rms_norm_across_heads", "pos_embed_seq_len": None}


def video_dit_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments of the `VideoDiT` that is equivalent to a `WanTransformer3DModel` with this config.

    Raises:
        ValueError: another class, or an unsupported key or value.
    """
    name = config.get("_class_name")
    if name == "WanModel":
        raise ValueError("_class_name is WanModel, Wan's original layout: `vsa convert` makes it ours")
    if name != CLASS_NAME:
        raise ValueError(f"_class_name must be {CLASS_NAME}, got {name}")
    for key, value in config.items():
        if key in _FIXED and value != _FIXED[key]:
            raise ValueError(f"{key}={value} is not supported, only {_FIXED[key]}")
        is_known = key in _DEFAULTS or key in _FIXED or key == SPARSE_FLAG or key.startswith("_")
        if not is_known and value is not None:
            raise ValueError(f"config key {key}={value} is unknown: the model might compute something else")
    arguments = {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    # a list in the file; VideoDiT checks types and sizes
    if isinstance(arguments["patch_size"], list):
        arguments["patch_size"] = tuple(arguments["patch_size"])
    # the same default as in diffusers
    arguments["out_channels"] = arguments["out_channels"] or arguments["in_channels"]
    return arguments


def named_sizes(arguments: Mapping[str, Any]) -> str | None:
    """The file of `configs/model` with these arguments of a `VideoDiT`; None: no file has them."""
    for path in sorted((config_folder() / "model").glob("*.yaml")):
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        sizes = {key: node[key] for key in node if not key.startswith("_") and key != "init"}
        if all(arguments.get(key) == value for key, value in {**_DEFAULTS, **sizes}.items()):
            return path.stem
    return None


def transformer_config(model: Network) -> dict[str, Any]:
    """`config.json` of the transformer that is equivalent to a model with dense attention.

    Raises:
        ValueError: that class has no equivalent of the model or of one of its settings.
    """
    if (config := model.diffusers_config()) is not None:
        return config
    # other networks do without it
    from vsa.models.video_dit import VideoDiT

    if not isinstance(model, VideoDiT):
        raise ValueError(f"{type(model).__name__} has no counterpart in {CLASS_NAME}: its weights stay in a run folder")
    if model.absolute_positions:
        raise ValueError(
            f"model.absolute_positions=true has no counterpart in {CLASS_NAME}, it needs model.absolute_positions=false"
        )
    if model.rope_theta != 10000:
        raise ValueError(f"model.rope_theta must be 10000 in {CLASS_NAME}, the model has {model.rope_theta}")
    block: Any = model.blocks[0]
    has_image = model.image_dim is not None
    arguments = {
        "patch_size": list(model.patch_size),
        "num_attention_heads": model.num_heads,
        "attention_head_dim": model.head_dim,
        "in_channels": model.in_channels,
        "out_channels": model.out_channels,
        "text_dim": model.text_dim,
        "freq_dim": model.condition_embedder.freq_dim,
        "ffn_dim": model.ffn_dim,
        "num_layers": len(model.blocks),
        "cross_attn_norm": isinstance(block.norm2, ResidualNorm),
        "eps": block.norm1.eps,
        "image_dim": model.image_dim,
        "added_kv_proj_dim": block.attn2.add_k_proj.in_features if has_image else None,
        "rope_max_seq_len": model.rope_max_seq_len,
    }
    return {"_class_name": CLASS_NAME, **arguments, **_FIXED}
