"""Checkpoints that do not fit are refused with a message, and the model is not touched."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.wan_models import COARSE_ONLY, SPARSE, config_of, ours, random_sparse, saved
from vsa.attention.full import FullAttention
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
)
from vsa.checkpoints.wan import (
    export_pretrained,
)
from vsa.checkpoints.weight_files import WeightFiles, pretrained_folder
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.training.modules.checks import refuse_other_noise

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")


def tampered(folder: Path, change) -> None:
    path = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: set_config(f, num_attention_heads=6), "num_attention_heads=6, the model has 3"),
        (lambda f: set_config(f, num_layers=3), "num_layers=3, the model has 2"),
        (lambda f: set_config(f, ffn_dim=96), "ffn_dim=96, the model has 80"),
        (lambda f: set_config(f, eps=1e-5), "eps=1e-05, the model has 1e-06"),
        (lambda f: set_config(f, rope_max_seq_len=512), "rope_max_seq_len=512, the model has 1024"),
        (lambda f: set_config(f, pos_embed_seq_len=514), "pos_embed_seq_len=514 is not supported, only None"),
        (lambda f: set_config(f, qk_norm="rms_norm"), "qk_norm=rms_norm is not supported, only rms_norm_across_heads"),
        (lambda f: set_config(f, vace_layers=[0]), r"vace_layers=\[0\] is unknown"),
        (lambda f: set_config(f, _class_name="WanVACETransformer3DModel"), "got WanVACETransformer3DModel"),
        (lambda f: set_config(f, _class_name="WanModel"), "config.json: a Wan checkpoint needs dim, it is missing"),
        (lambda f: (f / "config.json").write_text("{"), "does not parse"),
        (
            lambda f: (f / "config.json").unlink(),
            "without config.json: dim must be a multiple of Wan's head width 128, got 48",
        ),
        (lambda f: (f / "diffusion_pytorch_model.safetensors").unlink(), "no diffusion_pytorch_model.safetensors"),
        (lambda f: (f / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 99), "is damaged"),
        (lambda f: tampered(f, lambda t: t.pop("proj_out.bias")), "lacks 1 tensors of the model: proj_out.bias"),
        (lambda f: tampered(f, lambda t: t.update(more=torch.ones(1))), "has 1 tensors .* no place for: more"),
        (
            lambda f: tampered(f, lambda t: t.update({"proj_out.bias": torch.ones(31)})),
            r"proj_out.bias has shape \(31,\), the model needs \(32,\)",
        ),
        (
            lambda f: tampered(f, lambda t: t.update({"proj_out.bias": torch.ones(32, dtype=torch.int8)})),
            "proj_out.bias has dtype I8",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_before_a_byte_is_copied(change, message, tmp_path):
    saved(tmp_path)
    change(tmp_path)
    model = ours()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message) as caught:
        open_weights(tmp_path).load(model, "absent")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with torch.device("meta"):
        meta_model = ours()
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path).check(meta_model, "absent")


def test_shards_that_disagree_with_their_index_are_refused(tmp_path):
    saved(tmp_path, shard="60KB")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    good = json.loads(index.read_text())
    del good["weight_map"]["proj_out.bias"]
    index.write_text(json.dumps(good))
    with pytest.raises(ValueError, match=r"do not hold the same tensors: proj_out\.bias"):
        WeightFiles(tmp_path)
    next(tmp_path.glob("*-00002-*")).unlink()
    with pytest.raises(ValueError, match=r"00002.* is missing"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{folder}/../outside.safetensors", "a/../../outside", "", 7, []]
)
def test_an_index_names_files_of_its_own_folder(name, tmp_path):
    folder = tmp_path / "sharded"
    saved(folder, shard="60KB")
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"]["proj_out.bias"]
    # with links instead, as the hub's cache has them, the same files are read
    shutil.move(folder / file, tmp_path / "outside.safetensors")
    (folder / file).symlink_to("../outside.safetensors")
    WeightFiles(folder)
    outside = name.format(folder=folder) if isinstance(name, str) else name
    content["weight_map"] = {key: outside if at == file else at for key, at in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"index.json names .*, expected a relative path without \.\."):
        WeightFiles(folder)


def test_a_tensor_has_one_place(tmp_path):
    saved(tmp_path, shard="60KB")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    text = index.read_text()
    content = json.loads(text)
    # the last and the first tensor change places, so both files are still named
    last, first = content["weight_map"]["proj_out.bias"], content["weight_map"]["patch_embedding.bias"]
    assert last != first
    content["weight_map"]["proj_out.bias"] = first
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"has proj_out\.bias in {first}, but it is in {last}"):
        WeightFiles(tmp_path)
    index.write_text(text)
    tensors = load_file(tmp_path / last)
    save_file(tensors | {"patch_embedding.bias": torch.ones(48)}, tmp_path / last)
    with pytest.raises(ValueError, match=rf"patch_embedding\.bias is in two files, {first} and {last}"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("attention", "gates", "message"),
    [
        (SPARSE, "absent", "gates=absent takes a dense checkpoint, but .* has gates: blocks.0.to_gate_compress.bias"),
        (SPARSE, "initial", "gates=initial takes a dense checkpoint, but .* has gates"),
        (FullAttention, "required", "gates=required, but the model has none"),
        (
            COARSE_ONLY,
            "required",
            "has 4 gate tensors the model has no place for: blocks.0.to_gate_fine.bias, .*, ...; "
            "attention.fine_gate=true gives them a place$",
        ),
        (partial(SPARSE, tile_thw=(4, 4, 4)), "required", r"tile_thw=\(2, 2, 2\), the model has \(4, 4, 4\)"),
        (partial(SPARSE, partition="hilbert_run"), "required", "partition=cube, the model has hilbert_run"),
        (SPARSE, "some", "gates must be required, initial or absent, got 'some'"),
    ],
)
def test_gates_of_a_sparse_checkpoint(attention, gates, message, tmp_path):
    model = random_sparse()
    export_pretrained(model, tmp_path / "out", sparse=config_of(model))
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path / "out").load(ours(attention), gates)


@pytest.mark.parametrize(
    ("attention", "gates", "message"),
    [
        (
            SPARSE,
            "required",
            "lacks 8 gate tensors of the model: blocks.0.to_gate_compress.bias.*; to finetune a dense checkpoint use "
            "task.gates=initial$",
        ),
        (SPARSE, "absent", "gates=absent, but the model has gates"),
    ],
)
def test_gates_of_a_model_for_a_dense_checkpoint(attention, gates, message, tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path).load(ours(attention), gates)


def test_a_fine_gate_that_only_the_model_has_is_named_with_its_setting(tmp_path):
    model = ours(COARSE_ONLY)
    export_pretrained(model, tmp_path / "out", sparse=config_of(model))
    with pytest.raises(ValueError, match=r"lacks 4 gate tensors .*; attention\.fine_gate=false leaves them out$"):
        open_weights(tmp_path / "out").load(ours(SPARSE), "required")


def test_gates_without_their_file_are_refused(tmp_path):
    model = random_sparse()
    export_pretrained(model, tmp_path / "out", sparse=config_of(model))
    path = tmp_path / "out" / SPARSE_CONFIG
    text = path.read_text()
    path.unlink()
    with pytest.raises(ValueError, match=r"sparse_attention\.json is missing"):
        open_weights(tmp_path / "out").load(ours(SPARSE), "required")
    with pytest.raises(ValueError, match=r"sparse_attention\.json is missing"):
        open_network(tmp_path / "out")
    path.write_text(text.replace('"schema_version": 1', '"schema_version": 3'))
    with pytest.raises(ValueError, match=r"sparse_attention\.json: schema_version is 3, this version reads 1 and 2"):
        open_network(tmp_path / "out")


def test_exports_that_cannot_be_written_down_are_refused(tmp_path):
    model = random_sparse()
    sparse, ranked = config_of(model), random_sparse()
    for method in ranked.attention_layers:
        method.score = "subblock_lse"
    cases = [
        (
            lambda: export_pretrained(ranked, tmp_path / "a", sparse=sparse),
            "sparse_attention.json has settings=None, the model has {.*'score': 'subblock_lse'",
        ),
        (lambda: export_pretrained(model, tmp_path / "a", sparse=None), "the model has gates"),
        (
            lambda: export_pretrained(ours(), tmp_path / "a", sparse=sparse),
            "neighborhood.* the model has FullAttention",
        ),
        (
            lambda: export_pretrained(model, tmp_path / "a", sparse=replace(sparse, tile_thw=(4, 4, 4))),
            r"tile_thw=\(4, 4, 4\), the model has \(2, 2, 2\)",
        ),
        (
            lambda: export_pretrained(model, tmp_path / "a", sparse=replace(sparse, grid_topk=((1, 2, 3),))),
            "grid_topk of 3 layers, the model has 2",
        ),
        (
            lambda: export_pretrained(ours(absolute_positions=True), tmp_path / "a", sparse=None),
            "absolute_positions=true has no counterpart",
        ),
        (lambda: export_pretrained(ours(rope_theta=100.0), tmp_path / "a", sparse=None), "rope_theta .* has 100"),
        (lambda: export_pretrained(ours(), tmp_path / "a", sparse=None, max_shard_bytes=0), "at least 1, got 0"),
        (lambda: export_pretrained(ours(), Path(__file__).parent, sparse=None), "already exists"),
    ]
    for export, message in cases:
        with pytest.raises(ValueError, match=message):
            export()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no such folder: \./nowhere/at/all"):
        open_weights("./nowhere/at/all")
    with pytest.raises(ValueError, match=r"^nobody/nothing is neither a local folder nor a hub id that can be loaded"):
        open_weights("nobody/nothing")


def two_experts(folder: Path, **parts: Any) -> Path:
    for name in ("transformer", "transformer_2"):
        saved(folder / name)
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    index |= {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9}
    (folder / "model_index.json").write_text(json.dumps(index | parts))
    return folder


def test_an_expert_is_opened_by_its_name_alone(tmp_path):
    wan = two_experts(tmp_path / "wan")
    for read in (open_weights, open_network):
        with pytest.raises(
            ValueError, match=r"two transformers.*: name one, .*wan/transformer \(high noise\) or .*_2$"
        ):
            read(wan)
    high, low = (open_weights(wan / name) for name in ("transformer", "transformer_2"))
    assert (high.noise_range, low.noise_range) == ((0.9, 1.0), (0.0, 0.9))
    with pytest.raises(
        ValueError, match=r"expert for noise levels 0 to 0.9, task.objective.noise_range is \[0,1\]: set"
    ):
        refuse_other_noise(low, (0.0, 1.0))
    with pytest.raises(ValueError, match="or name the other expert"):
        refuse_other_noise(low, (0.9, 1.0))
    with pytest.raises(ValueError, match=r"expert for noise levels 0 to 0.9, a distillation needs one network for all"):
        refuse_other_noise(low, None)
    for levels in ((0.0, 0.9), (0.2, 0.8)):
        refuse_other_noise(low, levels)
    with pytest.raises(ValueError, match="has two transformers and no boundary_ratio"):
        _ = open_weights(two_experts(wan, boundary_ratio=None) / "transformer_2").noise_range
    # as a pipeline of one model writes it
    one = open_weights(two_experts(wan, transformer_2=[None, None], boundary_ratio=None))
    assert one.noise_range is None
    refuse_other_noise(one, (0.0, 1.0))


def test_experts_of_wans_own_layout_and_of_files(tmp_path):
    folders = [tmp_path / "wan" / f"{name}_noise_model" for name in ("high", "low")]
    for folder, kind in zip(folders, ("t2v", "i2v_22"), strict=True):
        saved(folder, kind)
    with pytest.raises(ValueError, match=r"name one, .*/high_noise_model \(high noise\) or .*/low_noise_model"):
        open_weights(tmp_path / "wan")
    assert [open_weights(folder).noise_range for folder in folders] == [(0.875, 1.0), (0.0, 0.9)]
    file = tmp_path / "wan2.2_t2v_low_noise_14B_bf16.safetensors"
    shutil.copy(folders[0] / "diffusion_pytorch_model.safetensors", file)
    shutil.copy(folders[0] / "config.json", tmp_path)
    assert open_weights(file).noise_range == (0.0, 0.875)


def test_an_expert_of_a_hub_id_is_downloaded_alone(monkeypatch, tmp_path):
    two_experts(tmp_path / "hub")
    patterns: list[str] = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda _, allow_patterns: patterns.extend(allow_patterns) or tmp_path / "hub",
    )
    assert open_weights("somebody/something/transformer_2").folder == tmp_path / "hub" / "transformer_2"
    assert "transformer_2/*" in patterns
    assert "transformer/*" not in patterns


def test_what_is_downloaded(monkeypatch, tmp_path):
    from huggingface_hub.utils import filter_repo_objects

    expected = [
        "model_index.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/sparse_attention.json",
        "vae/config.json",
    ]
    other = [
        "transformer_2/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    saved(tmp_path / "hub" / "transformer")
    patterns: list[str] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(tmp_path / "hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert pretrained_folder("somebody/something") == tmp_path / "hub" / "transformer"
    assert list(filter_repo_objects(expected + other, allow_patterns=patterns)) == expected
    # a repository that is a transformer, diffusers' or Wan's own
    top = ["config.json", "diffusion_pytorch_model.safetensors.index.json", "sparse_attention.json"]
    top += ["diffusion_pytorch_model-00001-of-00006.safetensors", "golden.safetensors"]
    assert list(filter_repo_objects([*top, "models_t5_umt5-xxl-enc-bf16.pth"], allow_patterns=patterns)) == top
