"""Loading and exporting checkpoints in diffusers' layout, against diffusers itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.training.ranks import run_ranks
from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    SparseAttentionConfig,
    TopkRange,
    read_sparse_config,
    write_sparse_config,
)
from vsa.checkpoints.wan import (
    export_pretrained,
    gate_names,
    refuse_random_gates,
    sparse_settings,
)
from vsa.checkpoints.wan_config import transformer_config, video_dit_arguments
from vsa.checkpoints.weight_files import WeightFiles, pretrained_folder
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.diffusion.sampler import guide, sample_euler
from vsa.models.video_dit import VideoDiT

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")

BASE = dict(num_attention_heads=3, attention_head_dim=16, text_dim=24, freq_dim=32, ffn_dim=80, num_layers=2)
KINDS = {
    "t2v": dict(in_channels=8, out_channels=8),
    "i2v": dict(in_channels=13, out_channels=8, image_dim=20, added_kv_proj_dim=48),
    # Wan2.2's image-to-video model has no image tokens
    "i2v_22": dict(in_channels=13, out_channels=8),
    "ti2v": dict(in_channels=48, out_channels=48),
}
LATENT = (3, 6, 10)
SPARSE = partial(VideoSparseAttention, tile_thw=(2, 2, 2))
COARSE_ONLY = partial(SPARSE, fine_gate=False)


def diffusers_model(kind: str = "t2v", seed: int = 0) -> Any:

    torch.manual_seed(seed)
    model = WanTransformer3DModel(**BASE, **KINDS[kind]).eval()
    for parameter in model.parameters():
        # attention sharp enough and norms far enough from 1 for a mistake to show
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(folder: Path, kind: str = "t2v", shard: str = "5GB") -> Path:
    diffusers_model(kind).save_pretrained(folder, max_shard_size=shard)
    return folder


def ours(attention: Any = FullAttention, kind: str = "t2v", **changes: Any) -> VideoDiT:
    return VideoDiT(attention=attention, **{**BASE, **KINDS[kind], **changes})


def random_sparse(attention: Any = SPARSE, kind: str = "t2v", seed: int = 5) -> VideoDiT:
    model = ours(attention, kind)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return model


def config_of(model: VideoDiT, **changes: Any) -> SparseAttentionConfig:
    values = {
        "grid_topk": ((4, 8),),
        "num_tiles": (30,),
        "grids": ((3, 6, 10),),
        "flow_shift": 3.0,
        "guidance_scale": 5.0,
    }
    return SparseAttentionConfig(**{**sparse_settings(model), **values, **changes})


def inputs(kind: str, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = math.prod(LATENT) // 4
    rows = tokens if kind == "ti2v" else 1
    timestep = torch.rand(2, rows, generator=generator) * 1000
    return {
        "x": torch.randn(2, KINDS[kind]["in_channels"], *LATENT, generator=generator),
        "timestep": timestep if kind == "ti2v" else timestep[:, 0],
        "text": torch.randn(2, 512, 24, generator=generator),
        "image": torch.randn(2, 257, 20, generator=generator) if kind == "i2v" else None,
    }


@torch.no_grad()
def run_theirs(model: Any, x, timestep, text, image) -> torch.Tensor:
    return model(x, timestep, text, image).sample


@torch.no_grad()
def run_ours(model: VideoDiT, x, timestep, text, image, topk=None) -> torch.Tensor:
    split = model.out_channels
    cond = x[:, split:] if x.shape[1] > split else None
    return model(x[:, :split], timestep, text, cond_latents=cond, image_embeds=image, topk=topk)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()


# step 0


@pytest.mark.parametrize("attention", [SPARSE, COARSE_ONLY], ids=["both_gates", "coarse_gate"])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_model_starts_as_the_dense_one(kind, attention, tmp_path):
    theirs, given = diffusers_model(kind), inputs(kind)
    theirs.save_pretrained(tmp_path)
    model = ours(attention, kind)
    source = open_weights(tmp_path)
    source.load(model, "initial")
    assert source.sparse is None
    assert {name for name, _ in model.named_parameters()} - set(source) == set(gate_names(model))
    expected = run_theirs(theirs, **given)
    assert expected.abs().max() > 0.5
    assert error(run_ours(model, **given), expected) < 1e-5
    # controls: fewer tiles, or a gate that is not zero, would show
    assert error(run_ours(model, **given, topk=2), expected) > 1e-4
    dict(model.named_parameters())["blocks.1.to_gate_compress.bias"].data.fill_(0.1)
    assert error(run_ours(model, **given), expected) > 1e-4


def test_pipeline_and_our_sampler_agree(tmp_path):
    from tests.data.tiny_wan import make_pipeline

    pipe = make_pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(tmp_path)
    model, info = open_network(tmp_path)
    assert info.folder == tmp_path / "transformer"
    sparse = VideoDiT(attention=SPARSE, **video_dit_arguments(info.config))
    open_weights(tmp_path).load(sparse, "initial")

    prompt, steps, scale = "a cat sits on the mat", 3, 4.0
    noise = torch.randn(1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    out = pipe(
        prompt,
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=steps,
        guidance_scale=scale,
        latents=noise.clone(),
        output_type="latent",
    ).frames
    cond, uncond = pipe.encode_prompt(prompt, negative_prompt="", max_sequence_length=512, device="cpu")
    pipe.scheduler.set_timesteps(steps)

    def sample(net: VideoDiT, topk: int | None = None) -> torch.Tensor:
        def velocity(x, timestep):
            return guide(net(x, timestep, cond, topk=topk), net(x, timestep, uncond, topk=topk), scale)

        with torch.no_grad():
            return sample_euler(velocity, noise, pipe.scheduler.sigmas)

    assert (out - noise).abs().max() > 0.5
    assert error(sample(model), out) < 1e-5
    assert error(sample(sparse), out) < 1e-5
    assert error(sample(sparse, topk=1), out) > 1e-4


# loading


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_files_load_bit_for_bit(kind, tmp_path):
    theirs = diffusers_model(kind)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, info = open_network(tmp_path)
    assert info.sparse is None
    found = model.state_dict()
    assert found.keys() == theirs.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in theirs.state_dict().items())


def test_bfloat16_files_fill_float32_parameters(tmp_path):
    theirs = diffusers_model().to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    model, _ = open_network(tmp_path)
    for key, value in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[key], value.float()), key


def test_gates_of_a_model_from_the_meta_device_get_their_start(tmp_path):
    saved(tmp_path)
    with torch.device("meta"):
        model = ours(SPARSE)
    open_weights(tmp_path).check(model, "initial")
    with pytest.raises(ValueError, match="is on the meta device: move the model with to_empty"):
        open_weights(tmp_path).load(model, "initial")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    open_weights(tmp_path).load(model, "initial")
    values = dict(model.named_parameters())
    assert not any(value.isnan().any() for value in values.values())
    assert torch.equal(values["blocks.0.to_gate_fine.bias"], torch.ones(48))
    assert values["blocks.0.to_gate_compress.weight"].abs().max() == 0


def test_gates_that_would_start_at_random_are_refused(tmp_path):
    saved(tmp_path)
    message = "gate_init=model of its attention, but a dense checkpoint needs gate_init=identity"
    with torch.device("meta"):
        model = ours(partial(SPARSE, gate_init="model"))
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path).check(model, "initial")
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path).load(model, "initial")
    refuse_random_gates(ours(SPARSE))
    refuse_random_gates(ours(FullAttention))
    # a sparse checkpoint has its gates: their start does not matter
    trained = random_sparse()
    export_pretrained(trained, tmp_path / "out", sparse=config_of(trained))
    open_weights(tmp_path / "out").load(model, "required")
    assert all(torch.equal(trained.state_dict()[key], value) for key, value in model.state_dict().items())


def test_old_image_checkpoints_hold_a_norm_nobody_uses(tmp_path):
    saved(tmp_path, "i2v")
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    extra = {f"blocks.{n}.attn2.norm_added_q.weight": torch.ones(48) for n in range(2)}
    save_file(load_file(path) | extra, path)
    source = open_network(tmp_path)[1]
    assert set(source.files.keys) - set(source) == set(extra)


# sizes of published models, on the meta device (config.json of the Wan-AI diffusers repositories)
WAN_14B = dict(num_attention_heads=40, ffn_dim=13824, num_layers=40)
PUBLISHED = {
    "t2v_1_3b": (dict(num_attention_heads=12, ffn_dim=8960, num_layers=30), 1.419),
    "t2v_14b": (WAN_14B, 14.29),
    "i2v_14b": ({**WAN_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}, 16.40),
    "i2v_a14b": ({**WAN_14B, "in_channels": 36}, 14.29),
    "ti2v_5b": (
        dict(num_attention_heads=24, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48),
        5.00,
    ),
}


def published_config(name: str) -> dict[str, Any]:
    fixed = {"_class_name": "WanTransformer3DModel", "_diffusers_version": "0.33.0.dev0", "attention_head_dim": 128}
    rest = {"cross_attn_norm": True, "eps": 1e-6, "freq_dim": 256, "patch_size": [1, 2, 2], "text_dim": 4096}
    channels = {"in_channels": 16, "out_channels": 16, "image_dim": None, "added_kv_proj_dim": None}
    own, _ = PUBLISHED[name]
    return {**fixed, **rest, **channels, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024, **own}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_make_the_published_models(name):

    config = published_config(name)
    with torch.device("meta"):
        model = VideoDiT(attention=FullAttention, **video_dit_arguments(config))
        theirs = WanTransformer3DModel.from_config(config)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert shapes == {key: value.shape for key, value in theirs.state_dict().items()}
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(PUBLISHED[name][1], rel=2e-3)
    assert video_dit_arguments(transformer_config(model)) == video_dit_arguments(config)


def test_keys_left_out_of_a_config_have_diffusers_defaults():
    with torch.device("meta"):
        theirs = WanTransformer3DModel()
        model = VideoDiT(attention=FullAttention, **video_dit_arguments({"_class_name": "WanTransformer3DModel"}))
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


# export


@pytest.mark.parametrize("attention", [SPARSE, COARSE_ONLY, FullAttention], ids=["both", "coarse", "dense"])
@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_export_and_load_are_bit_exact(kind, attention, tmp_path):
    model = random_sparse(attention, kind)
    sparse = None if attention is FullAttention else config_of(model)
    export_pretrained(model, tmp_path / "out", sparse=sparse, max_shard_bytes=60_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert not list(tmp_path.glob(".writing*"))
    found, info = open_network(tmp_path / "out")
    assert info.sparse == sparse
    assert found.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(found.state_dict()[key], value) for key, value in model.state_dict().items())
    # and once more: the files are the same too
    export_pretrained(found, tmp_path / "again", sparse=sparse, max_shard_bytes=60_000)
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("shard", [5 * 2**30, 60_000], ids=["one_file", "shards"])
def test_diffusers_opens_an_export(shard, tmp_path):

    model, given = random_sparse(FullAttention), inputs("t2v")
    export_pretrained(model, tmp_path / "dense", sparse=None, max_shard_bytes=shard)
    theirs = WanTransformer3DModel.from_pretrained(tmp_path / "dense")
    assert error(run_theirs(theirs, **given), run_ours(model, **given)) < 1e-5
    # the base weights of a sparse export load there too, without its gates
    model = random_sparse(COARSE_ONLY)
    export_pretrained(model, tmp_path / "sparse", sparse=config_of(model), max_shard_bytes=shard)
    theirs = WanTransformer3DModel.from_pretrained(tmp_path / "sparse")
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    assert json.loads((tmp_path / "sparse/config.json").read_text())["sparse_attention"] == SPARSE_CONFIG


def test_what_diffusers_saves_again_is_refused_for_its_lost_gates(tmp_path):

    model = random_sparse(COARSE_ONLY)
    export_pretrained(model, tmp_path / "out", sparse=config_of(model))
    WanTransformer3DModel.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "lost")
    write_sparse_config(tmp_path / "lost", config_of(model))
    with pytest.raises(ValueError, match=r"do not hold the gates.*blocks\.0\.to_gate_compress\.bias"):
        open_network(tmp_path / "lost")


def test_export_of_averaged_weights_and_another_dtype(tmp_path):
    model = random_sparse()
    average = {name: p.detach() + 1 for name, p in model.named_parameters()}
    export_pretrained(
        model, tmp_path / "out", sparse=config_of(model), dtype=torch.bfloat16, tensors=average.__getitem__
    )
    files = WeightFiles(tmp_path / "out")
    for name, value in average.items():
        assert torch.equal(files.read(name), value.to(torch.bfloat16))


def test_export_that_fails_leaves_nothing(tmp_path):
    model = random_sparse()

    def tensors(name: str) -> torch.Tensor:
        if name.startswith("blocks.1"):
            raise OSError("disk full")
        return dict(model.named_parameters())[name].detach()

    with pytest.raises(OSError, match="disk full"):
        export_pretrained(model, tmp_path / "out", sparse=config_of(model), tensors=tensors)
    assert list(tmp_path.iterdir()) == []


# bad input: the message, and that the model was not touched


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
        (lambda f: set_config(f, _class_name="WanModel"), r"blocks\.0\..* is no tensor of a Wan checkpoint"),
        (lambda f: (f / "config.json").write_text("{"), "does not parse"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
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
        unplaced = ours()
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path).check(unplaced, "absent")


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


def test_a_tensor_has_one_place(tmp_path):
    saved(tmp_path, shard="60KB")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    text = index.read_text()
    moved = json.loads(text)
    # the last and the first tensor change places, so both files are still named
    last, first = moved["weight_map"]["proj_out.bias"], moved["weight_map"]["patch_embedding.bias"]
    assert last != first
    moved["weight_map"]["proj_out.bias"] = first
    index.write_text(json.dumps(moved))
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
    path.write_text(text.replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(ValueError, match=r"sparse_attention\.json: schema_version is 2, this version reads 1"):
        open_network(tmp_path / "out")


def test_exports_that_cannot_be_written_down_are_refused(tmp_path):
    model = random_sparse()
    sparse = config_of(model)
    cases = [
        (lambda: export_pretrained(model, tmp_path / "a", sparse=None), "the model has gates"),
        (lambda: export_pretrained(ours(), tmp_path / "a", sparse=sparse), "video_sparse attention.*FullAttention"),
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
    with pytest.raises(ValueError, match="nobody/nothing is no folder, and the hub does not give it"):
        open_weights("nobody/nothing")


def test_what_is_downloaded(monkeypatch, tmp_path):
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
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
    asked: list[str] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path / "hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert pretrained_folder("somebody/something") == tmp_path / "hub" / "transformer"
    assert list(filter_repo_objects(wanted + other, allow_patterns=asked)) == wanted
    # a repository that is a transformer, diffusers' or Wan's own
    top = ["config.json", "diffusion_pytorch_model.safetensors.index.json", "sparse_attention.json"]
    top += ["diffusion_pytorch_model-00001-of-00006.safetensors", "golden.safetensors"]
    assert list(filter_repo_objects([*top, "models_t5_umt5-xxl-enc-bf16.pth"], allow_patterns=asked)) == top


# sparse_attention.json


def test_sparse_config_round_trip(tmp_path):
    config = config_of(
        random_sparse(),
        topk_ranges=(TopkRange(start=0, stop=0.25, grid_topk=((10, 12),)),),
        dense_layers=(0,),
        dense_steps=2,
        step_list=(1000.0, 757.0, 522.0),
        guidance_form="additive",
        budget=0.5,
    )
    write_sparse_config(tmp_path, config)
    assert read_sparse_config(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == [SPARSE_CONFIG]


def test_topk_of_another_grid_layer_and_moment():
    model = random_sparse()
    later = TopkRange(start=0.0, stop=0.5, grid_topk=((15, 30),))
    config = config_of(model, grid_topk=((3, 6),), budget="fraction", topk_ranges=(later,), dense_steps=1)
    assert config.layer_topk(30) == (3, 6)
    # a share is rounded up: 3 of 30 are 1.1 of 11
    assert config.layer_topk(11) == (2, 3)
    assert config.layer_topk(60, progress=0.49, step=1) == (30, 60)
    assert config.layer_topk(60, progress=0.5, step=1) == (6, 12)
    assert config.layer_topk(60, progress=0.0, step=0) == (60, 60)
    assert replace(config, budget="count").layer_topk(4) == (3, 4)
    assert replace(config, budget=0.5).layer_topk(120) == (6, 12)
    assert replace(config, dense_layers=(1,)).layer_topk(60) == (6, 60)


def test_trained_grids_have_the_topk_they_were_trained_with():
    # no rule makes these rows of each other
    rows, tiles = ((9, 4), (7, 2), (1, 3)), (30, 12, 4)
    grids = ((3, 6, 10), (3, 4, 6), (1, 4, 4))
    early = TopkRange(start=0.0, stop=0.5, grid_topk=((30, 1), (12, 5), (2, 2)))
    config = config_of(random_sparse(), grid_topk=rows, num_tiles=tiles, grids=grids, topk_ranges=(early,))
    config = SparseAttentionConfig.from_json(config.to_json())
    for row, other, count in zip(rows, early.grid_topk, tiles, strict=True):
        assert config.layer_topk(count) == row
        assert config.layer_topk(count, progress=0.2) == other
        assert replace(config, dense_layers=(1,)).layer_topk(count) == (row[0], count)
    # other grids follow the first one, and only by the budget
    assert config.layer_topk(60) == (18, 8)
    assert config.layer_topk(60, progress=0.2) == (60, 2)
    assert replace(config, budget="count").layer_topk(60) == (9, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid_topk": ((4, 31),)}, r"grid_topk must be in 1..30, the tiles of grid \(3, 6, 10\), got 4..31"),
        ({"grid_topk": ((0, 3),)}, r"got 0..3"),
        ({"grid_topk": ((),)}, r"one entry per layer, got 0 for grid \(3, 6, 10\)"),
        ({"grid_topk": ((4, 8), (2, 4))}, "one row per grid, got 2 rows and 1 grids"),
        (
            {"grid_topk": ((4, 8), (2,)), "num_tiles": (30, 12), "grids": ((3, 6, 10), (3, 4, 6))},
            r"one entry per layer, got 1 for grid \(3, 4, 6\)",
        ),
        (
            {"grid_topk": ((4, 8), (2, 13)), "num_tiles": (30, 12), "grids": ((3, 6, 10), (3, 4, 6))},
            r"in 1..12, the tiles of grid \(3, 4, 6\), got 2..13",
        ),
        (
            {"grid_topk": ((4, 8), (4, 9)), "num_tiles": (30, 30), "grids": ((3, 6, 10), (3, 10, 6))},
            r"grid_topk has \(4, 8\) and \(4, 9\) for grids of 30 tiles",
        ),
        ({"tile_thw": (4, 4)}, r"tile_thw must be three positive sizes, got \(4, 4\)"),
        ({"num_tiles": (30, 12)}, "one entry per grid, got 2 and 1"),
        ({"dense_layers": (2,)}, r"dense_layers must be in 0..1, got \[2\]"),
        ({"dense_steps": -1}, "must not be negative, got -1"),
        ({"flow_shift": 0.0}, "flow_shift must be positive, got 0.0"),
        (
            {"budget": "half"},
            "budget=half: expected one of count, fraction or a number from 0 to 1, or null, got 'half'",
        ),
        ({"guidance_form": "cfg"}, "got 'cfg'"),
        ({"topk_ranges": (TopkRange(start=0.5, stop=0.5, grid_topk=((1, 1),)),)}, "got 0.5 and 0.5"),
        (
            {"topk_ranges": (TopkRange(start=0, stop=1, grid_topk=((1,),)),)},
            "of topk_ranges must have one entry per layer, got 1",
        ),
        ({"golden": "golden.safetensors"}, "golden and golden_tolerance come together"),
    ],
)
def test_sparse_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        config_of(random_sparse(), **change)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.pop("grid_topk"), r"keys missing \['grid_topk'\]"),
        (lambda v: v.update(tiles=3), r"keys unknown \['tiles'\]"),
        (lambda v: v.update(grid_topk=3), "wrong type"),
        (lambda v: v.update(topk_ranges=[{"start": 0}]), "wrong type"),
        (lambda v: v.update(schema_version=None), "schema_version is None"),
    ],
)
def test_sparse_config_file_refuses(edit, message, tmp_path):
    path = write_sparse_config(tmp_path, config_of(random_sparse()))
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as caught:
        read_sparse_config(tmp_path)
    assert str(path) in str(caught.value)


def test_exported_files_are_as_readable_as_others(tmp_path):
    model = random_sparse()
    folder = export_pretrained(model, tmp_path / "out", sparse=config_of(model))
    (tmp_path / "other").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "other").stat().st_mode}


# several ranks


def test_two_ranks_load_their_shards_and_export_the_whole(tmp_path):
    source = saved(tmp_path / "dense", shard="60KB")
    outputs = run_ranks(2, lambda rank: _one_rank(rank, source, tmp_path / "out"))
    dense, exported = WeightFiles(source), WeightFiles(tmp_path / "out")
    assert set(exported.keys) == set(dense.keys) | set(read_sparse_config(tmp_path / "out").gate_keys)
    for key in dense.keys:
        assert torch.equal(exported.read(key), dense.read(key)), key
    assert torch.equal(exported.read("blocks.1.to_gate_fine.bias"), torch.ones(48))
    # no rank read the whole of a large tensor
    for rows, error in outputs:
        assert rows == [24, 24]
        assert error.endswith("already exists")


def _one_rank(rank: int, source: Path, out: Path) -> tuple[list[int], str]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = ours(SPARSE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    open_weights(source).check(model, "initial")
    model.to_empty(device="cpu")
    rows: list[int] = []
    read = WeightFiles.rows

    def counted(self: WeightFiles, key: str, start: int, stop: int) -> torch.Tensor:
        if key == "blocks.0.attn1.to_q.weight":
            rows.append(stop - start)
        return read(self, key, start, stop)

    WeightFiles.rows = counted
    open_weights(source).load(model, "initial")
    files = WeightFiles(source)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        if "to_gate" not in name:
            expected = files.read(name).chunk(2)
            mine = expected[rank] if rank < len(expected) else expected[0][:0]
            assert torch.equal(parameter.to_local().detach(), mine), name
    rows.append(model.blocks[0].attn1.to_q.weight.to_local().shape[0])
    export_pretrained(model, out, sparse=config_of(model), max_shard_bytes=60_000)
    dist.barrier()
    try:
        export_pretrained(model, out, sparse=config_of(model))
        error = "none"
    except ValueError as found:
        error = str(found)
    return rows, error


def test_a_rank_that_cannot_write_does_not_stop_the_others(tmp_path):
    source = saved(tmp_path / "dense", shard="60KB")
    first, second = run_ranks(2, lambda rank: _full_disk(rank, source, tmp_path / "out"), seconds=60)
    assert (first, second) == ("disk full", "went on")
    # and nothing is left of it
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def _full_disk(rank: int, source: Path, out: Path) -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from vsa.checkpoints import weight_files

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = ours(SPARSE)
    fully_shard(model, mesh=mesh)
    open_weights(source).load(model, "initial")
    save, done = weight_files.save_file, []

    def fails_at_the_second(*args: Any, **options: Any) -> None:
        done.append(args)
        if len(done) == 2:
            raise OSError("disk full")
        save(*args, **options)

    weight_files.save_file = fails_at_the_second
    message = "went on"
    try:
        export_pretrained(model, out, sparse=config_of(model), max_shard_bytes=60_000)
    except OSError as error:
        message = str(error)
    # the ranks are at the same place: their sums meet
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3
    return message
