"""Tasks, sampling and estimates know a network by its protocol: a second one, and layers of two methods."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import vsa.config
from tests.tiny_models import LATENT as TINY_LATENT
from tests.tiny_models import make_model
from tests.tiny_network import TARGETS, DenseThenSparse, TinyNetwork
from vsa.attention.compressed_kv import CompressedKV
from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.lora import LoRA
from vsa.checkpoints.wan import sparse_settings
from vsa.checkpoints.weight_source import open_weights
from vsa.sampling.pipeline import generate, load_run
from vsa.sampling.record import settings_dict
from vsa.training.estimate.gpus import GPUS
from vsa.training.estimate.job import TRAINING, Job, PlannedNetwork
from vsa.training.estimate.predict import memory, step_seconds
from vsa.training.gradients import refuse_training_free

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

TINY = f"model._target_={TARGETS}TinyNetwork"
MIXED = f"attention._target_={TARGETS}DenseThenSparse"
BF16 = "task.parallel.compute_dtype=bfloat16"


SPARSE = partial(VideoSparseAttention, tile_thw=(1, 2, 2))
LATENT = (16, 2, 8, 8)


@pytest.fixture(autouse=True)
def configs_name_test_classes(monkeypatch):
    monkeypatch.setattr(vsa.config, "ALLOWED_TARGETS", (*vsa.config.ALLOWED_TARGETS, TARGETS))


@pytest.mark.parametrize("overrides", [(TINY,), (MIXED,), (TINY, MIXED, BF16)], ids=lambda o: " ".join(o))
def test_it_trains_resumes_and_samples(training, overrides):
    training(*overrides, "run=whole")
    training(*overrides, "run=twice", "trainer.max_steps=2")
    training(*overrides, "run=twice", "ckpt_path=last")
    losses = training.losses("whole")
    assert sorted(losses) == [1, 2, 3, 4]
    assert all(math.isfinite(float(loss)) for loss in losses.values())
    assert training.losses("twice") == losses
    whole, twice = training.tensors("whole"), training.tensors("twice")
    assert whole.keys() == twice.keys()
    assert all(torch.equal(whole[name], twice[name]) for name in whole)
    gates = {name.split(".")[1] for name in whole if name.startswith("model/") and ".to_gate_compress" in name}
    assert gates == ({"1"} if MIXED in overrides else {"0", "1"})

    run = load_run(training.folder("whole"), device="cpu")
    assert isinstance(run.model, TinyNetwork) == (TINY in overrides)
    sparse, dense = (generate(run, ["a red circle"], run.settings(steps=1, at=at)) for at in ("current", "dense"))
    assert sparse.isfinite().all()
    # the layer that selects tiles shows
    assert not torch.equal(sparse, dense)


def test_layers_of_two_methods_are_counted_one_by_one(training, tmp_path):
    training(MIXED, "trainer.max_steps=1")
    row = training.metrics()[1]
    assert [float(row[f"sparsity/topk_layer_{layer}"]) for layer in (0, 1)] == [8, 4]
    assert float(row["sparsity/density"]) == 0.75
    source = open_weights(training.folder())
    model = source.network()
    assert [type(method) for method in model.attention_layers] == [FullAttention, DenseThenSparse]
    assert (model.selects, model.predicts, model.is_dense) == (True, False, False)
    assert model.attention_backend is not None
    # 8 tiles of 4 tokens; two tiles, and the 8 x 8 pairs of tiles
    layout = model.layout_for(LATENT)
    assert model.pairs(layout, 2) == [32 * 32, 32 * 2 * 4 + 8 * 8]
    counted = model.flops(LATENT, 2, 10, training=False)
    each = [model.with_attention(one).flops(LATENT, 2, 10, training=False) for one in (FullAttention, SPARSE)]
    assert counted.self_attention == sum(one.self_attention for one in each) / 2
    assert counted.selected == each[1].selected / 2 == each[1].self_attention / 2
    assert each[0].selected == 0
    # one description for all layers would be wrong for half of them
    with pytest.raises(ValueError, match=r"the model has FullAttention, DenseThenSparse"):
        convert(source, tmp_path / "out", Conversion())


def test_a_topk_says_nothing_about_layers_with_another_rule():
    def attention(layer_idx, **sizes):
        rule = "cdf" if layer_idx else "topk"
        return SpargeAttention(q_tokens=16, kv_tokens=16, rule=rule, layer_idx=layer_idx, **sizes)

    model = make_model(attention, num_layers=2)
    assert (model.selects, model.predicts) == (True, True)
    # 6 tiles, whose 36 scores are computed too; all tiles as an upper bound where the weights decide
    assert model.pairs(model.layout_for(TINY_LATENT), 2) == [96 * 2 * 16 + 36, 96 * 96 + 36]


def test_layers_without_a_topk_count_by_the_pairs_they_compute():
    model = make_model(partial(CompressedKV, pool_thw=(1, 2, 2)))
    layout = model.layout_for(TINY_LATENT)
    # every token attends to the means of all 24 tiles of 4 tokens
    assert model.computed_tiles(layout, KeptTiles.of(24)).layers == (6,)


def test_layers_of_two_methods_are_captured_and_inspected(training, command_line):
    training(MIXED, "trainer.max_steps=1")
    words = (str(training.folder()), "--device", "cpu")
    clip = "toy-0-00000000"
    compared = command_line(
        "compare-attention", "--run", *words, "--clips", clip, "--method", "full", "--layers", "0,1"
    )
    assert compared[0] == 0, compared
    assert (training.folder() / "comparison" / "comparison.json").is_file()
    status, _, err = command_line("inspect", words[0], clip, *words[1:], "--layers", "0")
    assert (status, "attends with FullAttention, which selects no tiles" in err) == (1, True), err


def test_records_count_a_dense_layer_as_dense(training):
    look = ("every_n_steps=1", "noise_levels=[0.5]")
    settings = ("callbacks=diagnostics", *(f"callbacks.diagnostics.{setting}" for setting in look))
    training(MIXED, *settings, "trainer.max_steps=1")
    run = load_run(training.folder(), device="cpu")
    # all 8 tiles in one layer, 4 of 8 in the other
    assert settings_dict(run.settings(), run)["sparsity"] == 0.25
    assert settings_dict(run.settings(topk=2), run)["sparsity"] == 0.375
    assert settings_dict(run.settings(at="dense"), run)["sparsity"] == 0
    table = json.loads((training.folder() / "diagnostics" / "step-00000001.json").read_text())
    assert (table["layers"], table["sparsity"]) == ([1], 0.25)


def test_a_run_with_one_described_layer_is_not_exported_as_dense(training, monkeypatch):
    def attention(layer_idx, **sizes):
        return (SpargeAttention if layer_idx else FullAttention)(layer_idx=layer_idx, **sizes)

    training("attention=full", "~attention.tile_thw", "trainer.max_steps=1")
    source = open_weights(training.folder())
    monkeypatch.setattr(type(source), "_meta", make_model(attention))
    with pytest.raises(ValueError, match="the model has FullAttention, SpargeAttention"):
        assert source.sparse


def test_a_network_that_cannot_compile_its_blocks_is_refused(training):
    with pytest.raises(ValueError, match=r"task.parallel.compile=true: TinyNetwork cannot compile its blocks"):
        training(TINY, "task.parallel.compile=true", "run=refused")
    assert not training.folder("refused").exists()


def test_another_network_has_no_export(training, tmp_path):
    training(TINY, "trainer.max_steps=1")
    with pytest.raises(ValueError, match="TinyNetwork has no counterpart in WanTransformer3DModel"):
        convert(open_weights(training.folder()), tmp_path / "out", Conversion())


def tiny_network(attention=SPARSE) -> TinyNetwork:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "ffn_dim": 24, "text_dim": 8, "freq_dim": 8}
    return TinyNetwork(attention=attention, num_layers=2, **sizes)


@pytest.mark.parametrize("make", [partial(make_model, SPARSE), tiny_network], ids=["VideoDiT", "TinyNetwork"])
def test_the_parts_that_a_network_names_exist(make):
    model = make()
    parameters = dict(model.named_parameters())
    assert model.head in parameters
    assert model.get_submodule(model.time_embedder)
    own = [name.removeprefix("blocks.0.") for name in parameters if name.startswith("blocks.0.")]
    for part in (*model.after_attention, *model.after_cross_attention, model.attention_output):
        assert any(name.startswith(part) for name in own), part
    for part in (*model.modulation, *model.adapted_layers):
        assert any(name.removesuffix(".weight").endswith(part) for name in own), part
    assert all(any(name.startswith(part) for name in parameters) for part in model.after_blocks)
    assert set(model.parameter_roles().values()) == {"matrix", "vector", "embedding", "gate", "head"}
    # 2 operations for each weight of every layer that the backward computes again
    sizes = {"num_tokens": 5, "text_len": 3}
    linear = {name: p.numel() for name, p in parameters.items() if p.dim() > 1 and "table" not in name}
    rows = {name: model.rows(name.removesuffix(".weight"), **sizes, image_len=0) for name in linear}
    after = [f".{part}" for part in model.after_cross_attention]
    again = {
        None: [*linear],
        "none": [],
        "attention": [n for n in linear if n.startswith("blocks.") and not any(part in n for part in after)],
        "full": [n for n in linear if n.startswith("blocks.")],
    }
    for level, names in again.items():
        assert model.linear_flops(**sizes, recomputed=level) == sum(2 * rows[n] * linear[n] for n in names), level


@pytest.mark.parametrize("make", [make_model, tiny_network], ids=["VideoDiT", "TinyNetwork"])
def test_rows_are_those_that_pass_a_layer(make):
    model, passed = make(SPARSE), {}

    def count(name, layer, inputs, output):
        passed[name] = output.numel() // layer.weight.shape[0]

    layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv3d)}
    for name, layer in layers.items():
        layer.register_forward_hook(partial(count, name))
    model(torch.randn(1, model.in_channels, 2, 4, 8), torch.full((1,), 500.0), torch.randn(1, 3, model.text_dim))
    assert passed == {name: model.rows(name, num_tokens=16, text_len=3, image_len=0) for name in layers}


@pytest.mark.parametrize("make", [make_model, tiny_network], ids=["VideoDiT", "TinyNetwork"])
def test_a_level_is_set_in_every_block(make):
    model = make(SPARSE)
    model.activation_checkpointing = "attention"
    assert {block.activation_checkpointing for block in model.blocks} == {"attention"}
    assert model.activation_checkpointing == "attention"


def test_lora_adapts_the_layers_that_a_network_names():
    pytest.importorskip("peft")
    model = tiny_network()
    LoRA(rank=2, alpha=2.0).inject(model)
    adapted = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert adapted == {f"blocks.{i}.{name}" for i in range(2) for name in model.adapted_layers}


def test_layers_that_tile_in_two_ways_share_no_layout():
    def attention(layer_idx, **sizes):
        return VideoSparseAttention(tile_thw=(1, 2, 2 + layer_idx), layer_idx=layer_idx, **sizes)

    # layers that tile alike share one, which says nothing about the layers of another network
    alike = make_model(SPARSE)
    assert alike.layout_for(TINY_LATENT).tile_thw == (1, 2, 2)
    with pytest.raises(ValueError, match="layers 0 and 1 have attention with different tiles or token orders"):
        make_model(attention).layout_for(TINY_LATENT)
    with pytest.raises(ValueError, match="describes one attention for all layers"):
        sparse_settings(make_model(attention))


@pytest.mark.parametrize("make", [make_model, tiny_network], ids=["VideoDiT", "TinyNetwork"])
def test_gradients_of_what_follows_attention_pass_none(make):
    passed = []

    class Watched(FullAttention):
        def attend(self, q, k, v, ctx):
            passed.append(any(x.requires_grad for x in (q, k, v)))
            return super().attend(q, k, v, ctx)

    model = make(Watched).requires_grad_(False)
    latents, text = torch.randn(1, model.in_channels, 2, 4, 4), torch.randn(1, 3, model.text_dim)
    follows = {}
    for name, parameter in model.named_parameters():
        passed.clear()
        parameter.requires_grad_(True)
        assert model(latents, torch.full((1,), 500.0), text).requires_grad, name
        parameter.requires_grad_(False)
        follows[name] = not any(passed)
    assert follows == {name: model.follows_attention(name) for name in follows}
    assert set(follows.values()) == {True, False}


def test_a_training_free_layer_behind_others_is_refused():
    def attention(layer_idx, **sizes):
        method = SpargeAttention if layer_idx == 1 else FullAttention
        return method(layer_idx=layer_idx, **sizes)

    model = make_model(attention)
    with pytest.raises(ValueError, match="attention=sparge is training-free"):
        refuse_training_free(model)
    # gradients of what follows the last attention pass no layer
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(model.follows_attention(name))
    refuse_training_free(model)


@pytest.mark.parametrize("words", [(TINY,), (MIXED,), ()], ids=lambda o: " ".join(o))
def test_it_is_estimated(words, command_line):
    plan = ("plan", "model=dit_tiny", "trainer.devices=1", "attention.tile_thw=[1,2,2]")
    status, out, err = command_line(*plan, "--grid", "4", "8", "8", *words)
    assert status == 0, err
    assert "activation_checkpointing=auto takes none" in out
    assert ("tiles in 2 of 4 layers" in out) == (MIXED in words)


def test_the_estimate_of_two_methods_lies_between_those_of_one():
    def job(attention) -> Job:
        model = make_model(attention, num_layers=2)
        network = PlannedNetwork(name="model", model=model, passes={TRAINING: 1.0}, updates=1.0)
        return Job(networks=[network], latent_shape=TINY_LATENT, text=7, topk=KeptTiles.of(4), batch=2)

    def mixed(layer_idx, **sizes):
        return (SPARSE if layer_idx else FullAttention)(layer_idx=layer_idx, **sizes)

    full, both, sparse = (job(method) for method in (FullAttention, mixed, SPARSE))
    kinds = [job.blocks(job.networks[0]) for job in (full, both, sparse)]
    assert [list(blocks.values()) for blocks in kinds] == [[2], [1, 1], [2]]
    assert [*kinds[1]] == [*kinds[0], *kinds[2]]
    seconds = [step_seconds(job, GPUS[0])["attention"] for job in (full, both, sparse)]
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)
    assert seconds[0] != seconds[2]
    dense, mix, gated = (memory(job) for job in (full, both, sparse))
    assert mix["activations"] == (dense["activations"] + gated["activations"]) / 2
    # one block at a time is computed again, at most the larger one
    dense, mix, gated = (memory(replace(job, level="full")) for job in (full, both, sparse))
    for part in ("a block in its backward", "parameters in bf16"):
        assert mix[part] == gated[part] > dense[part]
