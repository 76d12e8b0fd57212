"""Estimates of memory and time: against tensors that blocks really keep, and against measured steps."""

from __future__ import annotations

import re
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vsa_kernels.coarse_fine import op, triton_op

import vsa.training.budgets as budgets
import vsa.training.train as run_module
from benchmarks.estimates import Comparison, comparisons
from tests.tiny_runs import composed
from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.wan_names import is_gate
from vsa.data.parallel_dims import ParallelDims
from vsa.models.blocks import TransformerBlock
from vsa.models.init import without_memory
from vsa.models.recompute import LEVELS
from vsa.models.video_dit import VideoDiT
from vsa.training.estimate.block import BlockShape, kept_bytes, turn_bytes
from vsa.training.estimate.gpus import GIB, GPUS, known_gpu
from vsa.training.estimate.job import TRAINING, Job, PlannedNetwork
from vsa.training.estimate.predict import fitting, host_bytes, memory, step_seconds, total_memory, whole_memory
from vsa.training.estimate.run import Estimate, _visible
from vsa.training.train import check_run

ROOT = Path(__file__).parents[2]
TOLERANCE = {False: 0.03, True: 0.1}
"""Of kept bytes, eager and compiled: there a compiler decides what is kept and what is computed again."""

# name, samples, token grid, text tokens, heads, head dim, ffn
SMALL = (2, (4, 8, 8), 16, 2, 32, 256)
ODD = (1, (3, 7, 10), 9, 3, 22, 150)


def _network(size: tuple[Any, ...], attention: Any) -> VideoDiT:
    _, _, _, heads, head_dim, ffn_dim = size
    model = VideoDiT(
        attention=attention,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        ffn_dim=ffn_dim,
        num_layers=2,
        text_dim=24,
    )
    return model.to(torch.bfloat16)


def _job(model: VideoDiT, size: tuple[Any, ...], **settings: Any) -> Job:
    samples, (t, h, w), text, *_ = size
    network = PlannedNetwork(name="model", model=model, passes={TRAINING: 1.0}, updates=1.0)
    return Job(
        networks=[network],
        latent_shape=(16, t, 2 * h, 2 * w),
        text=text,
        topk=KeptTiles.of(4),
        batch=samples,
        **settings,
    )


def _kept(model: VideoDiT, job: Job, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of the storages that the second block leaves to its backward, without what was there before it."""
    model.activation_checkpointing = job.level
    if job.compiled:
        model.compile_blocks(backend="aot_eager_decomp_partition")
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    forward = TransformerBlock.forward

    def spy(self: TransformerBlock, x: Any, cond: Any, ctx: Any) -> torch.Tensor:
        if self is not model.blocks[1]:
            return forward(self, x, cond, ctx)
        shared = parameters | {t.untyped_storage()._cdata for t in (cond.modulation, *cond.rope, cond.text)}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in shared:
                # the tensor too, so that its storage is no other one's later
                storages[storage._cdata] = storage.nbytes(), tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(self, x, cond, ctx)

    latents = torch.randn(job.batch, *job.latent_shape, dtype=torch.bfloat16)
    text = torch.randn(job.batch, job.text, 24, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(TransformerBlock, "forward", spy)
        model(latents, torch.full((job.batch,), 500.0), text, topk=job.topk)
    return sum(size for size, _ in storages.values())


@pytest.fixture
def any_operator(monkeypatch):
    """The operator's outputs without their values, on a CPU in bf16."""
    monkeypatch.setattr(triton_op, "forward", lambda call: tuple(torch.zeros_like(t) for t in op._outputs_like(*call)))
    monkeypatch.setattr("vsa_kernels.coarse_fine.api.resolve_backend", lambda *args: "triton")


SPARSE = {gates: partial(VideoSparseAttention, tile_thw=(2, 2, 2), fine_gate=gates == 2) for gates in (1, 2)}


def _shape(job: Job) -> BlockShape:
    # a CPU has no RMSNorm of one kernel
    return replace(_block(job), fused_norms=False)


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
@pytest.mark.parametrize("size", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("attention", [FullAttention, *SPARSE.values()], ids=["dense", "one-gate", "two-gates"])
def test_what_an_eager_block_keeps(attention, size, monkeypatch, any_operator):
    model = _network(size, attention)
    job = _job(model, size, level="none")
    shape, expected = _shape(job), _kept(model, job, monkeypatch)
    assert kept_bytes(shape, "none") == pytest.approx(expected, rel=TOLERANCE[False])
    # another kind of norm, one gate less, and a narrower layer are noticed
    others = [replace(shape, fused_norms=True), replace(shape, ffn_dim=shape.ffn_dim // 2)]
    others += [replace(shape, gates=shape.gates - 2)] if shape.gates == 2 else []
    for other in others:
        assert kept_bytes(other, "none") != pytest.approx(expected, rel=TOLERANCE[False])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "level"),
    [
        (FullAttention, "none"),
        (SPARSE[1], "attention"),
        (SPARSE[1], "none"),
        (SPARSE[2], "none"),
        (SPARSE[1], "attention_mlp"),
        (FullAttention, "attention"),
    ],
)
def test_what_a_compiled_block_keeps(attention, level, monkeypatch, any_operator):
    model = _network(SMALL, attention)
    job = _job(model, SMALL, level=level, compiled=True)
    shape, expected = _shape(job), _kept(model, job, monkeypatch)
    assert kept_bytes(shape, level) == pytest.approx(expected, rel=TOLERANCE[True])
    for other in set(LEVELS) - {level}:
        assert kept_bytes(shape, other) != pytest.approx(expected, rel=TOLERANCE[True])
    if level == "none":
        assert kept_bytes(replace(shape, compiled=False), level) != pytest.approx(expected, rel=TOLERANCE[True])


def test_full_recomputation_keeps_the_input_alone(monkeypatch):
    model = _network(ODD, FullAttention)
    job = _job(model, ODD, level="full")
    assert _kept(model, job, monkeypatch) == kept_bytes(_shape(job), "full")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("gates", [0, 2])
def test_levels_trade_memory_for_time(compiled, gates):
    job = _wan(gates=gates, compiled=compiled)
    totals = [total_memory(replace(job, level=level)) for level in LEVELS]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 2 * totals[-1]
    seconds = [sum(step_seconds(replace(job, level=level), H200).values()) for level in LEVELS]
    assert seconds == sorted(seconds)
    assert seconds[0] < 0.9 * seconds[-1]
    # nothing is computed again: the level's own part of a turn is gradients
    assert turn_bytes(_block(job), "none") < 0.5 * turn_bytes(_block(job), "full")


def test_the_workspace_of_tiles_of_128_belongs_to_the_backward_of_a_block():
    """ds of each pair of tiles that a query tile keeps, 128 x 128 numbers of 2 bytes, in every head."""
    attention = partial(VideoSparseAttention, tile_thw=(4, 4, 8))
    size = (1, (16, 32, 32), 16, 3, 128, 256)
    job = replace(_job(_network(size, attention), size), topk=KeptTiles.of(20))
    kept = 128 * 20 * 128 * 128 * 2 * 3
    on_hopper = replace(job, chip=(9, 0))
    assert _block(on_hopper).workspace == kept
    assert turn_bytes(_block(on_hopper), "none") > turn_bytes(_block(job), "none") + 0.8 * kept
    for other in (job, replace(job, chip=(8, 0)), replace(on_hopper, topk=KeptTiles.of(128))):
        assert _block(other).workspace == 0
    small = _network(size, VideoSparseAttention)
    assert _block(replace(_job(small, size), topk=KeptTiles.of(20), chip=(9, 0))).workspace == 0


def _block(job: Job) -> BlockShape:
    (shape,) = job.blocks(job.networks[0])
    return shape


H200 = GPUS[0]


def _wan(*, gates: int = 1, frozen: bool = False, **settings: Any) -> Job:
    """Wan-1.3B on clips of 61 frames."""
    attention = partial(VideoSparseAttention, fine_gate=gates == 2) if gates else FullAttention
    with without_memory():
        model = VideoDiT(
            attention=attention,
            num_attention_heads=12,
            attention_head_dim=128,
            ffn_dim=8960,
            num_layers=30,
            text_dim=4096,
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or is_gate(name))
    network = PlannedNetwork(name="model", model=model, passes={TRAINING: 1.0}, updates=1.0)
    arguments = {"latent_shape": (16, 16, 56, 104), "text": 512, "topk": KeptTiles.of(32), "batch": 1} | settings
    return Job(networks=[network], **arguments)


def test_state_is_what_the_parameters_say():
    job = _wan()
    count = sum(p.numel() for p in job.networks[0].model.parameters())
    whole, quarter = memory(job), memory(replace(job, dims=ParallelDims(shard=4)))
    for name, bytes_ in (("parameters", 4), ("optimizer moments", 8), ("averaged weights", 4)):
        assert whole[name] == bytes_ * count
        assert quarter[name] == bytes_ * count / 4
    # frozen weights may be held in half of that
    rounded = memory(_wan(frozen=True, sharded=False, frozen_rounded=True))
    gates = sum(p.numel() for name, p in job.networks[0].model.named_parameters() if is_gate(name))
    assert rounded["parameters"] == 4 * gates + 2 * (count - gates)
    assert rounded["parameters in bf16"] == 2 * gates
    # sums over micro-batches are whole unless each one is reduced
    summed = memory(replace(job, dims=ParallelDims(shard=4), micro_batches=2, level="full"))
    assert summed["gradients"] == 4 * count
    reduced = memory(replace(job, dims=ParallelDims(shard=4), micro_batches=2, level="full", reduce_each=True))
    assert sum(reduced.values()) < sum(summed.values())
    # what the host holds is not on the GPU, and gradients pass through it by blocks
    split = replace(job, dims=ParallelDims(shard=4), level="full")
    host = replace(split, offloaded=True)
    assert host_bytes(host) == 20 * count / 4
    assert host_bytes(split) == 0
    assert memory(host).keys().isdisjoint({"parameters", "optimizer moments", "averaged weights"})
    assert total_memory(split) - total_memory(host) > 12 * count / 4
    assert 0 < memory(host)["gradients"] < 4 * count / 4


def test_the_largest_micro_batch_is_the_largest():
    job = _wan(compiled=True)
    most = fitting(job, H200.memory)
    assert list(most) == list(LEVELS)
    assert sorted(most.values()) == list(most.values())
    assert most["full"] > 1
    for level, batch in most.items():
        fits = [total_memory(replace(job, level=level, batch=batch + more)) <= H200.memory for more in (0, 1)]
        assert fits == [True, False] or batch == 0


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        ({"batch": 4}, 80.0),
        ({"batch": 64, "level": "full"}, 80.0),
        ({"level": "full"}, 27.0),
        ({}, 30.0),
        ({"batch": 3}, 30.0),
        ({}, 24.0),
        ({"batch": 3}, 20.0),
        ({"frozen": True, "level": "full", "sharded": False}, 16.0),
    ],
    ids=[
        *("level", "micro-batches", "moments", "moments, level", "moments, micro-batches", "more GPUs", "one sample"),
        "rounded",
    ],
)
def test_the_advice_fits(settings, gib, request):
    gpu = replace(H200, memory=gib * GIB)
    job = _wan(**settings)
    estimate = Estimate(gpu=gpu, jobs=lambda step: [(1.0, job)], steps=10)
    assert not estimate.fits
    line = estimate.refusal()
    assert line is not None
    assert line.startswith(f"it needs {estimate.needed / GIB:.1f} GiB of the {gib:.1f}")
    assert f", {(estimate.needed / GIB - gib):.1f} too many (" in line
    _assert_parts_add_up(line)
    advice = dict(word.split("=") for word in line.rpartition(": ")[2].split() if "=" in word)
    level: Any = advice.get("task.parallel.activation_checkpointing", job.level)
    micro_batches = int(advice.get("trainer.accumulate_grad_batches", 1))
    count = int(advice.get("trainer.devices", 1))
    batch = job.batch // micro_batches if count == 1 else 1
    networks = [replace(job.networks[0], moments=advice.get("optim.moments", "fp32"))]
    assert ("moments" in request.node.callspec.id) == (networks[0].moments == "int8")
    assert ("rounded" in request.node.callspec.id) == ("task.parallel.frozen" in advice)
    dims = ParallelDims(shard=count)
    advised_job = replace(job, level=level, micro_batches=micro_batches, batch=batch, dims=dims, networks=networks)
    advised_job = replace(advised_job, frozen_rounded="task.parallel.frozen" in advice)
    assert total_memory(advised_job) <= gpu.memory


def _assert_parts_add_up(line: str) -> None:
    """The parts of a refusal, each rounded to a tenth, are the memory that it names."""
    match = re.match(r"it needs ([\d.]+) GiB .*? \((.*)\): ", line)
    assert match is not None
    parts = [float(value) for value in re.findall(r" ([\d.]+)(?:,|$)", match[2])]
    assert sum(parts) == pytest.approx(float(match[1]), abs=0.05 * (len(parts) + 1))


def test_a_refusal_names_every_part_of_the_memory():
    # two parts below a twentieth of a GiB, which are visible together only, and a large one
    small = _job(_network(SMALL, FullAttention), SMALL)
    parts = {"one": 0.04 * GIB, "two": 0.04 * GIB, "three": 3 * GIB}
    assert _visible(parts, GIB) == {"three": 3 * GIB, "the rest": 0.08 * GIB}
    assert _visible({"one": 0.04 * GIB, "three": 3 * GIB}, GIB) == {"three": 3 * GIB}
    assert sum(whole_memory(small).values()) == total_memory(small)
    wan = _wan()
    line = Estimate(gpu=replace(H200, memory=GIB), jobs=lambda step: [(1.0, wan)], steps=1).refusal()
    assert line is not None
    _assert_parts_add_up(line)
    with pytest.raises(AssertionError):
        _assert_parts_add_up(re.sub(r", assumed context and allocator [\d.]+", "", line))


def test_time_follows_the_work():
    job = _wan(compiled=True, level="full")
    one, two = (step_seconds(replace(job, batch=n), H200) for n in (1, 2))
    for name in ("linear layers", "attention", "attention to text", "elementwise and norms"):
        assert two[name] == pytest.approx(2 * one[name])
    for name in ("optimizer", "copies of parameters"):
        assert two[name] == one[name]
    # FLOPs of the fine and coarse stage at the operator's rate, twice forward
    count = job.networks[0].model.flops(job.latent_shape, 32, 512)
    forward = count.self_attention / 3.5
    assert H200.operator_flops is not None
    rate = H200.operator_flops[128]
    assert one["attention"] == pytest.approx(forward / rate.forward + count.self_attention / rate.both)
    linear = count.executed - count.self_attention - 3.5 * 4 * 1536 * 23296 * 512 * 30
    # the blocks, which are nearly all of it, run forward twice
    linear = count.executed - count.self_attention - 3.5 * 4 * 1536 * 23296 * 512 * 30
    # the blocks, which are nearly all of it, run forward twice
    assert one["linear layers"] * 715e12 == pytest.approx(4 / 3 * linear, rel=0.01)
    eager = step_seconds(replace(job, compiled=False), H200)
    assert eager["elementwise and norms"] > 2 * one["elementwise and norms"]
    unsharded = step_seconds(replace(job, sharded=False), H200)
    # rounded twice forward, gradients once back: 6 bytes each
    assert unsharded["copies of parameters"] == pytest.approx(18 * job.networks[0].parameters / H200.copy_bytes)
    assert unsharded["copies of parameters"] < one["copies of parameters"]


def test_a_rate_is_needed_for_a_time():
    job = _wan()
    with pytest.raises(ValueError, match="H100 has no measured matrix_flops, copy_bytes, dense_flops"):
        step_seconds(job, GPUS[1])
    assert known_gpu("NVIDIA H100 80GB HBM3") is GPUS[1]
    assert known_gpu("nvidia h200") is H200
    assert known_gpu("GT 710") is None
    measured = set()
    for archive in (ROOT / "benchmarks" / "raw").glob("*.tar.xz"):
        with tarfile.open(archive) as files:
            measured |= {Path(name).stem for name in files.getnames()}
    for gpu in GPUS:
        rates = {name for name in gpu.sources if getattr(gpu, name) is not None}
        assert rates == set(gpu.sources)
        assert len(gpu.lacks) + len(rates) == 7
        for source in gpu.sources.values():
            assert source.replace(" ", ",").partition(",")[0] in measured


@pytest.fixture(scope="module")
def rows() -> list[Comparison]:
    return comparisons()


@pytest.mark.slow
def test_the_compared_steps_are_in_the_docs(rows):
    page = (ROOT / "docs" / "benchmarks" / "how-fast.md").read_text()
    missing = [row.row() for row in rows if row.row() not in page]
    assert missing == []
    assert {row.calibrates for row in rows} == {True, False}


@pytest.mark.parametrize("part", ["memory", "time of Wan-1.3B"])
def test_estimates_are_near_measurements(part, rows):
    if part == "memory":
        errors = [row.memory_error for row in rows if row.memory_error is not None]
        assert len(errors) == len(rows)
        assert max(map(abs, errors)) < 0.05
        # an estimate without the fp32 copies of eager blocks would be noticed
        eager = next(row for row in rows if row.what.startswith("22M"))
        wrong = replace(eager, job=replace(eager.job, compiled=True)).memory_error
        assert wrong is not None
        assert abs(wrong) > 0.05
        # and one with the parameters that FSDP2 gathers, where there is no FSDP2
        alone = [row for row in rows if not row.job.sharded]
        assert max(abs(row.memory_error or 1) for row in alone) < 0.02
        kept = next(row for row in alone if row.job.level == "none")
        wrong = replace(kept, job=replace(kept.job, sharded=True)).memory_error
        assert wrong is not None
        assert abs(wrong) > 0.03
        # and temporaries of AdamW, which is fused now, where they would be the peak
        distillation = next(row for row in alone if "distillation" in row.what)
        wrong = replace(distillation, job=replace(distillation.job, fused=False)).memory_error
        assert wrong is not None
        assert wrong > 0.05
        return
    errors = [row.time_error for row in rows if "Wan-1.3B" in row.what]
    assert len(errors) == 15
    assert max(map(abs, errors)) < 0.15
    full = next(row for row in rows if row.what.startswith("Wan-1.3B"))
    assert abs(replace(full, job=replace(full.job, level="none")).time_error) > 0.15


def _here(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    """Lets a CPU be an H200 to those who ask for its kind."""
    for place in ("vsa.training.train", "vsa.training.callbacks.print_estimate"):
        monkeypatch.setattr(f"{place}.gpu_here", lambda device: replace(H200, memory=gib * GIB))


def test_a_run_says_what_it_takes_and_a_dry_run_stops_there(training, monkeypatch, capsys, caplog):
    caplog.set_level("INFO")
    training("dry_run=true")
    assert "no estimate for a CPU: vsa plan --gpu KIND makes one" in caplog.text
    _here(monkeypatch, 20.0)
    training("dry_run=true")
    table = capsys.readouterr().out
    assert "memory of a GPU" in table
    assert "time of a step" in table
    assert "the same with dense attention" in table
    assert not training.folder().exists()
    with pytest.raises(ValueError, match="dry_run=true applies to a new run only, got ckpt_path=last"):
        training("dry_run=true", "ckpt_path=last")
    _here(monkeypatch, 0.5)
    with pytest.raises(ValueError, match=r"it needs 0\.8 GiB of the 0\.5 of one H200"):
        training("dry_run=true")
    assert not training.folder().exists()
    caplog.clear()
    # a run is not stopped by an estimate
    training("trainer.max_steps=1")
    line, warning = [text for text in caplog.messages if "estimate" in text]
    assert line.startswith("estimate: 0.8 of 0.5 GiB of each H200")
    assert line.endswith("GPU-hours for 1 step")
    assert warning.startswith("warning: by the estimate it needs 0.8 GiB")


def test_the_steps_of_a_budget_are_those_of_the_run(training, monkeypatch, capsys, caplog):
    """An annealed run has fewer steps than its budget is worth at the last sparsity."""
    _here(monkeypatch, 20.0)
    annealed = (
        *("sparsity=linear", "sparsity.topk=1", "~sparsity.sparsity", "sparsity.dense_steps=0"),
        "sparsity.total_steps=${trainer.max_steps}",
    )
    training("run=known", *annealed, "trainer.max_steps=12")
    last = [float(row["throughput/flops_total"]) for row in training.metrics("known").values()][-2:]
    budget = f"flop_budget={last[-1] * 1.03}"
    assert round(last[-1] * 1.03 / (last[-1] - last[-2])) > 12
    caplog.set_level("INFO")
    caplog.clear()
    assert training(*annealed, budget).max_steps == 12
    (line,) = [text for text in caplog.messages if text.startswith("estimate")]
    assert line.endswith("GPU-hours for 12 steps")
    capsys.readouterr()
    caplog.clear()
    training("run=dry", *annealed, budget, "dry_run=true")
    assert "the run: 12 steps, " in capsys.readouterr().out
    assert len([text for text in caplog.messages if text.startswith("flop_budget=")]) == 1


def test_the_steps_of_a_budget_of_seconds_are_known_once_it_is_measured(training, monkeypatch, capsys, caplog):
    _here(monkeypatch, 20.0)
    measure = run_module._step_seconds
    monkeypatch.setattr(run_module, "_step_seconds", lambda cfg, step: measure(cfg, step) and 0.5)
    for module in (budgets, run_module):
        monkeypatch.setattr(module, "WARM_UP_STEPS", 1)
        monkeypatch.setattr(module, "MEASURED_STEPS", 1)
    caplog.set_level("INFO")
    training("second_budget=1.6", "dry_run=true")
    assert "the run: " not in capsys.readouterr().out
    assert training("second_budget=1.6").max_steps == 3
    trial, line = [text for text in caplog.messages if text.startswith("estimate")]
    assert trial.endswith(" s a step")
    assert line == f"{trial}, {line.rpartition(', ')[2]}"
    assert line.endswith(" GPU-hours for 3 steps")


def test_a_sweep_refuses_a_dry_run():
    cfg = composed(("dry_run=true",))
    with pytest.raises(ValueError, match="dry_run=true applies to single runs: a sweep checks all its runs"):
        check_run(cfg, {})
