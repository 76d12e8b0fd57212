"""Names of parameters in the original code of transformer classes, as in files of ComfyUI and musubi-tuner.

An original tensor may hold several parameters of the class, one after the other in its rows. Classes without a table
here have their original names.

Sources: diffusers 0.42, `loaders/single_file_utils.py` and `loaders/lora_conversion_utils.py`; its script
`convert_hunyuan_video1_5_to_diffusers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from vsa.checkpoints.wan_names import diffusers_to_wan

Shapes = Mapping[str, tuple[int, ...]]

_QKV, _ADDED = "attn.to_q+attn.to_k+attn.to_v", "attn.add_q_proj+attn.add_k_proj+attn.add_v_proj"
# SwiGLU is [gate; value], in the class [value; gate]
_H3 = (
    f"attn.qkv_proj={_QKV} attn.q_norm=attn.norm_q attn.k_norm=attn.norm_k attn.out_proj=attn.to_out.0 "
    "mlp.fc1=~ff.net.0.proj mlp.fc2=ff.net.2"
)
_DOUBLE = (
    "img_mod.linear=norm1.linear img_attn_q_norm=attn.norm_q img_attn_k_norm=attn.norm_k img_attn_proj=attn.to_out.0 "
    "img_mlp.fc1=ff.net.0.proj img_mlp.fc2=ff.net.2 txt_mod.linear=norm1_context.linear "
    "txt_attn_q_norm=attn.norm_added_q txt_attn_k_norm=attn.norm_added_k txt_attn_proj=attn.to_add_out "
    "txt_mlp.fc1=ff_context.net.0.proj txt_mlp.fc2=ff_context.net.2 "
)
_SPLIT = (
    "img_attn_q=attn.to_q img_attn_k=attn.to_k img_attn_v=attn.to_v "
    "txt_attn_q=attn.add_q_proj txt_attn_k=attn.add_k_proj txt_attn_v=attn.add_v_proj"
)
_REFINER = (
    f"self_attn_qkv={_QKV} self_attn_proj=attn.to_out.0 mlp.fc1=ff.net.0.proj mlp.fc2=ff.net.2 "
    "adaLN_modulation.1=norm_out.linear"
)
_ENDS = (
    "img_in.proj=x_embedder.proj txt_in.input_embedder=context_embedder.proj_in "
    "txt_in.t_embedder.mlp.0=context_embedder.time_text_embed.timestep_embedder.linear_1 "
    "txt_in.t_embedder.mlp.2=context_embedder.time_text_embed.timestep_embedder.linear_2 "
    "txt_in.c_embedder.linear_1=context_embedder.time_text_embed.text_embedder.linear_1 "
    "txt_in.c_embedder.linear_2=context_embedder.time_text_embed.text_embedder.linear_2 "
    "final_layer.adaLN_modulation.1=~norm_out.linear final_layer.linear=proj_out "
)
_TEXT_BLOCKS = ("txt_in.individual_token_refiner.blocks", "context_embedder.token_refiner.refiner_blocks")
_TABLES: Mapping[str, Mapping[tuple[str, str], str]] = {
    # MiniMax-H3
    "audio_proj_in.weight": {
        ("blocks", "transformer_blocks"): _H3,
        ("token_refiner.blocks", "token_refiner.refiner_blocks"): _H3,
        ("", ""): "video_patch_proj=proj_in audio_patch_proj=audio_proj_in condition_proj=context_embedder "
        "time_embedder.proj_in=time_embedder.linear_1 time_embedder.proj_out=time_embedder.linear_2 "
        "final_layer.norm=norm_out.norm final_layer.adaln_proj.linear=norm_out.linear final_layer.video_out=proj_out "
        "final_layer.audio_out=audio_proj_out",
    },
    # HunyuanVideo
    "time_text_embed.timestep_embedder.linear_1.weight": {
        ("double_blocks", "transformer_blocks"): f"{_DOUBLE}img_attn_qkv={_QKV} txt_attn_qkv={_ADDED}",
        ("single_blocks", "single_transformer_blocks"): f"linear1={_QKV}+proj_mlp linear2=proj_out "
        "modulation.linear=norm.linear q_norm=attn.norm_q k_norm=attn.norm_k",
        _TEXT_BLOCKS: _REFINER,
        ("", ""): f"{_ENDS}time_in.mlp.0=time_text_embed.timestep_embedder.linear_1 "
        "time_in.mlp.2=time_text_embed.timestep_embedder.linear_2 "
        "guidance_in.mlp.0=time_text_embed.guidance_embedder.linear_1 "
        "guidance_in.mlp.2=time_text_embed.guidance_embedder.linear_2 "
        "vector_in.in_layer=time_text_embed.text_embedder.linear_1 "
        "vector_in.out_layer=time_text_embed.text_embedder.linear_2",
    },
    # HunyuanVideo 1.5
    "cond_type_embed.weight": {
        ("double_blocks", "transformer_blocks"): f"{_DOUBLE}{_SPLIT}",
        _TEXT_BLOCKS: _REFINER,
        ("", ""): f"{_ENDS}time_in.mlp.0=time_embed.timestep_embedder.linear_1 "
        "time_in.mlp.2=time_embed.timestep_embedder.linear_2 cond_type_embedding=cond_type_embed "
        "byt5_in.layernorm=context_embedder_2.norm byt5_in.fc1=context_embedder_2.linear_1 "
        "byt5_in.fc2=context_embedder_2.linear_2 byt5_in.fc3=context_embedder_2.linear_3 "
        "vision_in.proj.0=image_embedder.norm_in vision_in.proj.1=image_embedder.linear_1 "
        "vision_in.proj.3=image_embedder.linear_2 vision_in.proj.4=image_embedder.norm_out",
    },
    # LTX-Video
    "time_embed.linear.weight": {
        ("transformer_blocks", "transformer_blocks"): "attn1.q_norm=attn1.norm_q attn1.k_norm=attn1.norm_k "
        "attn2.q_norm=attn2.norm_q attn2.k_norm=attn2.norm_k",
        ("", ""): "patchify_proj=proj_in adaln_single.linear=time_embed.linear "
        "adaln_single.emb.timestep_embedder.linear_1=time_embed.emb.timestep_embedder.linear_1 "
        "adaln_single.emb.timestep_embedder.linear_2=time_embed.emb.timestep_embedder.linear_2",
    },
}
"""By a parameter of the class: stacks of blocks, original and of the class, with the layers of a block, and all others.

Layers are ORIGINAL=LAYER+LAYER; ~ says that the halves of the rows change places. What is not here has its own name.
"""


class Rows(NamedTuple):
    """The rows of an original tensor that are a parameter of the class.

    Args:
        key: name of the original tensor.
        start: first row.
        stop: row after the last one.
        total: rows of the original tensor.
        swapped: whether the halves of the rows change places.
    """

    key: str
    start: int
    stop: int
    total: int
    swapped: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The parameter `[stop - start, ...]` in the original tensor `[total, ...]`."""
        return self.ordered(tensor[self.start : self.stop]) if tensor.ndim else tensor

    def ordered(self, rows: Tensor) -> Tensor:
        """Rows of the parameter in the order of the original tensor, and the other way round."""
        return rows.roll(len(rows) // 2, 0) if self.swapped else rows


def original_rows(shapes: Shapes) -> dict[str, Rows]:
    """Where the original tensors hold each parameter.

    Args:
        shapes: shapes of all parameters of the class by name.
    """
    stacks = next((table for first, table in _TABLES.items() if first in shapes), {})
    found: dict[str, dict[int, tuple[str, bool]]] = {}
    for name in shapes:
        key, place, swapped = _original(name, stacks)
        if "patch_embedding.weight" in shapes:
            with suppress(ValueError):
                key = diffusers_to_wan(name)
        found.setdefault(key, {})[place] = name, swapped
    rows = {}
    for key, parts in found.items():
        counts = [(*shapes[name], 1)[0] for _, (name, _) in sorted(parts.items())]
        for i, (_, (name, swapped)) in enumerate(sorted(parts.items())):
            rows[name] = Rows(key, sum(counts[:i]), sum(counts[: i + 1]), sum(counts), swapped)
    return rows


def own_name(key: str, shapes: Shapes) -> str:
    """The name that the class gives to a gate with an original name."""
    for table in (table for first, table in _TABLES.items() if first in shapes):
        for original, own in table:
            if original and key.startswith(f"{original}."):
                return own + key.removeprefix(original)
    return key


def _original(name: str, stacks: Mapping[tuple[str, str], str]) -> tuple[str, int, bool]:
    """The original name of a parameter, its place among those of the same tensor, and whether its halves change."""
    for (original, own), layers in stacks.items():
        match = re.match(rf"{re.escape(own)}(\.\d+\.)(.+)" if own else "()(.+)", name)
        if match is None:
            continue
        module, _, kind = match[2].rpartition(".")
        for word in layers.split():
            layer, _, parts = word.partition("=")
            for place, part in enumerate(parts.split("+")):
                if part.removeprefix("~") == module:
                    return f"{original}{match[1]}{layer}.{kind}", place, part[0] == "~"
        if own:
            return f"{original}{match[1]}{match[2]}", 0, False
    return name, 0, False
