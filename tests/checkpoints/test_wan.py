"""Loading and exporting checkpoints in diffusers' layout, against diffusers itself."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.checkpoints.wan_models import (
    COARSE_ONLY,
    KINDS,
    SPARSE,
    config_of,
    diffusers_model,
    error,
    inputs,
    ours,
    random_sparse,
    run_ours,
    run_theirs,
    saved,
)
from tests.training.ranks import run_ranks
from vsa.attention.full import FullAttention
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    read_sparse_config,
    write_sparse_config,
)
from vsa.checkpoints.wan import (
    export_pretrained,
    gate_names,
    refuse_random_gates,
)
from vsa.checkpoints.wan_config import transformer_config, video_dit_arguments
from vsa.checkpoints.weight_files import WeightFiles
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.diffusion.sampler import guide, sample_euler
from vsa.models.video_dit import VideoDiT

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")

# step 0


@pytest.mark.parametrize("attention", [SPARSE, COARSE_ONLY], ids=["both_gates", "coarse_gate"])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_model_starts_as_the_dense_one(kind, attention, tmp_path):
    theirs, arguments = diffusers_model(kind), inputs(kind)
    theirs.save_pretrained(tmp_path)
    model = ours(attention, kind)
    source = open_weights(tmp_path)
    source.load(model, "initial")
    assert source.sparse is None
    assert {name for name, _ in model.named_parameters()} - set(source) == set(gate_names(model))
    expected = run_theirs(theirs, **arguments)
    assert expected.abs().max() > 0.5
    assert error(run_ours(model, **arguments), expected) < 1e-5
    # controls: fewer tiles, or a gate that is not zero, would show
    assert error(run_ours(model, **arguments, topk=2), expected) > 1e-4
    dict(model.named_parameters())["blocks.1.to_gate_compress.bias"].data.fill_(0.1)
    assert error(run_ours(model, **arguments), expected) > 1e-4


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
    state = model.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in theirs.state_dict().items())


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
    sparse_model = random_sparse()
    export_pretrained(sparse_model, tmp_path / "out", sparse=config_of(sparse_model))
    open_weights(tmp_path / "out").load(model, "required")
    assert all(torch.equal(sparse_model.state_dict()[key], value) for key, value in model.state_dict().items())


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
    network, info = open_network(tmp_path / "out")
    assert info.sparse == sparse
    assert network.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(network.state_dict()[key], value) for key, value in model.state_dict().items())
    # and once more: the files are the same too
    export_pretrained(network, tmp_path / "again", sparse=sparse, max_shard_bytes=60_000)
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("shard", [5 * 2**30, 60_000], ids=["one_file", "shards"])
def test_diffusers_opens_an_export(shard, tmp_path):

    model, arguments = random_sparse(FullAttention), inputs("t2v")
    export_pretrained(model, tmp_path / "dense", sparse=None, max_shard_bytes=shard)
    theirs = WanTransformer3DModel.from_pretrained(tmp_path / "dense")
    assert error(run_theirs(theirs, **arguments), run_ours(model, **arguments)) < 1e-5
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
    for rows, failure in outputs:
        assert rows == [24, 24]
        assert failure.endswith("already exists")


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

    def spy(self: WeightFiles, key: str, start: int, stop: int) -> torch.Tensor:
        if key == "blocks.0.attn1.to_q.weight":
            rows.append(stop - start)
        return read(self, key, start, stop)

    WeightFiles.rows = spy
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
    except ValueError as failure:
        error = str(failure)
    return rows, error


def test_a_rank_that_cannot_write_does_not_stop_the_others(tmp_path):
    source = saved(tmp_path / "dense", shard="60KB")
    first, second = run_ranks(2, lambda rank: _full_disk(rank, source, tmp_path / "out"))
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
    save, calls = weight_files.save_file, []

    def fails_at_the_second(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
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
