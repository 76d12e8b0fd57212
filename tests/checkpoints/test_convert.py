"""`vsa convert`: every layout and back, bit for bit."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import run_command
from tests.states import rewrite_state
from vsa.attention.full import FullAttention
from vsa.attention.sparse_linear import SparseLinearAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.run_checkpoint import resolve_checkpoint, write_checkpoint
from vsa.checkpoints.run_folder import check_folder
from vsa.checkpoints.sparse_config import SPARSE_CONFIG, SparseAttentionConfig, read_sparse_config
from vsa.checkpoints.tensor_state import load_model_tensors
from vsa.checkpoints.verify import verify_export
from vsa.checkpoints.wan import export_pretrained, sparse_settings
from vsa.checkpoints.wan_config import transformer_config
from vsa.checkpoints.wan_names import diffusers_to_wan, is_gate, wan_config, wan_to_diffusers
from vsa.checkpoints.weight_files import WeightFiles
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.cli import convert as cli
from vsa.config import build
from vsa.errors import one_line_errors
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import SamplingPipeline

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")

BASE = dict(num_attention_heads=2, attention_head_dim=16, text_dim=24, freq_dim=32, ffn_dim=48, num_layers=2)
KINDS = {
    "t2v": dict(in_channels=8, out_channels=8),
    "i2v": dict(in_channels=13, out_channels=8, image_dim=20, added_kv_proj_dim=32),
    "i2v_22": dict(in_channels=13, out_channels=8),
    "ti2v": dict(in_channels=48, out_channels=48),
}
SPARSE = partial(VideoSparseAttention, tile_thw=(2, 2, 2))
FASTVIDEO = partial(VideoSparseAttention, tile_thw=(4, 4, 4), fine_gate=False)


def random_model(attention: Any, kind: str = "t2v") -> VideoDiT:
    model = VideoDiT(attention=attention, **BASE, **KINDS[kind])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def sparse_of(model: VideoDiT) -> SparseAttentionConfig:
    return SparseAttentionConfig(**sparse_settings(model), grid_topk=((3, 5),), num_tiles=(12,), grids=((3, 4, 6),))


def exported(folder: Path, attention: Any = FullAttention, kind: str = "t2v") -> VideoDiT:
    model = random_model(attention, kind)
    export_pretrained(model, folder, sparse=None if attention is FullAttention else sparse_of(model))
    return model


def convert(*args: Any) -> None:
    run_command(cli.convert, *args)


def same_tensors(folder: Path, model: VideoDiT) -> bool:
    files, expected = WeightFiles(folder), model.state_dict()
    return set(files.keys) == set(expected) and all(torch.equal(files.read(key), expected[key]) for key in expected)


def json_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# names


def wan_shapes(dim: int, ffn: int, layers: int, channels: tuple[int, int], image: bool) -> dict[str, tuple[int, ...]]:
    """Tensors of Wan2.1's `WanModel`, written down from wan/modules/model.py."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (dim, channels[0], 1, 2, 2),
        "head.modulation": (1, 2, dim),
    }
    shapes |= {"patch_embedding.bias": (dim,)}

    def linear(name: str, rows: int, columns: int) -> None:
        shapes.update({f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)})

    def norm(name: str, width: int) -> None:
        shapes.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    for name, rows, columns in (
        ("text_embedding.0", dim, 4096),
        ("text_embedding.2", dim, dim),
        ("time_embedding.0", dim, 256),
        ("time_embedding.2", dim, dim),
        ("time_projection.1", 6 * dim, dim),
        ("head.head", 4 * channels[1], dim),
    ):
        linear(name, rows, columns)
    if image:
        norm("img_emb.proj.0", 1280)
        linear("img_emb.proj.1", 1280, 1280)
        linear("img_emb.proj.3", dim, 1280)
        norm("img_emb.proj.4", dim)
    for n in range(layers):
        for part in ("self_attn", "cross_attn"):
            extra = ["k_img", "v_img"] if image and part == "cross_attn" else []
            for name in ["q", "k", "v", "o", *extra]:
                linear(f"blocks.{n}.{part}.{name}", dim, dim)
            for name in ["norm_q", "norm_k", *(["norm_k_img"] if extra else [])]:
                shapes[f"blocks.{n}.{part}.{name}.weight"] = (dim,)
        norm(f"blocks.{n}.norm3", dim)
        linear(f"blocks.{n}.ffn.0", ffn, dim)
        linear(f"blocks.{n}.ffn.2", dim, ffn)
        shapes[f"blocks.{n}.modulation"] = (1, 6, dim)
    return shapes


PUBLISHED = {
    "t2v_1_3b": (12, 8960, 30, (16, 16), False),
    "t2v_14b": (40, 13824, 40, (16, 16), False),
    "i2v_14b": (40, 13824, 40, (36, 16), True),
    "ti2v_5b": (24, 14336, 30, (48, 48), False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_of_published_models_are_those_of_wans_code(name):
    heads, ffn, layers, channels, image = PUBLISHED[name]
    with torch.device("meta"):
        model = VideoDiT(
            attention=FullAttention,
            num_attention_heads=heads,
            attention_head_dim=128,
            ffn_dim=ffn,
            num_layers=layers,
            in_channels=channels[0],
            out_channels=channels[1],
            image_dim=1280 if image else None,
            added_kv_proj_dim=heads * 128 if image else None,
        )
    shapes = {diffusers_to_wan(key): tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes == wan_shapes(heads * 128, ffn, layers, channels, image)
    assert [wan_to_diffusers(key) for key in shapes] == list(model.state_dict())


@pytest.mark.parametrize(
    "key", ["blocks.0.attn1.to_q", "blocks.x.norm2.weight", "norm2.weight", "proj_out", "a.b.weight"]
)
def test_unknown_names_are_refused(key):
    with pytest.raises(ValueError, match=f"{key} is not a tensor of a diffusers checkpoint"):
        diffusers_to_wan(key)
    with pytest.raises(ValueError, match="is not a tensor of a Wan checkpoint"):
        wan_to_diffusers("blocks.0.attn1.to_q.weight")


# Wan's layout


@pytest.mark.parametrize("attention", [FullAttention, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_to_wan_and_back(kind, attention, tmp_path):
    model = exported(tmp_path / "a", attention, kind)
    convert(tmp_path / "a", tmp_path / "wan", "--to", "wan", "--max-shard-gb", 3e-5)
    assert (tmp_path / "wan/diffusion_pytorch_model.safetensors.index.json").exists()
    # diffusers' own converter is the judge of what each name means
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    files = WeightFiles(tmp_path / "wan")
    theirs = convert_wan_transformer_to_diffusers({key: files.read(key) for key in files.keys})
    expected = model.state_dict()
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[key], expected[key]) for key in expected)

    convert(tmp_path / "wan", tmp_path / "b", "--to", "diffusers", "--no-golden")
    assert same_tensors(tmp_path / "b", model)
    for name in sorted(path.name for path in (tmp_path / "a").iterdir()):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    # and without a conversion, as `init_from=` does
    source, network = open_weights(tmp_path / "wan"), VideoDiT(attention=attention, **BASE, **KINDS[kind])
    source.load(network, "absent" if attention is FullAttention else "required")
    assert all(torch.equal(value, expected[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "model_type"), [("t2v", "t2v"), ("i2v", "i2v"), ("i2v_22", "i2v"), ("ti2v", "ti2v")], ids=lambda x: x
)
def test_wans_config(kind, model_type, tmp_path):
    exported(tmp_path / "a", kind=kind)
    convert(tmp_path / "a", tmp_path / "wan", "--to", "wan")
    config = json_of(tmp_path / "wan/config.json")
    assert config == {
        "_class_name": "WanModel",
        "model_type": model_type,
        "text_len": 512,
        "in_dim": KINDS[kind]["in_channels"],
        "out_dim": KINDS[kind]["out_channels"],
        "dim": 32,
        "num_heads": 2,
        "num_layers": 2,
        "ffn_dim": 48,
        "freq_dim": 32,
        "eps": 1e-6,
    }


# FastVideo's


def fastvideo_folder(folder: Path) -> VideoDiT:
    """As FastVideo saves a VSA model: diffusers' names and config, gates, and no word on their use."""
    model = random_model(FASTVIDEO)
    folder.mkdir()
    save_file(model.state_dict(), folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(transformer_config(model)))
    return model


def test_fastvideo_to_ours_and_back(tmp_path):
    model = fastvideo_folder(tmp_path / "fv")
    with pytest.raises(ValueError, match=r"sparse_attention\.json is missing"):
        open_network(tmp_path / "fv")
    convert(tmp_path / "fv", tmp_path / "a", "--sparsity", 0.9, "--grid", 8, 16, 12, "--flow-shift", 8, "--guidance", 5)
    network, info = open_network(tmp_path / "a")
    assert same_tensors(tmp_path / "a", model)
    assert info.sparse is not None
    # 2 x 4 x 3 tiles, of which a tenth is 3
    assert (info.sparse.num_tiles, info.sparse.grid_topk, info.sparse.budget) == ((24,), ((3, 3),), "fraction")
    assert (info.sparse.flow_shift, info.sparse.guidance_scale, info.sparse.fine_gate) == (8, 5, False)
    assert info.sparse.golden == "golden.safetensors"
    assert sum(is_gate(key) for key in network.state_dict()) == 4

    convert(tmp_path / "a", tmp_path / "back", "--to", "fastvideo")
    assert same_tensors(tmp_path / "back", model)
    assert json_of(tmp_path / "back/config.json") == json_of(tmp_path / "fv/config.json")
    assert read_sparse_config(tmp_path / "back") == info.sparse


def test_turbo_wan_to_ours(tmp_path):
    """Wan's names and SLA's projections, as TurboDiffusion names them."""
    model = random_model(partial(SparseLinearAttention, tile_thw=(1, 1, 64), partition="raster_run"))
    turbo = ("proj_l", "self_attn.attn_op.local_attn.proj_l")
    tensors = {
        key.replace(*turbo) if ".proj_l." in key else diffusers_to_wan(key): value
        for key, value in model.state_dict().items()
    }
    assert sum("local_attn.proj_l." in key for key in tensors) == 4
    (tmp_path / "turbo").mkdir()
    save_file(tensors, tmp_path / "turbo/diffusion_pytorch_model.safetensors")
    (tmp_path / "turbo/config.json").write_text(json.dumps(wan_config(transformer_config(model))))
    with pytest.raises(ValueError, match=r"sparse_attention\.json is missing"):
        open_network(tmp_path / "turbo")
    convert(tmp_path / "turbo", tmp_path / "a", "--sparsity", 0.9, "--grid", 8, 16, 12)
    assert same_tensors(tmp_path / "a", model)
    network, info = open_network(tmp_path / "a")
    assert info.sparse is not None
    # 1536 tokens
    assert (info.sparse.method, info.sparse.num_tiles, info.sparse.grid_topk) == ("sparse_linear", (24,), ((3, 3),))
    assert network.attention_layers[0].settings() == model.attention_layers[0].settings()
    # back to Wan's names, with its description
    convert(tmp_path / "a", tmp_path / "wan", "--to", "wan")
    assert set(WeightFiles(tmp_path / "wan").keys) == set(tensors)


# our runs


def run_folder(
    folder: Path, attention: str = "VideoSparseAttention", averaged: bool = True, **changes: Any
) -> dict[str, torch.Tensor]:
    """A run whose averaged and trained weights differ; returns the averaged ones. Changes are those of its state."""
    module = {"VideoSparseAttention": "video_sparse", "FullAttention": "full"}[attention]
    sparse = attention == "VideoSparseAttention"
    model = random_model(SPARSE if sparse else FullAttention)
    ema = {name: p.detach() for name, p in model.named_parameters()}
    own = {"tile_thw": [2, 2, 2]} if sparse else {}
    state = {
        "step": 9,
        "latent_shapes": [[8, 1, 8, 8], [8, 3, 8, 12]],
        "config": {
            "model": {"_target_": "vsa.models.video_dit.VideoDiT", **BASE, **KINDS["t2v"]},
            "attention": {"_target_": f"vsa.attention.{module}.{attention}", "_partial_": True, **own},
            "sparsity": {"_target_": "vsa.attention.sparsity.ConstantSparsity", "topk": 5, "dense_layers": [0]},
            "task": {
                "objective": {
                    "shift": {"_target_": "vsa.diffusion.flow_matching.FlowShift", "kind": "constant", "value": 3.0}
                }
            },
        },
    }
    for part in ("sparsity", "callbacks"):
        if part in changes:
            state["config"][part] = changes.pop(part)
    groups = {"model": {k: v + 1 for k, v in ema.items()}, **({"ema": ema} if averaged else {})}
    write_checkpoint(folder / "checkpoints", groups, state | changes)
    return ema


@pytest.mark.parametrize(
    ("samples", "wanted"),
    [
        ({"steps": 50, "guidance": 5.0, "flow_shift": 3.0}, (3.0, 5.0)),
        # what the clips of a run look like says nothing about the model, without a shift of their own
        ({"steps": 32, "guidance": 1.0, "flow_shift": None}, (None, None)),
    ],
)
def test_the_sampling_recipe_of_a_run_is_exported(tmp_path, samples, wanted):
    run_folder(tmp_path / "run", callbacks={"samples": samples})
    convert(tmp_path / "run", tmp_path / "out", "--to", "diffusers")
    sparse = read_sparse_config(tmp_path / "out")
    assert (sparse.flow_shift, sparse.guidance_scale) == wanted


def recipe(sparse: SparseAttentionConfig | None) -> tuple[Any, ...]:
    assert sparse is not None
    return sparse.step_list, sparse.flow_shift, sparse.guidance_form, sparse.guidance_scale


def test_a_distilled_run_is_exported_with_its_steps(tmp_path, capsys):
    steps, teacher = [1000.0, 2500 / 3], {"samples": {"steps": 50, "guidance": 5.0, "flow_shift": 3.0}}
    run_folder(tmp_path / "run", step_list=steps, callbacks=teacher)
    convert(tmp_path / "run", tmp_path / "a", "--no-golden")
    # the samples of the run's config were the teacher's
    assert recipe(read_sparse_config(tmp_path / "a")) == (tuple(steps), None, "standard", 1.0)
    convert(tmp_path / "a", tmp_path / "back", "--to", "run")
    assert resolve_checkpoint(tmp_path / "back").state["step_list"] == steps
    convert(tmp_path / "back", tmp_path / "b", "--no-golden")
    assert json_of(tmp_path / "b" / SPARSE_CONFIG) == json_of(tmp_path / "a" / SPARSE_CONFIG)
    # a list that the state got later, as by a merge of weights, goes before that of the settings
    rewrite_state(next((tmp_path / "back" / "checkpoints").glob("step-*")), step_list=[900.0])
    convert(tmp_path / "back", tmp_path / "c", "--no-golden")
    assert read_sparse_config(tmp_path / "c").step_list == (900.0,)

    options = ("--step-list", "900,400", "--guidance", 2, "--no-golden")
    convert(tmp_path / "a", tmp_path / "given", *options)
    assert recipe(read_sparse_config(tmp_path / "given")) == ((900.0, 400.0), None, "standard", 2.0)
    # what was given stays on the way through a run
    convert(tmp_path / "given", tmp_path / "given_run", "--to", "run")
    convert(tmp_path / "given_run", tmp_path / "again", "--no-golden")
    assert recipe(read_sparse_config(tmp_path / "again")) == ((900.0, 400.0), None, "standard", 2.0)
    assert "no file" not in capsys.readouterr().out

    run_folder(tmp_path / "other", callbacks=teacher)
    convert(tmp_path / "other", tmp_path / "d", "--to", "run")
    assert "step_list" not in resolve_checkpoint(tmp_path / "d").state
    assert recipe(open_weights(str(tmp_path / "d")).sparse) == (None, 3.0, "standard", 5.0)
    convert(tmp_path / "other", tmp_path / "e", "--step-list", 900, "--no-golden")
    assert recipe(read_sparse_config(tmp_path / "e")) == ((900.0,), None, "standard", 1.0)


def test_the_steps_of_a_dense_generator_stay_in_runs_and_leave_with_a_word(tmp_path, capsys):
    run_folder(tmp_path / "run", "FullAttention", step_list=[1000.0, 757.0])
    for to in ("diffusers", "wan"):
        convert(tmp_path / "run", tmp_path / to, "--to", to)
        line = f"no file of {tmp_path / to} has the steps [1000.0, 757.0] of this dense generator, --to run keeps them"
        assert capsys.readouterr().out.splitlines()[1:] == [line]
    convert(tmp_path / "run", tmp_path / "kept", "--to", "run")
    convert(tmp_path / "diffusers", tmp_path / "given", "--to", "run", "--step-list", "1000,757")
    convert(tmp_path / "diffusers", tmp_path / "lost", "--to", "run")
    assert "no file" not in capsys.readouterr().out
    step_lists = [resolve_checkpoint(tmp_path / name).state.get("step_list") for name in ("kept", "given", "lost")]
    assert step_lists == [[1000.0, 757.0], [1000.0, 757.0], None]


def test_run_to_diffusers_and_back(tmp_path):
    ema = run_folder(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "a", "--to", "diffusers")
    network, info = open_network(tmp_path / "a")
    assert all(torch.equal(network.state_dict()[key], value) for key, value in ema.items())
    sparse = info.sparse
    assert sparse is not None
    # the largest grid first: 3 x 4 x 6 tokens in 2 x 2 x 3 tiles, then 1 x 4 x 4 in 1 x 2 x 2
    assert (sparse.grids, sparse.num_tiles) == (((3, 4, 6), (1, 4, 4)), (12, 4))
    assert (sparse.grid_topk, sparse.dense_layers, sparse.budget) == (((12, 5), (4, 4)), (0,), "count")
    assert sparse.layer_topk(4) == (4, 4)
    assert (sparse.flow_shift, sparse.tile_thw, sparse.fine_gate) == (None, (2, 2, 2), True)

    convert(tmp_path / "a", tmp_path / "back", "--to", "run")
    # a run folder as training makes them
    check_folder(tmp_path / "back", overwrite=True)
    checkpoint = resolve_checkpoint(tmp_path / "back")
    tensors = checkpoint.tensors("model")
    assert tensors.keys() == ema.keys()
    assert all(torch.equal(tensors[key], value) for key, value in ema.items())
    # `init_from=` loads it this way
    load_model_tensors(random_model(SPARSE), checkpoint.open("model"), "back")
    # and it converts again to the same files, golden tensors included
    convert(tmp_path / "back", tmp_path / "b", "--to", "diffusers")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


# latents of 624, 300 and 12 tiles of 2 x 2 x 2 tokens
SHAPES = ((8, 12, 32, 52), (8, 10, 24, 40), (8, 3, 8, 12))
TILES = (624, 300, 12)
CONSTANT = "vsa.attention.sparsity.ConstantSparsity"
ANNEALING = "vsa.attention.sparsity_schedules."
OWN = {"dense_layers": [0], "layer_topk": {"1": 9}}
STAIRS = {"_target_": f"{ANNEALING}StaircaseSparsity", "dense_steps": 4, "interval": 3}
LINE = {"dense_steps": 4, "total_steps": 20}
SCHEDULES: dict[str, dict[str, Any]] = {
    "topk": {"_target_": CONSTANT, "topk": 11},
    "sparsity": {"_target_": CONSTANT, "sparsity": 0.9},
    "layers": {"_target_": CONSTANT, "sparsity": 0.9, **OWN},
    "budget_0": {"_target_": CONSTANT, "sparsity": 0.9, "budget": 0, "reference_tiles": 300},
    "budget_half": {"_target_": CONSTANT, "topk": 30, "budget": 0.5, "reference_tiles": 300},
    "tokens": {
        "_target_": "vsa.attention.sparsity.TokenBudgetSparsity",
        "tokens": 80,
        "tokens_per_tile": 8,
        "budget": None,
        "reference_tiles": None,
    },
    "stairs": {**STAIRS, "tiles": 50, "topk": 11},
    "stairs_by_share": {**STAIRS, "fraction": 0.07, "sparsity": 0.9, **OWN},
    "line": {"_target_": f"{ANNEALING}LinearSparsity", **LINE, "sparsity": 0.9},
    "cosine": {"_target_": f"{ANNEALING}CosineSparsity", **LINE, "topk": 11},
    "measured": {**STAIRS, "_target_": f"{ANNEALING}MissedMassSparsity", "tiles": 50, "topk": 11, "max_missed": 0.5},
}
MEASURED = {"drop_steps": [5, 9], "measured": [[5, 0.1], [9, 0.2]]}


@pytest.fixture(scope="module")
def run_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_folder(folder, latent_shapes=[list(shape) for shape in SHAPES])
    return folder / "checkpoints" / "step-00000009"


# before the first step, at the edge of the dense steps, in the middle, at an edge of a stair, at the end
@pytest.mark.parametrize("step", [0, 4, 9, 10, 100])
@pytest.mark.parametrize("name", SCHEDULES)
def test_exported_topk_is_that_of_the_last_step_trained(name, step, run_template, tmp_path):
    # a copy may be of another step than its folder was
    checkpoint = shutil.copytree(run_template, tmp_path / "copy")
    config = {**json_of(checkpoint / "state.json")["config"], "sparsity": SCHEDULES[name]}
    state = {"sparsity_state": MEASURED} if name == "measured" else {"sparsity_state": {}}
    rewrite_state(checkpoint, step=step, config=config, **state)
    sparse = open_weights(str(checkpoint)).sparse
    assert sparse is not None
    sparse = SparseAttentionConfig.from_json(sparse.to_json())
    schedule = build(SCHEDULES[name])
    schedule.load_state_dict(state["sparsity_state"])
    assert sparse.num_tiles == TILES
    run = SamplingPipeline(
        model=random_model(SPARSE),
        codec=cast(Any, None),
        text_encoder=cast(Any, None),
        latent_mean=torch.zeros(8),
        latent_std=torch.ones(8),
        sparsity=schedule,
        flow_shift=cast(Any, lambda tokens: 1.0),
        latent_shapes=SHAPES,
        step=step,
        source="run",
        weights="model",
    )
    for row, tiles, shape in zip(sparse.grid_topk, TILES, SHAPES, strict=True):
        expected = schedule.topk_per_layer(max(step - 1, 0), tiles, 2).by_layer(2)
        assert row == expected
        assert sparse.layer_topk(tiles) == expected
        assert run.settings(latent_shape=shape).topk.by_layer(2) == expected
    assert sparse.dense_layers == tuple(SCHEDULES[name].get("dense_layers", ()))
    by_count = name in ("topk", "budget_0", "tokens", "stairs", "cosine", "measured")
    assert sparse.budget == (0.5 if name == "budget_half" else "count" if by_count else "fraction")


@pytest.mark.parametrize(
    ("name", "step", "rows"),
    [
        # 0.1 of 624 is 62.4, of 300 exactly 30: not a share of 63
        ("sparsity", 9, ((63, 63), (30, 30), (2, 2))),
        # a count of a layer of its own is a count everywhere
        ("layers", 9, ((624, 9), (300, 9), (12, 9))),
        ("budget_0", 9, ((30, 30), (30, 30), (12, 12))),
        ("tokens", 9, ((10, 10), (10, 10), (10, 10))),
        # the first step down is at step 4, which step 4's weights have not seen
        ("stairs", 4, ((624, 624), (300, 300), (12, 12))),
        ("stairs", 5, ((574, 574), (250, 250), (11, 11))),
        # half of the way
        ("line", 15, ((344, 344), (165, 165), (7, 7))),
        ("measured", 9, ((574, 574), (250, 250), (11, 11))),
        ("measured", 10, ((524, 524), (200, 200), (11, 11))),
    ],
)
def test_exported_topk_by_hand(name, step, rows, tmp_path):
    changes = {"sparsity_state": MEASURED} if name == "measured" else {}
    shapes = [list(shape) for shape in SHAPES]
    run_folder(tmp_path / "run", sparsity=SCHEDULES[name], step=step, latent_shapes=shapes, **changes)
    convert(tmp_path / "run", tmp_path / "a", "--no-golden")
    assert read_sparse_config(tmp_path / "a").grid_topk == rows


def test_weights_that_are_asked_for_are_taken_or_refused(tmp_path):
    ema = run_folder(tmp_path / "run", averaged=False)
    with pytest.raises(ValueError, match="step-00000009 has no ema weights"):
        convert(tmp_path / "run", tmp_path / "a", "--weights", "ema")
    assert not (tmp_path / "a").exists()
    convert(tmp_path / "run", tmp_path / "a", "--no-golden")
    assert all(torch.equal(WeightFiles(tmp_path / "a").read(key), value + 1) for key, value in ema.items())
    with pytest.raises(ValueError, match=r"--weights model applies to training runs only; .* is not a run folder"):
        convert(tmp_path / "a", tmp_path / "b", "--weights", "model")


def test_files_have_the_dtypes_and_sizes_of_the_source(tmp_path):
    model = exported(tmp_path / "a", SPARSE)
    path = tmp_path / "a/diffusion_pytorch_model.safetensors"
    mixed = {k: v if "norm" in k else v.to(torch.bfloat16) for k, v in load_file(path).items()}
    save_file(mixed, path, metadata={"format": "pt"})
    total = sum(v.nbytes for v in mixed.values())
    assert total < 0.6 * sum(p.nbytes for p in model.parameters())
    # all of it fits into one file, and not with a byte less
    convert(tmp_path / "a", tmp_path / "b", "--no-golden", "--max-shard-gb", total / 2**30)
    assert path.read_bytes() == (tmp_path / "b/diffusion_pytorch_model.safetensors").read_bytes()
    convert(tmp_path / "a", tmp_path / "c", "--no-golden", "--max-shard-gb", (total - 1) / 2**30)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 2


def test_trained_weights_and_dense_runs(tmp_path):
    ema = run_folder(tmp_path / "run", "FullAttention")
    convert(tmp_path / "run", tmp_path / "a", "--weights", "model")
    files = WeightFiles(tmp_path / "a")
    assert all(torch.equal(files.read(key), value + 1) for key, value in ema.items())
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]


# everything else


def test_dtype_and_golden_tensors_of_what_was_written(tmp_path):
    exported(tmp_path / "a", SPARSE)
    convert(tmp_path / "a", tmp_path / "b", "--dtype", "bfloat16", "--golden-layers", 1)
    files, source = WeightFiles(tmp_path / "b"), WeightFiles(tmp_path / "a")
    assert all(torch.equal(files.read(key), source.read(key).to(torch.bfloat16)) for key in source.keys)
    assert list(load_file(tmp_path / "b/golden.safetensors")) == ["blocks.1.hidden", "blocks.1.out"]
    verify_export(tmp_path / "b", layers=[1], device="cpu")


def test_sampling_settings_are_written_over(tmp_path):
    exported(tmp_path / "a", SPARSE)
    options = ("--guidance-form", "additive", "--guidance", 4, "--dense-steps", 2, "--flow-shift", 6)
    convert(tmp_path / "a", tmp_path / "b", *options, "--no-golden")
    sparse = read_sparse_config(tmp_path / "b")
    assert (sparse.dense_steps, sparse.grid_topk) == (2, ((3, 5),))
    assert recipe(sparse) == (None, 6, "additive", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere", "{tmp}/out"], "no such folder"),
        (["{tmp}/dense", "{tmp}/sparse"], "sparse already exists"),
        (["{tmp}/dense", "{tmp}/out", "--topk", "3", "--grid", "8", "8", "8"], "has no gates"),
        (["{tmp}/dense", "{tmp}/out", "--dense-steps", "0"], "has no gates, so no .* to write dense_steps to"),
        (["{tmp}/dense", "{tmp}/out", "--step-list", "9"], "has no gates, so no .* to write step_list to"),
        (
            ["{tmp}/sparse", "{tmp}/out", "--step-list", "5,9"],
            r"timesteps must be strictly decreasing .* got \[5\.0, 9\.0\]",
        ),
        (
            ["{tmp}/sparse", "{tmp}/out", "--step-list", "9", "--flow-shift", "6"],
            r"--flow-shift 6\.0 does not apply beside the steps \[9\.0\]",
        ),
        (["{tmp}/sparse", "{tmp}/out", "--step-list", "9,x"], "--step-list: expected float values .*, got 9,x"),
        (["{tmp}/sparse", "{tmp}/out", "--topk", "3"], "has its own top-k and grid"),
        (
            ["{tmp}/sparse", "{tmp}/out", "--to", "fastvideo"],
            r"tile_thw=\(4, 4, 4\) only, the source has .*\(2, 2, 2\)",
        ),
        (["{tmp}/fv", "{tmp}/out"], "has gates but no sparse_attention.json"),
        (["{tmp}/fv", "{tmp}/out", "--topk", "3"], "grid=None, topk=3 and sparsity=None"),
        (["{tmp}/fv", "{tmp}/out", "--topk", "9", "--grid", "8", "8", "8"], r"topk must be in 1..8, .* got 9..9"),
        (["{tmp}/short", "{tmp}/out"], "lacks 1 tensors of the model: proj_out.bias"),
        (["{tmp}/strange", "{tmp}/out"], "blocks.0.extra.weight is not a tensor of a Wan checkpoint"),
        (["{tmp}/narrow", "{tmp}/out"], "a Wan checkpoint needs num_heads, it is missing"),
    ],
)
def test_bad_input(arguments, message, tmp_path):
    exported(tmp_path / "dense")
    exported(tmp_path / "sparse", SPARSE)
    fastvideo_folder(tmp_path / "fv")
    exported(tmp_path / "short")
    path = tmp_path / "short/diffusion_pytorch_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if key != "proj_out.bias"}, path)
    convert(tmp_path / "dense", tmp_path / "strange", "--to", "wan")
    path = tmp_path / "strange/diffusion_pytorch_model.safetensors"
    save_file(load_file(path) | {"blocks.0.extra.weight": torch.ones(1)}, path)
    convert(tmp_path / "dense", tmp_path / "narrow", "--to", "wan")
    path = tmp_path / "narrow/config.json"
    path.write_text(json.dumps({key: value for key, value in json_of(path).items() if key != "num_heads"}))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        convert(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert sorted(tmp_path.iterdir()) == before


def test_errors_are_one_line_and_status_1(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop, one_line_errors(traceback=False):
        convert("./nowhere", tmp_path / "out", "--to", "wan")
    assert stop.value.code == 1
    assert capsys.readouterr() == ("", "error: no such folder: ./nowhere\n")
    assert not (tmp_path / "out").exists()
