"""A sharded network and its files without a copy of the whole: how it starts, what it holds, how it is written."""

from __future__ import annotations

import hashlib
import weakref
from functools import partialmethod
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from safetensors.torch import save_file as library_save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import vsa.checkpoints.run_checkpoint as checkpointing
from tests.training.ranks import run_ranks
from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.tensor_parts import own_parts
from vsa.checkpoints.wan import export_pretrained
from vsa.config import model_factory
from vsa.models.init import without_memory
from vsa.models.sharding import local, whole
from vsa.models.video_dit import VideoDiT
from vsa.training.parallel import ParallelPlan, build_model, parallelize

MARK = "weights are loaded"


def make_model(init: str, *, heads: int = 2, layers: int = 2, dense: bool = False) -> VideoDiT:
    def attention(**sizes):
        return FullAttention(**sizes) if dense else VideoSparseAttention(**sizes, tile_thw=(2, 2, 2))

    return VideoDiT(
        attention=attention,
        num_attention_heads=heads,
        attention_head_dim=16,
        ffn_dim=64 * heads,
        num_layers=layers,
        text_dim=24,
        freq_dim=16,
        init=init,
    )


@pytest.mark.parametrize("init", ["gpt_neox", "wan"])
def test_sharded_weights_start_as_unsharded_ones(init):
    torch.manual_seed(3)
    expected = dict(make_model(init).named_parameters())
    state = torch.get_rng_state()
    following = torch.rand(4)

    def some(mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
        """The parameters that are not loaded, where most are."""
        torch.manual_seed(3)
        model = build_model(lambda: make_model(init), mesh, ParallelPlan(), initialise=lambda name: "ffn" in name)
        return {name: whole(p) for name, p in model.named_parameters() if "ffn" in name}

    fresh = some()

    def on_rank(rank: int) -> tuple[dict[str, float], bool, float]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(3)
        model = build_model(lambda: make_model(init), mesh, ParallelPlan())
        same_state = torch.equal(torch.get_rng_state(), state) and torch.equal(torch.rand(4), following)
        parameters = dict(model.named_parameters())
        assert all(isinstance(p, DTensor) and p.requires_grad for p in parameters.values())
        assert all(torch.equal(p, fresh[name]) for name, p in some(mesh).items())
        share = sum(local(p).numel() for p in parameters.values()) / sum(p.numel() for p in expected.values())
        return (
            {n: (whole(p) - expected[n]).abs().max().item() for n, p in parameters.items()},
            same_state,
            share,
        )

    for differences, same_state, share in run_ranks(2, on_rank):
        assert set(differences) == set(expected)
        assert not any(differences.values())
        assert same_state
        # tables have one row, which the first rank holds
        assert 0.4 < share < 0.6
    # control: another draw
    torch.manual_seed(4)
    assert any(not torch.equal(p, expected[n]) for n, p in make_model(init).named_parameters())


def peaks_of(function, folder: Path | None = None) -> list[int]:
    """The most bytes of tensors that a function holds at once, as the allocator counts them, up to every `MARK`.

    The maps of files below `folder`, which it counts with their whole size, are left out.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    maps = {path.stat().st_size for path in folder.rglob("*.safetensors")} if folder is not None else set()
    peaks, held = [0], 0
    for event in sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]" and abs(event.nbytes()) not in maps:
            held += event.nbytes()
            peaks[-1] = max(peaks[-1], held)
        elif event.name() == MARK:
            peaks.append(0)
    return peaks


class Mark(L.Callback):
    """Begins the next part of `peaks_of` when weights and moments are loaded."""

    def on_train_start(self, trainer, pl_module):
        with record_function(MARK):
            pass


def test_no_rank_ever_holds_the_whole_model():
    def build() -> VideoDiT:
        return make_model("wan", heads=32, layers=6, dense=True)

    def peak_of(function) -> int:
        return max(peaks_of(function))

    def on_rank(rank: int) -> int:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        return peak_of(lambda: build_model(build, mesh, ParallelPlan()))

    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in build().parameters())
    assert max(run_ranks(2, on_rank)) < 0.75 * size
    # control: a whole model is above that bar
    assert run_ranks(1, lambda rank: peak_of(build))[0] >= size


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_a_run_never_holds_the_whole_model_on_a_rank(training, offload):
    """From weights in several files over a step, a save and a resume; moments come with the first step."""
    shape = ("model.num_attention_heads=8", "model.attention_head_dim=24", "model.ffn_dim=768", "model.num_layers=10")
    common = (
        *shape,
        "model.absolute_positions=false",
        "callbacks.ema=null",
        "callbacks.throughput=null",
        "data.val_fraction=0",
    )
    common += ("task.parallel.activation_checkpointing=full", "callbacks.checkpoint.every_n_steps=1")
    dense = model_factory(training.config(*common, "attention=full", "~attention.tile_thw"))()
    folder = export_pretrained(dense, training.output / "dense", sparse=None, max_shard_bytes=2**22)
    assert (folder / "diffusion_pytorch_model.safetensors.index.json").exists()
    common += ("task=finetune", "start=dense", f"init_from={folder}")

    def peaks(ranks: int, *settings: str) -> list[list[int]]:
        """Of each rank, of its start, of its first step and save, and the same of a resume."""

        def run(*more: str) -> list[list[int]]:
            words = (*common, *settings, *more)
            return run_ranks(ranks, lambda _: peaks_of(lambda: training(*words, callbacks=(Mark(),)), training.output))

        begun, resumed = run("trainer.max_steps=1"), run("trainer.max_steps=2", "ckpt_path=last")
        return [[*first, *second] for first, second in zip(begun, resumed, strict=True)]

    sharding = ("trainer=fsdp", "trainer.accelerator=cpu", f"task.parallel.offload={str(offload).lower()}")
    ranks, (one,) = peaks(2, *sharding, "run=ranks"), peaks(1, "run=one")
    with without_memory():
        model = model_factory(training.config(*common))()
    size = 4 * sum(p.numel() for p in model.parameters())
    # weights, then their gradients and moments; a half of each, beside it what is read or gathered at once
    tensor = 4 * max(p.numel() for p in model.parameters())
    bars = (0.5 * size + 3 * tensor, 2.75 * size, 1.5 * size + 3 * tensor, 2.75 * size)
    for own in ranks:
        assert all(peak < bar for peak, bar in zip(own, bars, strict=True)), (own, bars)
    # control: one process is above each bar
    assert all(peak > bar for peak, bar in zip(one, bars, strict=True)), (one, bars)


@pytest.mark.slow
def test_sharded_blocks_share_their_compiled_graphs(monkeypatch):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(VideoDiT, "compile_blocks", partialmethod(VideoDiT.compile_blocks, backend=backend))

    def on_rank(rank: int) -> list[int]:
        dist.init_process_group("gloo")
        model = make_model("wan", layers=3)
        parallelize(model, init_device_mesh("cpu", (1,)), ParallelPlan(compile=True), "cpu")
        assert all(isinstance(block, FSDPModule) for block in model.blocks)
        counts = []
        # 12 and 8 tiles
        for grid, topk in (((4, 8, 12), 4), ((4, 8, 12), 3), ((4, 8, 12), 7), ((4, 8, 8), 3), ((4, 8, 8), 5)):
            latents, text = torch.randn(1, 16, *grid), torch.randn(1, 5, 24)
            model(latents, torch.tensor([500.0]), text, topk=topk).square().mean().backward()
            counts.append(len(graphs))
        # the control: the counter sees a graph of its own for one layer
        model.blocks[2].norm1.eps = 1e-5
        model(latents, torch.tensor([500.0]), text, topk=5)
        return [*counts, len(graphs)]

    torch._dynamo.reset()
    # one for all layers; another top-k makes it a symbol, another shape the sizes
    assert run_ranks(1, on_rank) == [[1, 2, 2, 3, 3, 4]]


def test_the_streaming_writer_makes_the_file_of_the_library(tmp_path):
    generator = torch.Generator().manual_seed(0)
    group = {
        "b": torch.randn(3, 5, generator=generator),
        "ä/step": torch.tensor(7.0),
        "a": torch.randn(4, 2, generator=generator).t(),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "count": torch.arange(3),
        "none": torch.empty(0, 4),
    }
    alive: list[weakref.ref] = []
    largest = 0

    class OnDevice(torch.Tensor):
        """Its values are copied when they go to the CPU."""

        def cpu(self):
            nonlocal largest
            value = self.as_subclass(torch.Tensor).clone()
            largest = max(largest, 1 + sum(ref() is not None for ref in alive))
            alive.append(weakref.ref(value))
            return value

    on_device = {name: value.as_subclass(OnDevice) for name, value in group.items()}
    digest = checkpointing.save_file(tmp_path / "ours", own_parts({"model": on_device})["model"])
    library_save_file({name: value.contiguous() for name, value in group.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest == hashlib.sha256((tmp_path / "theirs").read_bytes()).hexdigest()
    assert all(torch.equal(value, group[name]) for name, value in load_file(tmp_path / "ours").items())
    # the one being written and no other
    assert len(alive) == len(group)
    assert largest <= 1
