"""Sparse checkpoints of this project, opened in diffusers."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.integrations import tiny
from vsa.attention.denoising import DenoisingPlan
from vsa.attention.layout import Segment
from vsa.attention.named import NAMED
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    SparseAttentionConfig,
    read_sparse_config,
    write_sparse_config,
)
from vsa.checkpoints.wan import export_pretrained, sparse_settings
from vsa.integrations.diffusers import applied_attention, apply, load_sparse, remove
from vsa.models.video_dit import VideoDiT

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

MODEL = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=8, freq_dim=16)
MODEL |= dict(ffn_dim=48, num_layers=2)


def make_model(fine_gate: bool = True) -> VideoDiT:
    def attention(**layer: Any) -> VideoSparseAttention:
        return VideoSparseAttention(**layer, tile_thw=tiny.TILE, fine_gate=fine_gate)

    return tiny.stirred(VideoDiT(attention=attention, **MODEL))


def make_config(model: VideoDiT, **changes: Any) -> SparseAttentionConfig:
    settings: dict[str, Any] = dict(
        method="video_sparse",
        tile_thw=tiny.TILE,
        partition="cube",
        block_order="nested",
        fine_gate=model.blocks[0].method.to_gate_fine is not None,
        gate_keys=tuple(name for name in model.state_dict() if "to_gate_" in name),
        grid_topk=((4, 3),),
        num_tiles=(tiny.TILES,),
        grids=(tiny.GRID,),
    )
    return SparseAttentionConfig(**{**settings, **changes})


@pytest.fixture
def exported(tmp_path: Path) -> tuple[VideoDiT, Path]:
    model = make_model()
    # several shards
    return model, export_pretrained(model, tmp_path / "sparse", sparse=make_config(model), max_shard_bytes=20_000)


def inputs() -> list[torch.Tensor]:
    case = tiny.wan()
    return [case.inputs[name] for name in ("hidden_states", "timestep", "encoder_hidden_states")]


@torch.no_grad()
@pytest.mark.parametrize("fine_gate", [True, False])
def test_loaded_transformer_equals_our_model(tmp_path, fine_gate):
    model = make_model(fine_gate)
    folder = export_pretrained(model, tmp_path / "sparse", sparse=make_config(model), max_shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    transformer = load_sparse(folder)
    assert set(transformer.state_dict()) == set(model.state_dict())
    actual = transformer(*inputs()).sample
    assert tiny.difference(actual, model(*inputs(), topk=(4, 3))) < 1e-5
    # control: top-k of the other layer
    assert tiny.difference(actual, model(*inputs(), topk=(3, 4))) > 1e-4
    remove(transformer)
    base = {name: tensor for name, tensor in model.state_dict().items() if "to_gate_" not in name}
    assert {name: tensor.shape for name, tensor in transformer.state_dict().items()} == {
        name: tensor.shape for name, tensor in base.items()
    }
    assert all(torch.equal(tensor, base[name]) for name, tensor in transformer.state_dict().items())


@torch.no_grad()
def test_settings_of_the_call_go_before_those_of_the_file(exported):
    model, folder = exported
    assert tiny.difference(load_sparse(folder, topk=2)(*inputs()).sample, model(*inputs(), topk=2)) < 1e-5
    assert tiny.difference(load_sparse(folder, sparsity=0.5)(*inputs()).sample, model(*inputs(), topk=6)) < 1e-5
    half = load_sparse(folder, dtype=torch.bfloat16)
    assert half.blocks[0].to_gate_compress.weight.dtype == torch.bfloat16


@torch.no_grad()
def test_a_base_model_of_the_caller_and_a_pipeline_folder(exported, tmp_path):
    model, folder = exported
    (tmp_path / "pipeline").mkdir()
    folder = folder.rename(tmp_path / "pipeline" / "transformer")
    base = WanTransformer3DModel.from_pretrained(folder)
    assert load_sparse(tmp_path / "pipeline", transformer=base) is base
    assert tiny.difference(base(*inputs()).sample, model(*inputs(), topk=(4, 3))) < 1e-5


@torch.no_grad()
def test_budget_of_the_file_follows_step_progress_and_grid(exported):
    model, folder = exported
    early = (0.0, 0.5, ((8, 9),))
    config = dataclasses.replace(read_sparse_config(folder), dense_steps=1, topk_ranges=(early,), dense_layers=(1,))
    write_sparse_config(folder, config)
    transformer = load_sparse(folder)
    latents, _, text = inputs()
    topks = []
    for timestep in (1000.0, 900.0, 200.0):
        actual = transformer(latents, torch.full((2,), timestep), text).sample
        topks.append(applied_attention(transformer).describe()["topk"])
        topk = (12, 12) if len(topks) == 1 else (8, 12) if len(topks) == 2 else (4, 12)
        assert tiny.difference(actual, model(latents, torch.full((2,), timestep), text, topk=topk)) < 1e-5
    assert topks == [12, [8, 12], [4, 12]]
    # half the tiles, half of the top-k
    transformer(latents[:, :, :2], torch.full((2,), 100.0), text)
    assert applied_attention(transformer).describe()["topk"] == [2, 6]


@torch.no_grad()
def test_windows_of_an_export_are_those_of_the_transformer(tmp_path):
    attention = partial(NeighborhoodAttention, window_thw=(2, 4, 0.5), causal_thw=(True, False, False))
    model = tiny.stirred(VideoDiT(attention=attention, **MODEL))
    layout = model.blocks[0].method.layout((Segment(tiny.GRID),), "cpu")
    tiles = layout.num_video_tiles
    config = SparseAttentionConfig(
        **sparse_settings(model), grid_topk=((tiles, tiles),), num_tiles=(tiles,), grids=(tiny.GRID,), dense_steps=1
    )
    folder = export_pretrained(model, tmp_path / "windows", sparse=config)
    transformer = load_sparse(folder, denoising={"dense_steps": 0})
    actual = transformer(*inputs()).sample
    assert tiny.difference(actual, model(*inputs())) < 1e-5
    description = applied_attention(transformer).describe()
    assert (description["window_thw"], description["causal_thw"]) == ([2, 4, 0.5], [True, False, False])
    assert description["sparsity"] == 1 - model.blocks[0].method.pairs(layout, tiles) / 105**2
    # the first step is dense, where the file says so, and so is the model without the method
    first = load_sparse(folder)(*inputs()).sample
    remove(transformer)
    assert tiny.difference(first, transformer(*inputs()).sample) < 1e-5
    # control
    assert tiny.difference(first, actual) > 1e-3
    for options, message in (
        ({"topk": 2}, "neighborhood of .* selects no tiles, got sparsity=None and topk=2"),
        ({"denoising": {"refresh": 2}}, "denoising has refresh=2, but neighborhood selects no tiles"),
    ):
        with pytest.raises(ValueError, match=message):
            load_sparse(folder, transformer=transformer, **options)
    assert applied_attention(transformer) is None


HEADS = [{"tau": 0.3, "theta": -1.0, "threshold": None}, {"tau": 0.8, "theta": 0.2, "threshold": -2.0}]
TUNED = {
    "format": "vsa-sparge-1",
    "layers": 2,
    "heads": 2,
    "head_dim": 16,
    "q_tokens": 16,
    "kv_tokens": 8,
    "order": "hilbert",
    "keeps_sum": True,
    "made": {},
    "found": {"0": HEADS, "1": HEADS[::-1]},
}


@pytest.mark.parametrize(
    ("method", "settings", "other"),
    [
        ("sparge", {"q_tokens": 16, "kv_tokens": 8, "tau": 0.4, "theta": -1.0}, {"tau": 0.9}),
        ("sparge", {"q_tokens": 16, "kv_tokens": 8, "tuned": TUNED}, {"tuned": None}),
        ("sparge", {"q_tokens": 16, "kv_tokens": 8, "rule": "topk"}, {"order": "raster"}),
        ("fine_grained", {"q_tokens": 16, "kv_tokens": 4, "top_p": 0.4}, {"top_p": 0.8}),
        ("dynamic_hilbert", {"tokens": 16, "sub_tokens": 8}, {"order": "raster"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@torch.no_grad()
def test_methods_without_parameters_run_in_a_transformer_as_in_our_model(method, settings, other, tmp_path):
    model = tiny.stirred(VideoDiT(attention=partial(NAMED[method], **settings), **MODEL))
    tiles = model.blocks[0].method.layout((Segment(tiny.GRID),), "cpu").num_video_tiles
    topk = 2 if model.selects else tiles
    config = SparseAttentionConfig(
        **sparse_settings(model), grid_topk=((topk, topk),), num_tiles=(tiles,), grids=(tiny.GRID,)
    )
    folder = export_pretrained(model, tmp_path / "out", sparse=config)
    expected = model(*inputs(), topk=topk)
    transformer = load_sparse(folder)
    assert tiny.difference(transformer(*inputs()).sample, expected) < 1e-5
    # the same by name, in a transformer that was loaded as a dense one
    remove(transformer)
    dense = transformer(*inputs()).sample
    budget = {"topk": 2} if model.selects else {}
    apply(transformer, method, settings=settings, **budget)
    assert tiny.difference(transformer(*inputs()).sample, expected) < 1e-5
    assert applied_attention(transformer).describe()["q_tokens" if "q_tokens" in settings else "tokens"] == 16
    remove(transformer)
    # controls: no method, another setting
    assert tiny.difference(dense, expected) > 1e-3
    apply(transformer, method, settings={**settings, **other}, **budget)
    assert tiny.difference(transformer(*inputs()).sample, expected) > 1e-4
    remove(transformer)
    if not model.selects:
        with pytest.raises(ValueError, match="selects no tiles, got topk=2"):
            apply(transformer, method, settings=settings, topk=2)
        # what is selected can be kept all the same
        apply(transformer, method, settings=settings, denoising=DenoisingPlan(refresh=2))
        remove(transformer)
        with pytest.raises(ValueError, match=r"denoising has step_topk=.*, but .* has no top-k"):
            apply(transformer, method, settings=settings, denoising=DenoisingPlan(step_topk=[(1, 2)]))


@torch.no_grad()
def test_a_tuned_file_of_another_model_is_refused(tmp_path):
    transformer = tiny.wan().model
    for change, message in (
        ({"layers": 3}, "tuned was tuned for layers=3, got layers=2"),
        ({"heads": 1, "found": {"0": HEADS[:1], "1": HEADS[:1]}}, "tuned was tuned for heads=1, got heads=2"),
        ({"found": {"0": HEADS}}, "tuned has no layer 1, but 1 of 2"),
        ({"found": {"0": HEADS, "1": [{**HEADS[0], "tau": 0}, HEADS[1]]}}, "layer 1, head 0: tau=0: expected a number"),
    ):
        settings = {"q_tokens": 16, "kv_tokens": 8, "tuned": {**TUNED, **change}}
        with pytest.raises(ValueError, match=message):
            apply(transformer, "sparge", settings=settings)
        assert applied_attention(transformer) is None


def edit(folder: Path, key: str, tensor: torch.Tensor | None) -> None:
    """Replace, add or drop one tensor of a checkpoint."""
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    record = json.loads(index.read_text())
    path = folder / record["weight_map"].get(key, next(iter(record["weight_map"].values())))
    tensors = load_file(path)
    tensors.pop(key, None)
    record["weight_map"].pop(key, None)
    if tensor is not None:
        tensors[key] = tensor
        record["weight_map"][key] = path.name
    save_file(tensors, path)
    index.write_text(json.dumps(record))


def drop_json(folder: Path) -> None:
    (folder / SPARSE_CONFIG).unlink()


def drop_gate(folder: Path) -> None:
    edit(folder, "blocks.1.to_gate_compress.bias", None)


def add_gate(folder: Path) -> None:
    edit(folder, "blocks.2.to_gate_compress.bias", torch.zeros(32))


def bend_gate(folder: Path) -> None:
    edit(folder, "blocks.1.to_gate_compress.bias", torch.zeros(16))


def change(**changes: Any) -> Any:
    return lambda folder: write_sparse_config(folder, dataclasses.replace(read_sparse_config(folder), **changes))


def write_over(old: str, new: str) -> Any:
    def damage(folder: Path) -> None:
        path = folder / SPARSE_CONFIG
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_json, r"sparse_attention\.json is missing"),
        (write_over('"schema_version": 1', '"schema_version": 7'), "schema_version is 7, this version reads 1"),
        (drop_gate, r"lacks 1 tensors of the model: blocks\.1\.to_gate_compress\.bias"),
        (add_gate, r"has 1 tensors .* no place for: blocks\.2\.to_gate_compress\.bias"),
        (bend_gate, r"blocks\.1\.to_gate_compress\.bias has shape \(16,\), the model needs \(32,\)"),
        (change(fine_gate=False), r"tensors the model has no place for: blocks\.0\.to_gate_fine\.bias"),
        (change(grid_topk=((3,),)), "has 1 layers, the transformer has 2"),
        (write_over('"video_sparse"', '"spargel"'), "method must be .* got 'spargel'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(exported, damage, message):
    _, folder = exported
    base = WanTransformer3DModel.from_pretrained(folder)
    keys = list(base.state_dict())
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_sparse(folder, transformer=base)
    assert list(base.state_dict()) == keys
    assert applied_attention(base) is None


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_sparse(tmp_path / "nowhere")
