"""The kernels of a run are found before its networks are built, on the meta device."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vsa_kernels.compile_ahead import compile_ahead

from vsa.attention.full import FullAttention
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.compute_dtype import compute_in
from vsa.models.init import without_memory
from vsa.models.video_dit import VideoDiT
from vsa.training.callbacks import kernels_ahead
from vsa.training.callbacks.kernels_ahead import KernelsAhead, launches_of
from vsa.training.estimate.job import FORWARD, TRAINING, Job, PlannedNetwork

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


def found(*jobs: Job) -> set[str]:
    return set(names(launches_of(jobs, torch.bfloat16, (9, 0))))


def test_a_training_step_launches_forwards_and_backwards():
    everything = found(job())
    assert everything >= FORWARDS | BACKWARDS | LAYERS | LAYER_GRADS
    assert found(job(kind=FORWARD)) & (BACKWARDS | LAYER_GRADS) == set()
    assert found(job(FullAttention)) & (FORWARDS | BACKWARDS) == set()


def test_every_top_k_and_every_micro_batch_counts():
    dense, sparse = job(topk=8), job(topk=2)
    # with all tiles attention is dense
    assert "_dkv_kernel" not in found(dense)
    assert found(dense, sparse) == found(dense) | found(sparse)
    assert found(job(topk=(8, 2))) == found(dense, sparse)


def test_the_same_is_launched_whether_layers_or_fsdp_round_parameters():
    whole, sharded, exact = (
        set(launches_of([job(sharded=value)], dtype, (9, 0)))
        for value, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (False, None))
    )
    assert whole == sharded
    # a control
    assert whole != exact


def test_attention_that_reads_values_is_followed_until_it_does():
    attention = partial(NeighborhoodAttention, window_thw=(2, 2, 2))
    assert found(job(attention)) >= {"_residual_norm_kernel", "_norm_rope_kernel"}


def run_setup(monkeypatch: pytest.MonkeyPatch, device: str, *, local_rank: int = 0) -> list[Any]:
    """What the callback compiles in a run on `device` whose schedule begins dense and ends sparse."""
    started: list[Any] = []

    def start(launches: list[bytes], capability: Any, processes: int) -> None:
        started.append((launches, capability, processes))

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels_ahead, "compile_ahead", start)
    monkeypatch.setattr(
        kernels_ahead, "jobs_of", lambda *args, **kwargs: lambda step: [(1.0, job(topk=8 if step < 99 else 2))]
    )
    data = SimpleNamespace(buckets={}, text_encoder=SimpleNamespace(max_tokens=TEXT))
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer = SimpleNamespace(
        strategy=strategy, local_rank=local_rank, datamodule=data, world_size=1, max_steps=100
    )  # fmt: skip
    module = SimpleNamespace(resume=None, compute_dtype=lambda device_type: torch.bfloat16)
    KernelsAhead({}).setup(trainer, module, "fit")  # type: ignore[arg-type]
    return started


def test_the_first_and_the_last_step_are_compiled_on_one_rank_of_a_node(monkeypatch, capfd):
    assert run_setup(monkeypatch, "cpu") == run_setup(monkeypatch, "cuda", local_rank=1) == []
    ((launches, capability, processes),) = run_setup(monkeypatch, "cuda")
    assert set(names(launches)) == found(job(topk=8), job(topk=2))
    assert capability == (9, 0)
    assert processes >= 1
    # torch.compile would set it to another folder
    assert os.environ["TRITON_CACHE_DIR"].endswith("cache")
    assert capfd.readouterr() == ("", "")


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("topk", [2, 8])
def test_a_step_on_a_gpu_compiles_nothing_that_was_compiled_ahead(monkeypatch, tmp_path, topk):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    capability = torch.cuda.get_device_capability()
    launches = launches_of([job(topk=topk)], torch.bfloat16, capability)
    compilation = compile_ahead(launches, capability, 8)
    assert compilation is not None
    compilation.wait()
    met: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        met.append((src.name, cache_hit))

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    model = network(layers=1).cuda()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    compute_in(model, torch.bfloat16)
    x, text = torch.randn(2, 16, 8, 16, 16, device="cuda"), torch.randn(2, TEXT, 24, device="cuda")
    model(x, torch.full((2,), 500.0, device="cuda"), text, topk=topk).sum().backward()
    assert {name for name, _ in met} >= LAYERS | LAYER_GRADS
    assert [name for name, hit in met if not hit] == []
