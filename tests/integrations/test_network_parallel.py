"""Networks of diffusers sharded by FSDP2, in bf16 over fp32 parameters, and with compiled blocks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.integrations import tiny
from tests.integrations.test_trained_families import FAMILIES, LATENT
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.integrations.diffusers.network import DiffusersNetwork
from vsa.training.parallel import ParallelPlan, build_model

SPARSE = partial(VideoSparseAttention, tile_thw=(1, 2, 2), gate_init="model")


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process, for a test alone, so that no rank of a later test can inherit its group."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def built(name, mesh=None, **plan) -> DiffusersNetwork:
    model = FAMILIES[name].make().model

    def make() -> DiffusersNetwork:
        return DiffusersNetwork(attention=SPARSE, class_name=type(model).__name__, config=model.config)

    torch.manual_seed(0)
    network = build_model(make, mesh, ParallelPlan(**plan))
    generator = torch.Generator().manual_seed(1)
    for _, parameter in sorted(network.named_parameters()):
        # a zero head would hide everything
        own = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
        own.add_(0.05 * torch.randn(own.shape, generator=generator))
    return network


def passed(network: DiffusersNetwork, topk: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Velocity and gradients at `topk` of 8 tiles."""
    inputs = tiny.randn(2, *LATENT), torch.tensor([700.0, 300.0]), tiny.randn(2, tiny.TEXT, 64, seed=1)
    out = network(*inputs, topk=topk).float()
    out.square().mean().backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return out, {n: g.to_local() if isinstance(g, DTensor) else g for n, g in gradients.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_shards_and_rounding_change_nothing_else(name, mesh):
    out, gradients = passed(built(name))
    sharded, theirs = passed(built(name, mesh, activation_checkpointing="full"))
    assert torch.equal(sharded, out)
    assert theirs.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(theirs[key], gradient, atol=1e-6, rtol=1e-5)
    # layers that round are sharded weights gathered in bf16; with all tiles, since rounding also changes which are kept
    out, low, lower = (
        passed(built(name, *given, **plan), topk=8)[0]
        for given, plan in (((), {}), ((), {"compute_dtype": "bfloat16"}), ((mesh,), {"compute_dtype": "bfloat16"}))
    )
    assert torch.equal(low, lower)
    assert 0 < tiny.difference(low, out) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("level", ["none", "attention", "full"])
def test_blocks_compile(name, level):
    out, gradients = passed(built(name))
    network = built(name, activation_checkpointing=level)
    network.compile_blocks(backend="aot_eager")
    compiled, theirs = passed(network)
    assert torch.equal(compiled, out)

    def compare(theirs):
        # graphs add what reaches a tensor on several ways in another order
        for key, gradient in gradients.items():
            torch.testing.assert_close(theirs[key], gradient, atol=1e-6, rtol=1e-5)

    compare(theirs)
    with pytest.raises(AssertionError):
        compare(passed(built(name), topk=4)[1])
