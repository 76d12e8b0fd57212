"""One device without sharding computes what FSDP2 of one rank does: bf16 over fp32 parameters, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.distillations import DISTILL, GAN, TOLD
from tests.training.ranks import run_ranks
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.wan_names import is_gate
from vsa.models.compute_dtype import compute_in, hold_rounded
from vsa.models.recompute import Level
from vsa.models.sharding import local, whole
from vsa.models.video_dit import VideoDiT
from vsa.training.parallel import ParallelPlan, build_model, every_parameter, parallelize

LEVELS = get_args(Level)
Result = tuple[list[Tensor], dict[str, Tensor]]


def make_model(layers: int = 3) -> VideoDiT:
    """Random everywhere: what starts at zero would hide what stands before it."""
    model = VideoDiT(
        attention=partial(VideoSparseAttention, tile_thw=(2, 2, 2), gate_init="model"),
        num_attention_heads=2,
        attention_head_dim=16,
        ffn_dim=48,
        num_layers=layers,
        text_dim=24,
        freq_dim=16,
    )
    for parameter in model.parameters():
        if not parameter.is_meta and not parameter.detach().any():
            nn.init.normal_(parameter, std=0.1)
    return model


def start(mesh: DeviceMesh | None = None, level: Level = "none") -> VideoDiT:
    plan = ParallelPlan(activation_checkpointing=level, compute_dtype="bfloat16")
    torch.manual_seed(0)
    model = build_model(make_model, mesh, plan, initialise=None if mesh else every_parameter)
    if mesh is not None:
        torch.manual_seed(0)
        values = dict(make_model().named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local(parameter).copy_(values[name])
    return model


def two_micro_batches(model: VideoDiT) -> Result:
    """Losses of two micro-batches, and the gradients of their sum."""
    generator = torch.Generator().manual_seed(1)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    losses = []
    for last in (False, True):
        x, target = (torch.randn(2, 16, 4, 8, 8, generator=generator) for _ in range(2))
        text = torch.randn(2, 5, 24, generator=generator)
        timestep = 1000 * torch.rand(2, generator=generator)
        for module in modules:
            module.set_requires_gradient_sync(last, recurse=False)
        loss = (model(x, timestep, text, topk=3).float() - target).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> dict[Level, Result]:
    """What FSDP2 of one rank gives, by level of activation checkpointing."""
    path = tmp_path_factory.mktemp("sharded") / "results"

    def on_rank(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (1,))
        results = {level: two_micro_batches(start(mesh, level)) for level in LEVELS}
        torch.save(results, path)

    run_ranks(1, on_rank)
    return torch.load(path)


def refuse_difference(result: Result, wanted: Result, *, text_embedder: float) -> None:
    """Raise AssertionError for other losses or gradients, but for so much in those of the text embedder."""
    assert all(torch.equal(a, b) for a, b in zip(result[0], wanted[0], strict=True))
    assert set(result[1]) == set(wanted[1])
    for name, value in wanted[1].items():
        assert result[1][name].dtype == value.dtype == torch.float32
        rest = (result[1][name] - value).abs().max() / value.abs().max()
        assert rest <= (text_embedder if "text_embedder" in name else 0), (name, rest)


# What the blocks send back to the text is summed in bf16: block by block where a compiled block or FSDP2 has summed its
# own two parts, and part by part otherwise.
ORDER = 0.01


@pytest.mark.parametrize("level", LEVELS)
def test_losses_and_gradients_are_those_of_one_rank(sharded, level):
    refuse_difference(two_micro_batches(start(level=level)), sharded[level], text_embedder=ORDER)


@pytest.mark.parametrize(
    "level", [level if level == "attention" else pytest.param(level, marks=pytest.mark.slow) for level in LEVELS]
)
def test_all_compiled_blocks_share_a_graph_that_rounds_in_itself(sharded, level):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs) -> Any:
        graphs.append([value.dtype for value in inputs if isinstance(value, nn.Parameter)])
        return aot_eager(graph, inputs)

    model = start(level=level)
    model.compile_blocks(backend=backend)  # type: ignore[arg-type] (a function works)
    refuse_difference(two_micro_batches(model), sharded[level], text_embedder=0)
    (parameters,) = graphs
    assert parameters == [torch.float32] * len(list(model.blocks[0].parameters()))
    torch._dynamo.reset()


def drop_rounding(model: VideoDiT) -> None:
    model.condition_embedder.time_proj.compute_dtype = None


@pytest.mark.parametrize("change", [lambda model: compute_in(model, None), drop_rounding], ids=["fp32", "one layer"])
def test_what_is_not_rounded_would_show(sharded, change):
    model = start()
    change(model)
    result = two_micro_batches(model)
    with pytest.raises(AssertionError):
        refuse_difference(result, sharded["none"], text_embedder=1)


def test_a_region_that_is_computed_again_keeps_no_rounded_parameter():
    counts: dict[Level, int] = {}
    for level in LEVELS:
        model = start(level=level)
        shapes = {tuple(p.shape) for p in model.blocks.parameters() if p.dim() == 2}
        shapes |= {shape[::-1] for shape in shapes}
        flags = []

        def note(value: Tensor, shapes=shapes, flags=flags) -> Tensor:
            flags.append(value.dtype == torch.bfloat16 and tuple(value.shape) in shapes)
            return value

        text, timestep = torch.randn(1, 5, 24), torch.tensor([500.0])
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            model(torch.randn(1, 16, 4, 8, 8), timestep, text, topk=3)
        counts[level] = sum(flags)
    # the text embedder and the head hold one each of such a shape
    assert counts["none"] > counts["attention"] > counts["attention_mlp"] == counts["full"] <= 2


def test_parameters_stay_what_they_are():
    torch.manual_seed(0)
    plain, model = make_model(), start()
    assert [(n, p.dtype, p.requires_grad) for n, p in model.named_parameters()] == [
        (n, p.dtype, p.requires_grad) for n, p in plain.named_parameters()
    ]
    compute_in(model, None)
    again, before = two_micro_batches(model), two_micro_batches(plain)
    assert all(torch.equal(a, b) for a, b in zip(again[0], before[0], strict=True))
    assert all(torch.equal(again[1][name], before[1][name]) for name in before[1])


def test_other_attention_computes_in_the_same_dtype():
    model = start()
    other = model.with_attention(partial(VideoSparseAttention, tile_thw=(2, 2, 2)))
    text, timestep = torch.randn(1, 5, 24), torch.tensor([500.0])
    assert other(torch.randn(1, 16, 4, 8, 8), timestep, text, topk=3).dtype == torch.bfloat16


def test_a_module_that_cannot_round_is_named():
    model = make_model()
    model.blocks[1].register_module("to_gate_compress", nn.Conv1d(2, 2, 1))
    with pytest.raises(ValueError, match=r"blocks\.1\.to_gate_compress \(Conv1d\) cannot compute in bfloat16 over"):
        compute_in(model, torch.bfloat16)
    compute_in(model, None)
    # held in that dtype, as FSDP2 gathers them, its parameters need no rounding
    hold_rounded(model.requires_grad_(False), torch.bfloat16)
    compute_in(model, torch.bfloat16)


def test_values_are_drawn_on_the_cpu_for_every_device():
    models: list[dict[str, Tensor]] = []

    def make() -> VideoDiT:
        model = make_model()
        models.append({name: p.detach() for name, p in model.named_parameters()})
        return model

    torch.manual_seed(3)
    expected, following = dict(make_model().named_parameters()), torch.rand(4)
    torch.manual_seed(3)
    # stands for any device that is not the CPU
    with torch.device("meta"):
        model = build_model(make, None, ParallelPlan())
        loaded_next = build_model(make, None, ParallelPlan(), initialise=None)
    assert torch.equal(torch.rand(4), following)
    assert all(torch.equal(models[0][name], p) for name, p in expected.items())
    assert all(p.is_meta for p in [*model.parameters(), *loaded_next.parameters()])
    # no value is drawn where all are loaded
    assert all(p.is_meta for p in models[1].values())


class _Drawn(TorchDispatchMode):
    """Counts random numbers."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not args[0].is_meta:
            self.total += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_nothing_is_drawn_for_parameters_that_are_loaded():
    def built(initialise: Callable[[str], bool]) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(3)
        with _Drawn() as drawn:
            model = build_model(make_model, None, ParallelPlan(), initialise=initialise)
        return {name: p.detach() for name, p in model.named_parameters() if initialise(name)}, drawn.total

    def fresh(name: str) -> bool:
        return "ffn" in name

    values, number = built(fresh)
    assert number == sum(p.numel() for name, p in values.items() if name.endswith("weight"))
    assert all(p.any() == name.endswith("weight") for name, p in values.items())
    again, _ = built(fresh)
    assert all(torch.equal(p, again[name]) for name, p in values.items())
    # a control
    whole_model, most = built(every_parameter)
    assert most > number
    assert whole_model.keys() > values.keys()


# runs

BF16 = "task.parallel.compute_dtype=bfloat16"
SHARDED = ("trainer=fsdp", "trainer.accelerator=cpu")
COMMON = (
    BF16,
    "callbacks.throughput=null",
    "callbacks.checkpoint.every_n_steps=1",
    "trainer.max_steps=2",
)
LORA = "+task.lora={_target_:vsa.checkpoints.lora.LoRA,rank:2,alpha:2}"


def settings_of(teacher: Path) -> dict[str, tuple[str, ...]]:
    """Settings of a run by its task."""
    start = f"init_from={teacher}"
    matching = ("task.objective.velocity=0.5", "task.objective.attention=0.5")
    return {
        "pretrain": (*COMMON, "trainer.accumulate_grad_batches=2"),
        "finetune": ("task=finetune", "start=dense", start, LORA, *matching, *COMMON),
        "distill": (*DISTILL, start, GAN, TOLD, "task.objective.velocity=0.5", *COMMON),
    }


def resumed(training, settings: tuple[str, ...], source: str) -> tuple[str, ...]:
    """The settings of a run that goes on from the first checkpoint of another one."""
    checkpoint = training.folder(source) / "checkpoints" / "step-00000001"
    return (*(s for s in settings if not s.startswith("init_from=")), f"ckpt_path={checkpoint}")


class Networks(L.Callback):
    """What the networks of a run compute in."""

    def on_train_start(self, trainer, pl_module):
        teacher = getattr(pl_module, "_teacher", None) or getattr(pl_module, "teacher", None)
        critic = getattr(pl_module, "fake_score", None)
        networks = [pl_module.model, teacher and teacher.network, critic and critic.network]
        self.dtypes = [network.compute_dtype for network in networks if network is not None]


@pytest.mark.slow
def test_runs_are_those_of_one_rank(training, teacher_dir):
    by_task = settings_of(teacher_dir)

    def on_rank(rank: int) -> None:
        for task, settings in by_task.items():
            training(*settings, *SHARDED, f"run={task}_sharded")

    run_ranks(1, on_rank)
    for task, settings in by_task.items():
        networks = Networks()
        training(*settings, f"run={task}", callbacks=(networks,))
        assert networks.dtypes == [torch.bfloat16] * {"pretrain": 1, "finetune": 2, "distill": 3}[task]
        sharded, plain = (training.metrics(run) for run in (f"{task}_sharded", task))
        # of an iteration of distillation the first update: the other one sees what it has changed
        loss = "dmd/gap" if task == "distill" else "train/loss"
        assert sharded[1][loss] == plain[1][loss] != "", task
        for name in ("fake_score/loss",) if task == "distill" else ("train/loss", "val/loss"):
            assert float(plain[2][name]) == pytest.approx(float(sharded[2][name]), rel=1e-3), (task, name)
        a, b = (training.tensors(run) for run in (f"{task}_sharded", task))
        assert {name: value.dtype for name, value in a.items()} == {name: value.dtype for name, value in b.items()}
        if task == "finetune":
            # adapters and gates alone are trained: nothing that is summed in another order
            assert all(torch.equal(a[name], b[name]) for name in a)
    # either goes on from the other's checkpoint, with its loss
    pretrain = by_task["pretrain"]
    training(*resumed(training, pretrain, "pretrain_sharded"), "run=from_sharded")
    run_ranks(1, lambda rank: training(*resumed(training, pretrain, "pretrain"), *SHARDED, "run=to_sharded") and None)
    losses = {run: training.losses(run)[2] for run in ("pretrain", "pretrain_sharded", "from_sharded", "to_sharded")}
    assert losses["from_sharded"] == losses["pretrain_sharded"]
    assert losses["to_sharded"] == losses["pretrain"]
    # control: fp32 has another one
    training(*resumed(training, pretrain, "pretrain"), "task.parallel.compute_dtype=float32", "run=fp32")
    assert training.losses("fp32")[2] not in losses.values()


def test_frozen_weights_rounded_once_give_the_same_run(training, teacher_dir, caplog):
    settings = settings_of(teacher_dir)["finetune"]
    rounded = "task.parallel.frozen=rounded"
    caplog.set_level("INFO")
    training(*settings, "run=fp32")
    training(*settings, rounded, "run=rounded")
    nothing = "note: task.parallel.frozen=rounded changes nothing, as this run trains every weight"
    assert nothing not in caplog.text
    training(*settings_of(teacher_dir)["pretrain"], rounded, "run=nothing_frozen")
    assert nothing in caplog.text
    assert training.losses("rounded") == training.losses("fp32")
    a, b = (
        {name.removeprefix("model/"): x for name, x in training.tensors(run).items() if name.startswith("model/")}
        for run in ("fp32", "rounded")
    )
    held = {name for name in b if b[name].dtype == torch.bfloat16}
    assert {name for name in a if not (".lora_" in name or is_gate(name))} == held
    assert all(torch.equal(a[name].to(b[name].dtype), b[name]) for name in a)
    # a resumed run, also with the other form
    for form in ("rounded", "float32"):
        training(*resumed(training, settings, "rounded"), f"task.parallel.frozen={form}", f"run=onward_{form}")
        assert training.losses(f"onward_{form}")[2] == training.losses("fp32")[2]
    plan = ParallelPlan(frozen="rounded")
    with pytest.raises(ValueError, match=r"task\.parallel\.frozen=rounded is for one device without FSDP2"):
        parallelize(make_model(), object(), plan, "cpu")  # type: ignore[arg-type] (any mesh)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["finetune", "distill"])
def test_other_tasks_go_on_from_a_sharded_checkpoint(training, teacher_dir, task):
    settings = settings_of(teacher_dir)[task]
    run_ranks(1, lambda rank: training(*settings, *SHARDED, "run=sharded") and None)
    training(*resumed(training, settings, "sharded"), "run=onward")
    loss = "fake_score/loss" if task == "distill" else "train/loss"
    assert training.metrics("onward")[2][loss] == training.metrics("sharded")[2][loss] != ""
