"""The kernels of a run are found before its networks are built, on the meta device."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vsa_kernels.compile_ahead import compile_ahead

from tests.tiny_runs import composed
from vsa.attention.denoising import DenoisingTopk
from vsa.attention.full import FullAttention
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.sparsity import ConstantSparsity, SparsitySchedule
from vsa.attention.sparsity_schedules import LinearSparsity
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.compute_dtype import compute_in
from vsa.models.init import without_memory
from vsa.models.video_dit import VideoDiT
from vsa.training.callbacks import kernels_ahead
from vsa.training.callbacks.kernels_ahead import KernelsAhead, launches_of, passes_of
from vsa.training.estimate.job import FORWARD, TRAINING, Job, PlannedNetwork
from vsa.training.train import _callbacks

SPARSE = partial(VideoSparseAttention, tile_thw=(4, 4, 4))
# of the operator
FORWARDS = {"_mean_pool_kernel", "_scores_kernel", "_topk_kernel", "_hopper_fwd_kernel", "_combine_kernel"}
BACKWARDS = {"_dq_kernel", "_dkv_kernel", "_combine_backward_kernel", "_list_kernel"}
# of the layers around attention
LAYERS = {"_residual_norm_kernel", "_norm_rope_kernel", "_bias_gelu_kernel"}
LAYER_GRADS = {"_residual_norm_grad_kernel", "_norm_rope_grad_kernel", "_bias_gelu_grad_kernel"}

# widths that no other test has
HEADS, HEAD_DIM, FFN, TEXT = 3, 64, 328, 20


def network(attention: Any = SPARSE, layers: int = 2) -> VideoDiT:
    return VideoDiT(
        attention=attention,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        ffn_dim=FFN,
        num_layers=layers,
        text_dim=24,
    )


def job(attention: Any = SPARSE, *, kind: bool = TRAINING, **settings: Any) -> Job:
    with without_memory():
        model = network(attention)
    planned_network = PlannedNetwork(name="model", model=model, passes={kind: 1.0}, updates=float(kind))
    common = {"networks": [planned_network], "latent_shape": (16, 8, 16, 16), "text": TEXT, "topk": 2, "batch": 2}
    return Job(**{**common, "sharded": False, **settings})


def names(launches: Iterable[bytes]) -> Counter[str]:
    return Counter(pickle.loads(entry)[1] for entry in launches)


def recorded(*jobs: Job) -> list[bytes]:
    return launches_of([(one, one.topk) for one in jobs], torch.bfloat16, (9, 0))


def found(*jobs: Job) -> set[str]:
    return set(names(recorded(*jobs)))


def test_a_training_step_launches_forwards_and_backwards():
    everything = found(job())
    assert everything >= FORWARDS | BACKWARDS | LAYERS | LAYER_GRADS
    assert found(job(kind=FORWARD)) & (BACKWARDS | LAYER_GRADS) == set()
    assert found(job(FullAttention)) & (FORWARDS | BACKWARDS) == set()


def test_every_pass_counts():
    dense, sparse = job(topk=8), job(topk=2)
    # with all tiles attention is dense
    assert "_dkv_kernel" not in found(dense)
    assert found(dense, sparse) == found(dense) | found(sparse)


@pytest.mark.parametrize("frozen", ["all but gates", "all but the feed-forward layers"])
def test_blocks_after_the_first_one_count(frozen):
    """Where embeddings are frozen, the first block computes no gradient of its input."""
    trained = "to_gate" if "gates" in frozen else "ffn"

    def launches(layers: int, kept: int) -> set[bytes]:
        one = job()
        with without_memory():
            model = network(layers=layers)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        planned_network = PlannedNetwork(name="model", model=model, passes={TRAINING: 1.0}, updates=1.0)
        with pytest.MonkeyPatch.context() as patch:
            if kept != 2:
                patch.setattr(kernels_ahead, "list", lambda blocks: _Cut(blocks, kept), raising=False)
            return set(recorded(replace(one, networks=[planned_network])))

    assert launches(5, 2) == launches(5, 5)
    # a control
    assert launches(5, 1) < launches(5, 5)


class _Cut(list):
    """Blocks of which another number is kept."""

    def __init__(self, blocks: Iterable[Any], kept: int):
        super().__init__(blocks)
        self._kept = kept

    def __getitem__(self, part: Any) -> Any:
        return super().__getitem__(slice(self._kept))


def passes(schedule: SparsitySchedule, steps: list[int]) -> list[Any]:
    return [topk for _, topk in passes_of(lambda step: [(1.0, job())], schedule, steps)]


def test_passes_with_equal_kernels_are_made_once():
    # 8 tiles, and what Triton knows about a number
    assert passes(ConstantSparsity(topk=2), [0, 99]) == [2]
    assert passes(LinearSparsity(dense_steps=10, total_steps=20, topk=2), [0, 99]) == [8, 2]


def test_a_top_k_that_changes_during_a_denoising_is_recorded_as_such():
    changing = DenoisingTopk(base=8, ranges=((0.2, 0.6, 2),))
    schedule = SimpleNamespace(topk_per_layer=lambda step, tiles, layers: changing)
    assert passes(schedule, [0]) == [changing]  # type: ignore[arg-type]
    launches = names(launches_of([(job(), changing)], torch.bfloat16, (9, 0)))
    assert "_dkv_kernel" in launches
    assert "_dkv_kernel" not in found(job(topk=8))


def test_the_same_is_launched_whether_layers_or_fsdp_round_parameters():
    whole, sharded, exact = (
        set(launches_of([(job(sharded=value), 2)], dtype, (9, 0)))
        for value, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (False, None))
    )
    assert whole == sharded
    # a control
    assert whole != exact


class _Reads(FullAttention):
    """Attention that works with values alone, or that launches kernels of its own."""

    error: type[Exception] | None = None

    def attend(self, q: Any, k: Any, v: Any, ctx: Any) -> Any:
        if self.error is not None:
            raise self.error("no values")
        assert q.sum().item() > 0
        return super().attend(q, k, v, ctx)


class _Fails(_Reads):
    error = AssertionError


@pytest.mark.parametrize("attention", [partial(NeighborhoodAttention, window_thw=(2, 2, 2)), _Reads, _Fails])
def test_attention_without_a_meta_device_is_followed_until_it_fails(attention):
    first = {"_residual_norm_kernel", "_norm_rope_kernel"}
    assert found(job(attention)) == first
    # the passes after it are made
    assert found(job(attention), job()) >= BACKWARDS


def run_setup(
    monkeypatch: pytest.MonkeyPatch, device: str, *, local_rank: int = 0, resumed: int | None = None
) -> list[Any]:
    """What the callback compiles in a run on `device` whose schedule begins dense and ends sparse."""
    started: list[Any] = []

    def start(launches: list[bytes], capability: Any, processes: int) -> None:
        started.append((launches, capability, processes))

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels_ahead, "compile_ahead", start)
    monkeypatch.setattr(kernels_ahead, "jobs_of", lambda *args, **kwargs: lambda step: [(1.0, job())])
    data = SimpleNamespace(buckets={}, text_encoder=SimpleNamespace(max_tokens=TEXT))
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer = SimpleNamespace(
        strategy=strategy, local_rank=local_rank, datamodule=data, world_size=1, max_steps=100
    )  # fmt: skip
    resume = None if resumed is None else SimpleNamespace(step=resumed)
    schedule = LinearSparsity(dense_steps=10, total_steps=20, topk=2)
    module = SimpleNamespace(resume=resume, sparsity=schedule, compute_dtype=lambda device_type: torch.bfloat16)
    KernelsAhead({}).setup(trainer, module, "fit")  # type: ignore[arg-type]
    return started


def test_the_first_and_the_last_step_are_compiled_on_one_rank_of_a_node(monkeypatch, capfd):
    assert run_setup(monkeypatch, "cpu") == []
    assert "TRITON_CACHE_DIR" not in os.environ
    # all ranks look in one folder; torch.compile would give each another one
    assert run_setup(monkeypatch, "cuda", local_rank=1) == []
    assert os.environ["TRITON_CACHE_DIR"].endswith("cache")
    ((launches, capability, processes),) = run_setup(monkeypatch, "cuda")
    assert set(names(launches)) == found(job(topk=8), job(topk=2))
    assert capability == (9, 0)
    assert processes >= 1
    assert os.environ["TRITON_CACHE_DIR"].endswith("cache")
    assert capfd.readouterr() == ("", "")
    ((later, *_),) = run_setup(monkeypatch, "cuda", resumed=60)
    assert set(names(later)) == found(job(topk=2))


def test_runs_have_the_callback(tmp_path):
    cfg = composed(("experiment=quickstart", f"run_dir={tmp_path}"))
    callbacks = _callbacks(cfg, SimpleNamespace(), [])  # type: ignore[arg-type]
    assert [type(callback) for callback in callbacks].count(KernelsAhead) == 1


def test_a_failure_is_told_and_ends_nothing(monkeypatch, capfd, caplog):
    callback = KernelsAhead({})
    stopped: list[bool] = []

    def fail() -> None:
        raise RuntimeError("kernels were not compiled ahead: _dq_kernel: no memory")

    callback._compilation = SimpleNamespace(  # type: ignore[assignment]
        ended=True, wait=fail, stop=lambda: stopped.append(True)
    )
    callback.on_train_batch_end()
    assert "_dq_kernel: no memory" in capfd.readouterr().err + caplog.text
    assert stopped == [True]
    callback.teardown()
    assert stopped == [True]


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_an_unfinished_compilation_ends_with_the_run_alone(hook):
    callback, calls = KernelsAhead({}), list[str]()
    callback._compilation = SimpleNamespace(  # type: ignore[assignment]
        ended=False, wait=lambda: calls.append("wait"), stop=lambda: calls.append("stop")
    )
    callback.on_train_batch_end()
    assert calls == []
    getattr(callback, hook)()
    assert calls == ["stop"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_compiles_nothing_that_was_compiled_ahead(monkeypatch, tmp_path):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    capability = torch.cuda.get_device_capability()
    launches = launches_of([(job(), topk) for topk in (2, 8)], torch.bfloat16, capability)
    compilation = compile_ahead(launches, capability, 8)
    assert compilation is not None
    compilation.wait()
    # which call the kernels, and which older versions of Triton compile with a C compiler
    libraries = sorted(tmp_path.rglob("*.so"))
    met: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        met.append((src.name, cache_hit))

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    model = network(layers=1).cuda()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    compute_in(model, torch.bfloat16)
    x, text = torch.randn(2, 16, 8, 16, 16, device="cuda"), torch.randn(2, TEXT, 24, device="cuda")
    for topk in (2, 8):
        model(x, torch.full((2,), 500.0, device="cuda"), text, topk=topk).sum().backward()
    assert {name for name, _ in met} >= LAYERS | LAYER_GRADS
    assert [name for name, hit in met if not hit] == []
    assert sorted(tmp_path.rglob("*.so")) == libraries
