"""Finetuning to sparse: what a run starts from, what it minimises, what it trains, and where it ends."""

from __future__ import annotations

import hashlib
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

import vsa.training.modules.base as module_file
from tests.data.tiny_wan import make_vae
from tests.objectives.small_nets import make_net, sparse_attention
from tests.states import rewrite_state
from vsa.attention.full import FullAttention
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.lora import LoRA, merged_tensor, plain_names
from vsa.checkpoints.run_checkpoint import read_checkpoint
from vsa.checkpoints.weight_source import open_weights
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import load_run
from vsa.training.modules.finetune import FinetuneModule
from vsa.training.modules.teacher import Teacher
from vsa.training.parallel import ParallelPlan

# a dense run of the tiny model, and what finetunes it: 8 tiles
DENSE = ("attention=full", "~attention.tile_thw", "run=dense", "trainer.max_steps=6")
FINETUNE = ("task=finetune", "task.latent_scale=shared", "attention.gate_init=identity", "attention.tile_thw=[1,2,2]")
ALL_TILES = ("sparsity.sparsity=0",)
LORA = "task.lora={_target_:vsa.checkpoints.lora.LoRA,rank:2,alpha:3}"


# sizes of `write_tiny_run`
TINY_RUN = {"num_attention_heads": 2, "attention_head_dim": 16, "absolute_positions": "false"}


def frozen_copy(teacher):
    return [] if teacher is None else [p.detach().clone() for p in teacher.network.parameters()]


class Watch(L.Callback):
    """Weights at the start and at the end, the output of the first forward, the loss parts of every step."""

    def __init__(self):
        self.start, self.end, self.first, self.parts = {}, {}, None, []

    def on_train_start(self, trainer, pl_module):
        self.start = {n: p.detach().clone() for n, p in pl_module.model.named_parameters()}
        self.trained = {n for n, p in pl_module.model.named_parameters() if p.requires_grad}
        self.lrs = {name: group["base_lr"] for group in trainer.optimizers[0].param_groups for name in group["names"]}
        self.teacher = frozen_copy(pl_module._teacher)

        def keep(model, args, kwargs, output):
            if self.first is None:
                self.first = (args, kwargs, output.detach().clone())

        pl_module.model.register_forward_hook(keep, with_kwargs=True)

    def on_train_end(self, trainer, pl_module):
        self.end = {n: p.detach().clone() for n, p in pl_module.model.named_parameters()}
        self.teacher_end = frozen_copy(pl_module._teacher)

    @property
    def changed(self):
        return {n for n in self.start if not torch.equal(self.start[n], self.end[n])}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Run folder of a dense tiny run."""
    from tests.tiny_runs import TinyTraining

    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("dense"), patch)
        training(*DENSE)
    return training.folder("dense")


def make_pipeline(folder: Path, **changed) -> Path:
    """A pipeline folder with a transformer of the tiny sizes."""
    torch.manual_seed(0)
    sizes = {
        "num_attention_heads": 1,
        "attention_head_dim": 12,
        "text_dim": 64,
        "freq_dim": 16,
        "ffn_dim": 24,
        "num_layers": 2,
    }
    model = WanTransformer3DModel(**{**sizes, **changed})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "transformer")
    return folder


def wan_like(*overrides: str) -> tuple[str, ...]:
    return (*FINETUNE, "model.absolute_positions=false", *overrides)


def the_same(first, model: torch.nn.Module, **own) -> float:
    """Largest difference between a captured forward and `model` on the same input."""
    args, kwargs, output = first
    with torch.no_grad():
        expected = model(*args, **{**kwargs, **own})
    return (output - expected).abs().max().item()


def test_all_tiles_start_at_the_dense_run(training, dense):
    watch = Watch()
    training(*FINETUNE, *ALL_TILES, f"init_from={dense}", "run=tuned", "trainer.max_steps=2", callbacks=(watch,))
    reference = load_run(dense, device="cpu").model
    assert the_same(watch.first, reference, topk=None) < 1e-5
    # the averaged weights of the dense run, and gates at their identity
    ema = read_checkpoint(training_checkpoint(dense)).tensors("ema")
    gates = {n for n in watch.start if "to_gate" in n}
    assert gates
    assert set(watch.start) - gates == set(ema)
    assert all(torch.equal(watch.start[n], ema[n]) for n in ema)
    assert any(n in watch.changed for n in gates)
    # control: fewer tiles are another function
    args, kwargs, _ = watch.first
    sparse = load_run(training.folder("tuned"), device="cpu").model
    with torch.no_grad():
        few, every = (sparse(*args, **{**kwargs, "topk": k}) for k in (2, 8))
    assert (few - every).abs().max() > 1e-4


def training_checkpoint(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def test_a_diffusers_pipeline_starts_at_its_output(training, tmp_path):
    folder, watch = make_pipeline(tmp_path / "wan"), Watch()
    low = tmp_path / "experts" / "low_noise_model"
    shutil.copytree(folder / "transformer", low)
    with pytest.raises(
        ValueError, match=r"is an expert for noise levels 0 to 0.875, task.objective.noise_range is \[0,1\]"
    ):
        training(*wan_like(*ALL_TILES), f"init_from={low}", "run=low", "trainer.max_steps=1")
    training(*wan_like(*ALL_TILES), f"init_from={folder}", "trainer.max_steps=1", callbacks=(watch,))
    theirs = WanTransformer3DModel.from_pretrained(folder / "transformer")
    (x, timestep), conditions, output = watch.first
    text, mask = conditions["text"], conditions["text_mask"]
    with torch.no_grad():
        # theirs has no mask: one sample at a time, with its own tokens alone
        expected = torch.cat(
            [theirs(x[i : i + 1], timestep[i : i + 1], text[i : i + 1, mask[i]]).sample for i in range(len(x))]
        )
    assert output.abs().max() > 0.1
    assert (output - expected).abs().max() < 1e-5


def test_annealing_ends_at_the_exact_count_and_the_loss_falls(training, dense):
    staircase = (
        *("sparsity=staircase", "~sparsity.sparsity", "sparsity.topk=1", "sparsity.dense_steps=3"),
        *("sparsity.interval=3", "sparsity.tiles=2"),
    )
    training(*FINETUNE, *staircase, f"init_from={dense}", "optim.lr=0.003", "trainer.max_steps=40")
    metrics = training.metrics()
    topk = [int(float(metrics[step]["sparsity/topk"])) for step in sorted(metrics)]
    assert topk[:3] == [8, 8, 8]
    assert topk[-1] == 1
    assert all(a >= b for a, b in pairwise(topk))
    losses = [float(metrics[step]["train/loss"]) for step in sorted(metrics)]
    assert sum(losses[-8:]) < sum(losses[:8])


# the teacher


def test_the_teacher_stays_out_of_the_run(training, dense):
    watch = Watch()
    taught = (*FINETUNE, "task.objective.velocity=1", "task.objective.attention=0.5", f"init_from={dense}")
    training(*taught, "run=straight", "trainer.max_steps=4", callbacks=(watch,))
    ema = read_checkpoint(training_checkpoint(dense)).tensors("ema")
    assert_same_values(watch.teacher, ema.values())
    assert all(torch.equal(a, b) for a, b in zip(watch.teacher, watch.teacher_end, strict=True))
    assert set(training.tensors("straight")) == {
        *(f"{group}/{name}" for group in ("model", "ema") for name in watch.start),
        *(f"optimizer/{name}/{key}" for name in watch.start for key in ("exp_avg", "exp_avg_sq", "step")),
    }
    row = training.metrics("straight")[4]
    mixed = float(row["train/loss_data"]) + float(row["train/loss_velocity"]) + 0.5 * float(row["train/loss_attention"])
    assert float(row["train/loss"]) == pytest.approx(mixed, rel=1e-5)

    # resumed bit for bit, with the same teacher, named again or not
    training(*taught, "run=stopped", "trainer.max_steps=2")
    again = [o for o in taught if not o.startswith("init_from")]
    training(*again, "run=stopped", "trainer.max_steps=4", "ckpt_path=last")
    assert_equal(training.tensors("straight"), training.tensors("stopped"))
    training(*taught, "run=named", "trainer.max_steps=4", f"ckpt_path={step(training, 'straight', 2)}")
    assert_equal(training.tensors("straight"), training.tensors("named"))
    # another start is another run
    with pytest.raises(ValueError, match=r"init_from=elsewhere, but the run of ckpt_path=last began from .*dense"):
        training(*again, "init_from=elsewhere", "run=stopped", "trainer.max_steps=6", "ckpt_path=last")


def test_a_resumed_teacher_is_the_one_it_began_with(training, dense, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    taught = (*FINETUNE, "task.objective.velocity=1", "trainer.max_steps=4")
    training(*taught, f"init_from={source}", "run=straight")
    training(*taught, f"init_from={source}", "run=stopped", "trainer.max_steps=2")
    # the run it started from goes on: its newest checkpoint is another one now
    training(*DENSE, f"ckpt_path={training_checkpoint(source)}", "trainer.max_steps=8")
    newer = training_checkpoint(training.folder("dense"))
    shutil.copytree(newer, source / "checkpoints" / newer.name)
    training(*taught, f"init_from={source}", "run=stopped", "ckpt_path=last")
    assert_equal(training.tensors("straight"), training.tensors("stopped"))
    # replaced in place, it is refused
    first = training_checkpoint(dense).name
    shutil.rmtree(source / "checkpoints" / first)
    shutil.copytree(newer, source / "checkpoints" / first)
    rewrite_state(source / "checkpoints" / first, step=6)
    with pytest.raises(ValueError, match=rf"the teacher .*{first}.* is not what .* began with, or has changed since"):
        training(*taught, "run=stopped", "ckpt_path=last", "trainer.max_steps=6")


def test_a_teacher_of_its_own_lets_a_sparse_model_go_on(training, dense):
    training(*FINETUNE, f"init_from={dense}", "run=first", "trainer.max_steps=2")
    watch = Watch()
    second = (f"init_from={training.folder('first')}", "task.gates=required", "task.objective.velocity=1", "run=second")
    training(*FINETUNE, *second, f"task.teacher={dense}", "trainer.max_steps=2", callbacks=(watch,))
    ema = read_checkpoint(training_checkpoint(dense)).tensors("ema")
    assert_same_values(watch.teacher, ema.values())
    assert_equal(watch.start, training.last("first").tensors("ema"))
    with pytest.raises(ValueError, match=r"as teacher .*: gates=absent takes a dense checkpoint"):
        training(*FINETUNE, *second, "overwrite=true")


def test_latents_keep_the_statistics_of_the_start(training, dense, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    rewrite_state(training_checkpoint(source), latent_mean=[9.0] * 16)
    training(*FINETUNE, f"init_from={source}", "run=moved", "trainer.max_steps=2")
    assert training.last("moved").state["latent_mean"] == [9.0] * 16
    assert training.last("moved").state["latent_std"] == read_checkpoint(training_checkpoint(dense)).state["latent_std"]
    # a resumed run keeps them, too
    training(*FINETUNE, "run=moved", "trainer.max_steps=3", "ckpt_path=last")
    assert training.last("moved").state["latent_mean"] == [9.0] * 16


def step(training, run: str, number: int) -> Path:
    return training.folder(run) / "checkpoints" / f"step-{number:08d}"


def assert_same_values(a, b):
    """Whatever their order and names."""
    keys = [sorted(hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in ts) for ts in (a, b)]
    assert keys[0] == keys[1]


def assert_equal(a, b):
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_without_a_teacher_needs_its_start_no_more(training, dense, tmp_path):
    source = tmp_path / "moved"
    shutil.copytree(dense, source)
    training(*FINETUNE, f"init_from={source}", "run=one", "trainer.max_steps=2")
    shutil.rmtree(source)
    training(*FINETUNE, "run=one", "trainer.max_steps=3", "ckpt_path=last")
    assert training.last("one").step == 3
    assert training.last("one").state["config"]["init_from"] == str(source)


# what is trained


def test_patterns_choose_what_is_trained_and_how_fast(training, dense):
    watch = Watch()
    training(
        *(*FINETUNE, f"init_from={dense}", "task.trainable=['*.attn1.*','*to_gate*']"),
        *("+optim.lr_factors.gate=5.0", "trainer.max_steps=3"),
        callbacks=(watch,),
    )
    names = {n for n in watch.start if ".attn1." in n or "to_gate" in n}
    assert 0 < len(names) < len(watch.start)
    assert watch.trained == names
    assert watch.changed == names
    assert {name for name, lr in watch.lrs.items() if lr == pytest.approx(0.05)} == {n for n in names if "gate" in n}
    assert {name for name, lr in watch.lrs.items() if lr == pytest.approx(0.01)} == {n for n in names if "attn1" in n}
    # the frozen ones have no moments
    moments = {n.removeprefix("optimizer/").rpartition("/")[0] for n in training.tensors() if n.startswith("optimizer")}
    assert moments == names


def test_adapters_train_alone_and_merge_into_the_model(training, dense):
    watch = Watch()
    lora = (*FINETUNE, LORA, f"init_from={dense}")
    training(*lora, "run=straight", "trainer.max_steps=4", callbacks=(watch,))
    # B starts at zero: the first output is the plain model's
    plain = load_run(dense, device="cpu").model
    sparse = make_like(training, plain)
    assert the_same(watch.first, sparse) < 1e-5
    adapters = {n for n in watch.start if ".lora_" in n}
    gates = {n for n in watch.start if "to_gate" in n}
    assert len(adapters) == 2 * 2 * (2 * 4 + 2)
    assert watch.trained == adapters | gates
    assert watch.changed <= watch.trained
    assert {n for n in adapters if ".lora_B." in n} <= watch.changed

    # resumed bit for bit
    training(*lora, "run=stopped", "trainer.max_steps=2")
    training(*lora, "run=stopped", "trainer.max_steps=4", "ckpt_path=last")
    assert_equal(training.tensors("straight"), training.tensors("stopped"))

    plain = (*FINETUNE, f"init_from={dense}", "run=stopped", "trainer.max_steps=6", "ckpt_path=last")
    with pytest.raises(ValueError, match=r"was trained with .*task.lora=LoRA, the settings have null"):
        training(*plain)
    with pytest.raises(ValueError, match=r"was trained with task.lora=\{.*\}, the settings have None"):
        training(*plain, "resume.allow=[task,optim]")

    # a file of the adapters makes of the dense model what the run is
    adapted = open_weights(training.folder("straight"), "model")
    out = training.folder("straight").parent / "adapters"
    convert(adapted, out, Conversion(to="lora-comfyui"))
    merged = open_weights(f"{dense}+{out}")
    assert set(merged) == set(adapted)
    assert all(torch.allclose(merged[name], value, rtol=1e-5, atol=1e-6) for name, value in adapted.items())
    with pytest.raises(ValueError, match=r"--to lora-musubi takes a run with lora=adapters, .* has no adapters"):
        convert(open_weights(dense), out, Conversion(to="lora-musubi"))

    # what samplers load computes what the adapted model did
    run = load_run(training.folder("straight"), weights="model", device="cpu")
    args, kwargs, _ = watch.first
    config = training.last("straight").state["config"]
    from vsa.config import model_factory

    model = model_factory(config)()
    LoRA(rank=2, alpha=3).inject(model)
    model.load_state_dict(training.last("straight").tensors("model"), strict=True)
    with torch.no_grad():
        expected, actual = model(*args, **kwargs), run.model(*args, **kwargs)
        base = sparse(*args, **kwargs)
    assert (actual - expected).abs().max() < 1e-5
    # control: the adapters do something
    assert (expected - base).abs().max() > 1e-3
    # and a run can start from them
    again = Watch()
    training(*FINETUNE, f"init_from={training.folder('straight')}", "task.gates=required", "run=again",
             "trainer.max_steps=1", callbacks=(again,))  # fmt: skip
    ema = without_adapters(training.last("straight").tensors("ema"), LoRA(rank=2, alpha=3))
    assert_equal(again.start, ema)


def without_adapters(tensors: dict[str, Tensor], lora: LoRA) -> dict[str, Tensor]:
    return {plain: merged_tensor(tensors.__getitem__, name, lora) for plain, name in plain_names(tensors).items()}


def make_like(training, plain: VideoDiT) -> VideoDiT:
    """The sparse model of the tiny settings with the weights of `plain` and gates at their start."""
    from vsa.config import model_factory

    model = model_factory(training.config(*FINETUNE))()
    model.load_state_dict(plain.state_dict(), strict=False)
    return model


def test_merging_is_that_of_peft():
    model = make_net(sparse_attention)
    lora = LoRA(rank=2, alpha=5, targets=("to_q", "ffn.net.2"))
    lora.inject(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    tensors = without_adapters(dict(model.named_parameters()), lora)
    count = 0
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            module.merge()
            torch.testing.assert_close(tensors[f"{name}.weight"], module.base_layer.weight, rtol=1e-5, atol=1e-6)
            count += 1
    # to_q of both attentions and the MLP, in 3 layers
    assert count == 9
    assert set(tensors) == {name for name, _ in make_net(sparse_attention).named_parameters()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0, "alpha": 1}, "rank=0: expected an integer of at least 1, got 0"),
        ({"rank": 1, "alpha": 0}, "alpha=0: expected a number above 0, got 0"),
    ],
)
def test_impossible_adapters_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRA(**settings)


# bad input: one line, before any memory is taken and any file is written


@pytest.fixture
def no_memory(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr(module_file, "build_model", refuse)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.num_attention_heads=2",), r"has model.num_attention_heads=1, the model has 2"),
        # of the same shapes
        (
            ("model.num_attention_heads=2", "model.attention_head_dim=6"),
            r"has model.num_attention_heads=1, the model has 2",
        ),
        (("model.ffn_dim=36",), r"ffn\.\S+ has shape \(24, 12\), the model needs \(36, 12\)"),
        (("model.num_layers=3",), "has model.num_layers=2, the model has 3"),
        (("task.gates=required",), "lacks 8 gate tensors of the model: blocks.0.to_gate_compress.bias"),
        (("task.gates=some",), "task.gates=some: expected one of initial, required, got 'some'"),
        (("task.trainable=['*.attn7.*']",), r"task.trainable pattern '\*.attn7.\*' matches no parameter"),
        (("task.objective.data=0",), "are all 0: nothing to train"),
        ((LORA[:-1] + ",targets:[to_nothing]}",), "lora.targets: no linear layer is named 'to_nothing'"),
        (("task.objective.attention=1", "task.parallel.compile=true"), "is not supported with parallel.compile"),
        (("sparsity.sparsity=0.9",), "sparsity=0.9 leaves less than one of 8 tiles, at most 0.875"),
        (("sparsity.topk=9", "sparsity.sparsity=null"), "topk=9 is above the number of tiles, 8"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(training, dense, no_memory, overrides, message):
    with pytest.raises(ValueError, match=message):
        training(*FINETUNE, f"init_from={dense}", *overrides, "run=refused")
    assert not training.folder("refused").exists()


def test_one_tile_is_refused(training, dense, no_memory):
    with pytest.raises(ValueError, match=r"attention.tile_thw=\[2, 8, 8\] makes one tile of the largest latents"):
        training(*FINETUNE, f"init_from={dense}", "attention.tile_thw=[2,8,8]")
    # and where the tiles that are selected are whole, whatever those of the queries
    with pytest.raises(ValueError, match=r"attention.kv_tile_thw=\[2, 8, 8\] makes one tile of the largest latents"):
        training(*FINETUNE, f"init_from={dense}", "attention=staged", "attention.kv_tile_thw=[2,8,8]")
    # a curve has runs of tokens
    curve = (
        "attention=dynamic_hilbert",
        "~attention.tile_thw",
        "attention.tokens=128",
        "attention.allow_training=true",
    )
    with pytest.raises(ValueError, match=r"attention.tokens=128 makes one tile of the largest latents"):
        training(*FINETUNE[:2], f"init_from={dense}", *curve)


def test_no_start_is_refused(training, no_memory):
    with pytest.raises(ValueError, match="init_from=null, but finetuning starts from a checkpoint"):
        training(*FINETUNE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 2}, "has num_attention_heads=2, the model has 1"),
        ({"ffn_dim": 36}, "has ffn_dim=36, the model has 24"),
        ({"num_layers": 3}, "has num_layers=3, the model has 2"),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused(training, tmp_path, no_memory, changed, message):
    folder = make_pipeline(tmp_path / "wan", **changed)
    with pytest.raises(ValueError, match=message):
        training(*wan_like(), f"init_from={folder}")


def test_a_missing_or_renamed_tensor_is_refused(training, tmp_path, no_memory):
    from safetensors.torch import load_file, save_file

    folder = make_pipeline(tmp_path / "wan")
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    key = "blocks.1.attn1.to_k.weight"
    save_file({name: value for name, value in tensors.items() if name != key}, path)
    with pytest.raises(ValueError, match=f"lacks 1 tensors of the model: {key}"):
        training(*wan_like(), f"init_from={folder}")
    save_file({**tensors, "extra": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="has 1 tensors the model has no place for: extra"):
        training(*wan_like(), f"init_from={folder}")


def test_data_of_another_vae_are_refused(training, tmp_path, no_memory):
    folder = make_pipeline(tmp_path / "wan")
    make_vae().save_pretrained(folder / "vae")
    with pytest.raises(ValueError, match=r"has the VAE wan-vae-\S+ \(hash \w+\), data.codec is \S+ \(hash \w+\)"):
        training(*wan_like(), f"init_from={folder}")


@pytest.mark.parametrize("key", ["codec", "text_encoder"])
def test_a_run_of_other_encoders_is_refused(training, dense, tmp_path, no_memory, key):
    other = tmp_path / "other"
    shutil.copytree(dense, other)
    rewrite_state(training_checkpoint(other), **{key: {"id": "another", "hash": "0123"}})
    with pytest.raises(ValueError, match=rf"was trained with {key} another \(hash 0123\), data.{key} is "):
        training(*FINETUNE, f"init_from={other}")


def test_data_with_other_padding_are_refused(training, dense, no_memory):
    with pytest.raises(ValueError, match=r"has data.text_padding=mask, the data have zeros"):
        training(*FINETUNE, f"init_from={dense}", "+data.text_padding=zeros")


def test_gates_that_do_not_start_at_the_identity_are_refused(training, dense, no_memory):
    with pytest.raises(ValueError, match=r"gate_init=model of its attention"):
        training(*FINETUNE, f"init_from={dense}", "attention.gate_init=model")


def test_a_sparse_run_is_no_dense_start(training, no_memory, write_tiny_run, tmp_path):
    run = write_tiny_run(tmp_path / "sparse")
    config = training.config(*FINETUNE, *(f"model.{k}={v}" for k, v in TINY_RUN.items()))
    start = open_weights(run)
    with pytest.raises(ValueError, match=r"gates=initial takes a dense checkpoint, but .* has gates: blocks.0.to_gate"):
        start.check(make_meta(config), "initial")


def make_meta(config) -> VideoDiT:
    from vsa.config import model_factory

    with torch.device("meta"):
        return model_factory(config)()


def test_the_module_has_no_second_network():
    """A module that held the teacher as a submodule would save and optimise it."""
    module = FinetuneModule.__new__(FinetuneModule)
    L.LightningModule.__init__(module)
    module._teacher = Teacher(lambda: make_net(FullAttention), None)
    module._teacher.build(None, ParallelPlan(), None)
    assert len(list(module._teacher.network.parameters())) > 0
    assert list(module.parameters()) == []
    assert SimpleNamespace(**module.state_dict()) == SimpleNamespace()
