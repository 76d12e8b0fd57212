"""Weights of the families in the names of their original code, against the converters of diffusers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch
import yaml
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from torch import Tensor

from tests.integrations import tiny
from vsa.attention.full import FullAttention
from vsa.checkpoints import original_names
from vsa.checkpoints.original_names import named_class, original_rows
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.integrations.diffusers import merge_adapter

CONVERTERS = {
    "ltx": single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
    "minimax_h3": partial(single_file_utils.convert_minimax_h3_transformer_checkpoint_to_diffusers, config={}),
    "hunyuan": single_file_utils.convert_hunyuan_video_transformer_to_diffusers,
}


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    if family != "hunyuan":
        return {name: tuple(p.shape) for name, p in getattr(tiny, family)().model.named_parameters()}
    # of the width that the converter assumes, with one column, because it looks at rows alone
    sizes = dict(num_attention_heads=24, attention_head_dim=128, num_layers=1, num_single_layers=1)
    sizes |= dict(num_refiner_layers=1, mlp_ratio=0.01, text_embed_dim=8, pooled_projection_dim=8)
    with torch.device("meta"):
        model = diffusers.HunyuanVideoTransformer3DModel(**sizes)  # type: ignore[arg-type]
    return {name: (*p.shape[:1], *(1 for _ in p.shape[1:])) for name, p in model.named_parameters()}


CLASSES = {
    "ltx": "LTXVideoTransformer3DModel",
    "minimax_h3": "MiniMaxH3Transformer3DModel",
    "hunyuan": "HunyuanVideoTransformer3DModel",
}


def original(state: dict[str, Tensor], class_name: str) -> dict[str, Tensor]:
    """A state in original names."""
    rows, files = original_rows({name: tuple(x.shape) for name, x in state.items()}, class_name), {}
    for name, value in state.items():
        own = rows[name]
        whole = files.setdefault(own.key, value.new_zeros(own.total, *value.shape[1:]) if value.ndim else value)
        if value.ndim:
            whole[own.start : own.stop] = own.ordered(value)
    return files


@pytest.mark.parametrize("family", CONVERTERS)
def test_original_tensors_are_those_that_diffusers_converts(family):
    state = {name: tiny.randn(*shape, seed=i) for i, (name, shape) in enumerate(shapes_of(family).items())}
    files = original(state, CLASSES[family])
    assert len(files.keys() - state.keys()) > 5
    converted = CONVERTERS[family](dict(files))
    assert converted.keys() == state.keys()
    assert all(torch.equal(state[name], value) for name, value in converted.items())


def test_layers_of_hunyuan_video_15_have_their_original_names():
    rows = original_rows(shapes_of("hunyuan15"), "HunyuanVideo15Transformer3DModel")
    # the script convert_hunyuan_video1_5_to_diffusers.py
    assert rows["transformer_blocks.1.attn.add_k_proj.bias"].key == "double_blocks.1.txt_attn_k.bias"
    assert rows["context_embedder.token_refiner.refiner_blocks.0.attn.to_v.weight"] == (
        *("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight", 64, 96, 96, False),
    )
    assert rows["norm_out.linear.bias"] == ("final_layer.adaLN_modulation.1.bias", 0, 64, 64, True)
    assert rows["image_embedder.norm_out.weight"].key == "vision_in.proj.4.weight"
    kept = [name for name, own in rows.items() if own.key == name]
    assert kept == []


TABLES = yaml.safe_load(Path(original_names.__file__).with_suffix(".yaml").read_text())
MODELS = {
    "wan": tiny.wan,
    "ltx": tiny.ltx,
    "ltx2": tiny.ltx2,
    "cogvideox": tiny.cogvideox,
    "hunyuan": partial(tiny.hunyuan, guidance_embeds=True),
    "hunyuan15": tiny.hunyuan15,
    "kandinsky5": tiny.kandinsky5,
    "minimax_h3": tiny.minimax_h3,
}


def fits(table: list, names: Collection[str]) -> bool:
    """Whether a class has every layer of a table."""
    modules = {re.sub(r"\.\d+\.", ".N.", name.rpartition(".")[0], count=1) for name in names}
    layers = [(own, part) for _, own, layers in table for parts in layers.values() for part in parts.split()]
    return all((f"{own}.N.{part}" if own else part).replace("~", "") in modules for own, part in layers)


@pytest.mark.parametrize("family", MODELS)
def test_exactly_one_table_fits_each_class(family):
    model = MODELS[family]().model
    cls = type(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    expected = {cls.__name__} & TABLES.keys()
    # classes that share a table have it once
    fitting = [table for table in TABLES.values() if fits(table, shapes)]
    assert all(table is TABLES[cls.__name__] for table in fitting)
    assert bool(fitting) == bool(expected)
    renamed = {name for name, rows in original_rows(shapes, cls.__name__).items() if rows.key != name}
    assert bool(renamed) == (bool(expected) or family == "wan")
    # classes that are derived from it have its names
    assert named_class(type(f"FSDP{cls.__name__}", (cls,), {})) == (cls.__name__ if renamed else f"FSDP{cls.__name__}")


def test_a_class_has_no_names_of_another_with_the_same_parameters(tmp_path):
    model = tiny.ltx2().model
    before = {name: p.clone() for name, p in model.named_parameters()}
    save_file({"video_patch_proj.diff_b": torch.ones_like(model.proj_in.bias)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"changes parameters that LTX2Video.* lacks video_patch_proj.bias"):
        merge_adapter(model, tmp_path / "x.safetensors")
    save_file({"patchify_proj.diff_b": torch.ones_like(model.proj_in.bias)}, tmp_path / "x.safetensors")
    assert merge_adapter(model, tmp_path / "x.safetensors") == ("proj_in.bias",)
    assert torch.equal(model.proj_in.bias, before["proj_in.bias"] + 1)


FILES = {
    "ltx": ("model.diffusion_model.", {"vae.decoder.conv_in.conv.weight": torch.ones(2)}),
    "minimax_h3": ("", {"rope.inv_freq": torch.ones(2)}),
    "hunyuan": ("", {}),
    "hunyuan15": ("diffusion_model.", {}),
    "kandinsky5": ("model.diffusion_model.", {}),
    "cogvideox": ("transformer.", {}),
}


def one_file(family: str, folder: Path, **changes: Tensor) -> tuple[dict[str, Tensor], Path]:
    """A file in original names, beside the config.json of the class."""
    prefix, others = FILES[family]
    model = getattr(tiny, family)().model
    config = {"_class_name": type(model).__name__, **model.config}
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: x.bfloat16() for name, x in model.state_dict().items()}
    files = {prefix + name: x for name, x in {**original(state, type(model).__name__), **changes}.items()} | others
    save_file(files, folder / "one_file_bf16.safetensors")
    return state, folder / "one_file_bf16.safetensors"


@pytest.mark.parametrize("family", FILES)
def test_a_file_of_every_family_is_opened(family, tmp_path):
    state, path = one_file(family, tmp_path)
    for place in (path, tmp_path):
        source = open_weights(place)
        assert set(source) == set(state)
        assert all(torch.equal(source[name], value) for name, value in state.items())
        assert source.shapes == {name: tuple(value.shape) for name, value in state.items()}
    model, _ = open_network(path)
    assert all(torch.equal(p, state[name].float()) for name, p in model.named_parameters())


def test_files_that_do_not_fit_are_refused_in_one_line(tmp_path):
    scaled = {"blocks.0.attn.qkv_proj.scale_weight": torch.ones(1)}
    _, path = one_file("minimax_h3", tmp_path, **scaled)
    with pytest.raises(ValueError, match=r"is quantized to fp8 \(blocks.0.attn.qkv_proj.scale_weight"):
        open_weights(path)
    _, path = one_file("minimax_h3", tmp_path, **{"blocks.0.attn.qkv_proj.weight": torch.ones(95, 24)})
    source = open_weights(path)
    model = source.network(attention=FullAttention)
    with pytest.raises(
        ValueError, match=r"to_q.weight has shape \(95, 24\), the model needs \(32, 24\); .*to_k"
    ) as caught:
        source.check(model, "absent")
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"a file of another class needs the config.json of its transformer in diffusers"
    ):
        open_weights(path)
