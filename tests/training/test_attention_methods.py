"""Every attention method trains: finite losses, gradients of all its parameters, counted FLOPs, a run that resumes.

Conv pooling, whose weights are no gates, goes through a checkpoint like them.
"""

from __future__ import annotations

import math
from functools import partial

import lightning as L
import pytest
import torch

from tests.states import rewrite_state
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparge.method import SpargeAttention
from vsa.checkpoints import state_file
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.run_checkpoint import read_checkpoint
from vsa.checkpoints.sparse_config import read_sparse_config
from vsa.checkpoints.state_file import read_state
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_source import open_weights
from vsa.data.plan_datamodule import PlanDataModule
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import generate, load_run
from vsa.training.gradients import refuse_training_free
from vsa.training.train import check_run

METHODS = [
    ("attention=full", "~attention.tile_thw"),
    ("attention=compressed_kv", "~attention.tile_thw"),
    ("attention=spatial_temporal", "~attention.tile_thw"),
    ("attention=strided_window", "~attention.tile_thw"),
    ("attention=neighborhood", "attention.tile_thw=[2,2,2]"),
    (
        "attention=sparge",
        "~attention.tile_thw",
        "attention.q_tokens=8",
        "attention.kv_tokens=4",
        "attention.allow_training=true",
    ),
    ("attention=fine_grained", "~attention.tile_thw", "attention.kv_tokens=4", "attention.allow_training=true"),
    (
        "attention=dynamic_hilbert",
        "~attention.tile_thw",
        "attention.tokens=4",
        "attention.sub_tokens=2",
        "attention.allow_training=true",
    ),
    ("attention=pooled_tail", "attention.order=2", "attention.score=mass"),
    ("attention=sla", "attention.linear=marginal", "attention.tile_thw=[1,1,8]"),
    ("attention=radial", "~attention.tile_thw", "attention.tokens=4"),
    ("attention=video_sparse", "attention.rule=top_p", "attention.top_p=0.5", "attention.over=layer"),
    ("attention=staged", "attention.stages=c_fl", "attention.window_thw=[1,1,3]", "attention.pooling=conv"),
    (
        "attention=staged",
        "attention.kv_tile_thw=[1,2,2]",
        "attention.pooling=conv",
        "attention.conv_sharing=none",
        "attention.score=subblock_softmax",
        "attention.score_thw=[1,1,2]",
    ),
]
# other settings of the same classes
FURTHER = [
    ("attention=spatial_full", "~attention.tile_thw"),
    ("attention=video_sparse", "attention.score=error"),
    ("attention=vsa", "attention.tile_thw=[1,2,2]"),
    ("attention=spargeattention2", "attention.tile_thw=[1,1,8]", "attention.kv_tile_thw=[1,1,4]"),
    ("attention=vsa2", "attention.score_thw=[1,1,2]"),
    ("attention=nabla", "attention.tile_thw=[1,2,2]", "attention.window_thw=[1,1,1]", "attention.top_p=0.3"),
    ("attention=llsa", "attention.node_thw=[2,2,2]"),
    ("attention=sol", "attention.deviations=0.5"),
    ("attention=staged", "attention.stages=l"),
    ("attention=staged", "attention.stages=c_f_l", "attention.window_thw=[1,1,3]"),
    ("attention=staged", "attention.pool_thw=[1,2,2]", "attention.score=mean"),
    ("attention=pooled_tail", "attention.tail=double_count", "attention.levels=2", "attention.node_thw=[2,4,4]"),
]


class Unmoved(L.Callback):
    """Names of parameters that no step gave a gradient."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.names = [name for name, p in module.model.named_parameters() if p.grad is None]


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
@pytest.mark.parametrize(
    "overrides",
    [*METHODS, *(pytest.param(overrides, marks=pytest.mark.slow) for overrides in FURTHER)],
    ids=lambda overrides: " ".join(overrides[:2]),
)
def test_a_method_trains_and_resumes(training, overrides):
    callback = Unmoved()
    training(*overrides, "trainer.max_steps=2", callbacks=(callback,))
    training(*overrides, "trainer.max_steps=4", "ckpt_path=last")
    assert callback.names == []
    rows = training.metrics()
    assert sorted(rows) == [1, 2, 3, 4]
    assert all(math.isfinite(float(row["train/loss"])) for row in rows.values())


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
def test_a_run_of_the_former_name_of_a_score_goes_on_with_its_new_one(training, monkeypatch):
    run = ("attention=pooled_tail", "attention.score_thw=[1,1,2]")
    training(*run, "attention.score=subblock_softmax", "trainer.max_steps=1")
    path = training.folder() / "checkpoints" / "step-00000001"
    config = read_state(path)["config"]
    with monkeypatch.context() as earlier:
        earlier.setattr(state_file, "SCHEMA", 2)
        rewrite_state(path, config={**config, "attention": {**config["attention"], "score": "subblock_lse"}})
    changed = "attention.score=subblock_softmax, the settings have subblock_lse"
    with pytest.raises(ValueError, match=f"was trained with {changed}"):
        training(*run, "attention.score=subblock_lse", "trainer.max_steps=2", "ckpt_path=last")
    training(*run, "attention.score=subblock_softmax", "trainer.max_steps=2", "ckpt_path=last")
    assert sorted(training.metrics()) == [1, 2]


CONV = ("attention=staged", "attention.pooling=conv", "attention.tile_thw=[1,2,2]", "attention.gate_init=identity")


class Start(L.Callback):
    """Weights and optimizer groups at the start."""

    def on_train_start(self, trainer, module):
        self.weights = {name: p.detach().clone() for name, p in module.model.named_parameters()}
        self.roles = {name: group["role"] for group in trainer.optimizers[0].param_groups for name in group["names"]}


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
def test_pools_with_weights_start_fresh_are_saved_and_exported(training, tmp_path):
    training("attention=full", "~attention.tile_thw", "run=dense", "trainer.max_steps=1")
    start, restart = Start(), Start()
    finetune = ("task=finetune", "task.latent_scale=shared", f"init_from={training.folder('dense')}", *CONV)
    training(*finetune, "trainer.max_steps=2", callbacks=(start,))
    pools = {name for name in start.weights if ".to_pool" in name}
    layers = len({name.split(".")[1] for name in pools})
    assert len(pools) == 3 * layers > 0
    assert all(is_gate(name) for name in pools)
    assert {start.roles[name] for name in pools} == {"gate"}
    for name in pools:
        eye = torch.eye(start.weights[name].shape[0])
        assert torch.equal(start.weights[name], eye.repeat(1, 4) / 4)
    dense = read_checkpoint(training.folder("dense") / "checkpoints" / "step-00000001")
    base_names = {name for name in start.weights if not is_gate(name)}
    assert set(dense.tensors("ema")) == base_names
    assert all(torch.equal(start.weights[name], value) for name, value in dense.tensors("ema").items())
    # a checkpoint holds them, and a run goes on with them
    tensors = read_checkpoint(training.folder() / "checkpoints" / "step-00000002").tensors("model")
    assert not torch.equal(tensors[min(pools)], start.weights[min(pools)])
    training(*finetune, "trainer.max_steps=3", "ckpt_path=last", callbacks=(restart,))
    assert all(torch.equal(restart.weights[name], tensors[name]) for name in pools)
    # sparse weights are not dense ones
    run = load_run(training.folder(), device="cpu")
    assert generate(run, ["a red circle"], run.settings(steps=1)).isfinite().all()
    with pytest.raises(ValueError, match=r"gates=initial takes a dense checkpoint, but .* has gates: blocks.0.to_gate"):
        training(*finetune[:2], f"init_from={training.folder()}", *CONV, "run=again")
    convert(open_weights(training.folder()), tmp_path / "out", Conversion(golden=False))
    assert set(read_sparse_config(tmp_path / "out").gate_keys) == {name for name in tensors if is_gate(name)} >= pools


def test_a_training_free_method_says_how_to_train_it(training):
    runs = ("attention=dynamic_hilbert", "~attention.tile_thw", "attention.tokens=4", "attention.sub_tokens=2")
    with pytest.raises(
        ValueError, match=r"^attention=dynamic_hilbert is training-free: .* set attention\.allow_training"
    ):
        training(*runs, "trainer.max_steps=1")
    assert not training.output.exists()


@pytest.mark.parametrize("name", ["sparge", "fine_grained", "dynamic_hilbert"])
def test_a_training_free_method_is_refused_before_data_are_prepared(training, monkeypatch, name):
    def prepare(self):
        raise AssertionError("data are prepared")

    monkeypatch.setattr(PlanDataModule, "prepare_data", prepare)
    cfg = training.config(f"attention={name}", "~attention.tile_thw")
    with pytest.raises(ValueError, match=f"^attention={name} is training-free"):
        check_run(cfg, {})
    with pytest.raises(AssertionError, match="data are prepared"):
        check_run(training.config(f"attention={name}", "~attention.tile_thw", "attention.allow_training=true"), {})


def test_parameters_after_the_last_attention_train_with_any_method():
    method = partial(SpargeAttention, q_tokens=8, kv_tokens=4)
    model = VideoDiT(
        attention=method, num_attention_heads=1, attention_head_dim=12, ffn_dim=24, num_layers=2, text_dim=8
    ).requires_grad_(False)
    video, step, text = torch.randn(1, 16, 2, 4, 4), torch.tensor([500.0]), torch.randn(1, 3, 8)

    def refuses(call) -> bool:
        try:
            call()
        except ValueError as error:
            return "is training-free" in str(error)
        return False

    names = set()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(True)
        is_refused = refuses(lambda: model(video, step, text))
        assert refuses(lambda: refuse_training_free(model)) == is_refused, name
        names |= set() if is_refused else {name}
        parameter.requires_grad_(False)
    assert {"proj_out.weight", "blocks.1.ffn.net.2.weight"} < names
    assert "blocks.0.ffn.net.2.weight" not in names


WINDOWS = ("attention=neighborhood", "attention.window_thw=[2,3,1.0]", "attention.tile_thw=[1,2,2]")


def test_windows_start_from_dense_weights_and_have_no_topk(training):
    training("attention=full", "~attention.tile_thw", "run=dense", "trainer.max_steps=1")
    finetune = ("task=finetune", "task.latent_scale=shared", f"init_from={training.folder('dense')}", *WINDOWS)
    # a schedule that no number of tiles could hold is of another method
    training(*finetune, "sparsity.sparsity=null", "sparsity.topk=99", "trainer.max_steps=2")
    assert set(training.last().tensors("model")) == set(training.last("dense").tensors("model"))
    # 2 x 4 x 4 tokens in 8 tiles, each sees both frames and the two tiles of its row or all of them
    rows = training.metrics()
    run = load_run(training.folder(), device="cpu")
    method, layout = run.model.blocks[0].method, run.model.layout_for((16, 2, 8, 8))
    density = method.pairs(layout, 1) / 32**2
    for row in rows.values():
        assert float(row["sparsity/density"]) == pytest.approx(density)
        assert float(row["sparsity/topk"]) == pytest.approx(8 * density)
    assert run.settings().topk == run.settings(at="dense").topk == KeptTiles((8,))
    assert generate(run, ["a red circle"], run.settings(steps=1)).isfinite().all()
    for name, value in {"topk": 2, "sparsity": 0.5}.items():
        with pytest.raises(ValueError, match=f"^{name} {value} does not apply to NeighborhoodAttention: it selects"):
            run.settings(**{name: value})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attention.window_thw=[9,1,1]", "window of time must be at most its 2 tokens, got 9"),
        ("attention.stride_thw=[1,1,5]", "stride of width must be at most its window 4, got 5"),
        ("attention.dilation_thw=[1,2,1]", r"dilation 2 of height does not fit: window 3 \* 2 is above its 4 tokens"),
        ("attention.window_thw=[0.5,0.5,1.5]", r"attention.window_thw=\[0\.5,0\.5,1\.5\]: expected"),
        ("attention.topk=3", "attention.topk=3: unknown setting"),
    ],
)
def test_windows_that_do_not_fit_the_data_are_refused(training, override, message):
    with pytest.raises(ValueError, match=message):
        training(*WINDOWS, override)
    assert not training.folder().exists()
