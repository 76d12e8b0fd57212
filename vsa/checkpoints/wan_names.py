"""Names of the transformer's tensors and sizes in diffusers' layout, also used here, and in Wan's original checkpoints.

Sources: Wan2.1 `wan/modules/model.py`; diffusers `scripts/convert_wan_to_diffusers.py`. Wan numbers its norms in the
order of definition, diffusers in the order of use: Wan's norm3 is diffusers' norm2, the one before the
cross-attention. Gates keep their names, since Wan has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vsa.checkpoints.held_files import config_of_shapes, nearest
from vsa.files import check_kind
from vsa.settings import AtLeastOne

_TIME_TEXT_IMAGE = "condition_embedder."

# diffusers' module name -> Wan's
_TOP = {
    "patch_embedding": "patch_embedding",
    _TIME_TEXT_IMAGE + "time_embedder.linear_1": "time_embedding.0",
    _TIME_TEXT_IMAGE + "time_embedder.linear_2": "time_embedding.2",
    _TIME_TEXT_IMAGE + "time_proj": "time_projection.1",
    _TIME_TEXT_IMAGE + "text_embedder.linear_1": "text_embedding.0",
    _TIME_TEXT_IMAGE + "text_embedder.linear_2": "text_embedding.2",
    _TIME_TEXT_IMAGE + "image_embedder.norm1": "img_emb.proj.0",
    _TIME_TEXT_IMAGE + "image_embedder.ff.net.0.proj": "img_emb.proj.1",
    _TIME_TEXT_IMAGE + "image_embedder.ff.net.2": "img_emb.proj.3",
    _TIME_TEXT_IMAGE + "image_embedder.norm2": "img_emb.proj.4",
    "proj_out": "head.head",
    "scale_shift_table": "head.modulation",
}
_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
_IMAGE_ATTENTION = {"add_k_proj": "k_img", "add_v_proj": "v_img", "norm_added_k": "norm_k_img"}
# the same within `blocks.N.`
_BLOCK = {
    **{f"attn1.{ours}": f"self_attn.{wan}" for ours, wan in _ATTENTION.items()},
    **{f"attn2.{ours}": f"cross_attn.{wan}" for ours, wan in (_ATTENTION | _IMAGE_ATTENTION).items()},
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "scale_shift_table": "modulation",
    "to_gate_compress": "to_gate_compress",
    "to_gate_fine": "to_gate_fine",
    # of SLA, in TurboDiffusion's checkpoints
    "proj_l": "self_attn.attn_op.local_attn.proj_l",
}
_TOP_BACK = {wan: ours for ours, wan in _TOP.items()}
_BLOCK_BACK = {wan: ours for ours, wan in _BLOCK.items()}

_BLOCK_KEY = re.compile(r"(blocks\.\d+\.)(.+)$")
_EXTRA = r"to_gate_\w+|to_pool(_[qkv])?\.convs?(\.\d+)?|proj_l"
_GATE_KEY = re.compile(rf"\w*blocks\.\d+\.(attn\.)?({_EXTRA})\.(weight|bias)$")
_UNUSED_KEY = re.compile(r"blocks\.\d+\.attn2\.norm_added_q\.weight$")


def diffusers_to_wan(key: str) -> str:
    """Wan's original name of a tensor with a diffusers name; ValueError for an unknown name."""
    return _rename(key, _TOP, _BLOCK, "diffusers")


def wan_to_diffusers(key: str) -> str:
    """The diffusers name of a tensor with Wan's original name; ValueError for an unknown name."""
    return _rename(key, _TOP_BACK, _BLOCK_BACK, "Wan")


def wan_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of Wan's `WanModel` from that of a `WanTransformer3DModel`.

    It omits sizes that the original code does not read from this file (patch, text width).

    Args:
        config: config with every key, as written by `transformer_config`.
    """
    conditioned = config["image_dim"] is not None or config["in_channels"] != config["out_channels"]
    # latents with 48 channels belong to Wan2.2's TI2V model
    text_only = "ti2v" if config["in_channels"] == 48 else "t2v"
    return {
        "_class_name": "WanModel",
        "model_type": "i2v" if conditioned else text_only,
        "text_len": 512,
        "in_dim": config["in_channels"],
        "out_dim": config["out_channels"],
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "eps": config["eps"],
    }


def config_of_wan(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """`config.json` of the `WanTransformer3DModel` for an original Wan checkpoint.

    Args:
        config: `config.json` of the checkpoint.
        shapes: shapes of its tensors, by diffusers name.

    Raises:
        ValueError: a missing key, or a width that is not divisible by the number of heads.
    """
    try:
        dim, heads = config["dim"], config["num_heads"]
        check_kind({"dim": dim, "num_heads": heads}, {str: AtLeastOne}, "config.json")
        sizes = {
            "in_channels": config["in_dim"],
            "out_channels": config["out_dim"],
            "freq_dim": config["freq_dim"],
            "ffn_dim": config["ffn_dim"],
            "num_layers": config["num_layers"],
        }
        eps = config["eps"]
    except KeyError as error:
        raise ValueError(f"a Wan checkpoint needs {error.args[0]}, it is missing") from None
    if dim % heads:
        raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {heads}")
    return config_of_shapes(shapes, heads=heads, eps=eps) | sizes | {"attention_head_dim": dim // heads}


def is_gate(key: str) -> bool:
    """Whether a tensor belongs to a sparse attention method: to a gate (`blocks.N.to_gate_compress.weight`), to a
    pooling with weights (`blocks.N.to_pool_q.conv.weight`) or to SLA's projection (`blocks.N.proj_l.weight`)."""
    return _GATE_KEY.match(key) is not None


def is_unused(key: str) -> bool:
    """Whether a tensor occurs in older image-to-video checkpoints but is not used by the model."""
    return _UNUSED_KEY.match(key) is not None


def _rename(key: str, top: dict[str, str], block: dict[str, str], naming: str) -> str:
    prefix, rest, table = "", key, top
    if match := _BLOCK_KEY.match(key):
        prefix, rest, table = match[1], match[2], block
    # a modulation table is a parameter itself, all others are weights or biases of modules
    is_table = rest.rpartition(".")[2] in ("scale_shift_table", "modulation")
    module, kind = (rest, "") if is_table else rest.rsplit(".", 1) if "." in rest else ("", "")
    if module not in table or (not is_table and kind not in ("weight", "bias")):
        known = [prefix + name for name in table]
        raise ValueError(f"{key} is not a tensor of a {naming} checkpoint{nearest(key.rpartition('.')[0], known)}")
    return f"{prefix}{table[module]}" + (f".{kind}" if kind else "")
