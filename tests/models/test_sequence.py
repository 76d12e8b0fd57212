"""Networks whose ranks share a sample: velocity, gradients of weights and of the input are those of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.test_sequence import difference
from tests.integrations import tiny
from tests.integrations.test_network_parallel import FAMILIES, LATENT, built
from tests.tiny_models import LEVELS, make_model
from tests.training.ranks import run_ranks
from vsa.attention.sequence import Division, SequenceRanks
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.forward_hooks import capture_outputs
from vsa.models.network import Network
from vsa.models.pair_tally import PairTally

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

# 3 x 5 x 7 tokens in tiles of 2 x 2 x 2, most of the last ones partial
RAGGED = (6, 3, 10, 14)
SPARSE = partial(VideoSparseAttention, tile_thw=(2, 2, 2), gate_init="model", rule="top_p", top_p=0.6)
# classes of diffusers, with bounds in fp64: whatever their dtype, Wan and the RMS norms of HunyuanVideo round to fp32,
# Kandinsky 5 to bf16
BOUNDS = {"wan": 2e-6, "hunyuan": 2e-7, "hunyuan15": 2e-7, "kandinsky5": 2e-4}
# real tokens of the texts of two samples
LENGTHS = {"hunyuan": (6, 4), "hunyuan15": (3, 5), "minimax_h3": (5, 2)}


def passed(
    network: Network, ranks: SequenceRanks | None, shape, times: str = "sample", lengths: tuple[int, ...] | None = None
) -> dict[str, torch.Tensor]:
    """Velocity and gradients of two samples, with texts of these lengths."""
    network.sequence, network.tally = ranks, PairTally(torch.device("cpu")) if network.measured else None
    generator = torch.Generator().manual_seed(1)
    dtype = next(network.parameters()).dtype
    x = torch.randn(2, *shape, generator=generator, dtype=dtype).requires_grad_()
    text = torch.randn(2, tiny.TEXT, network.text_dim, generator=generator, dtype=dtype)
    tokens = network.layout_for(shape).num_tokens
    timestep = torch.rand(2, {"sample": 1, "frames": 2, "tokens": tokens}[times], generator=generator) * 1000
    mask = None if lengths is None else torch.arange(tiny.TEXT) < torch.tensor(lengths)[:, None]
    with capture_outputs(dict(enumerate(network.blocks)) if network.one_pass else {}) as features:
        out = network(x, timestep[:, 0] if times == "sample" else timestep, text, mask, topk=3).to(dtype)
    means = {f"block {i}": network.gather(x, shape).mean(1) for i, x in features.items()}
    network.zero_grad()
    loss = (out * torch.randn(out.shape, generator=generator, dtype=dtype)).sum()
    (loss + sum(mean.square().sum() for mean in means.values())).backward()
    # Kandinsky's text is rotated in bf16, which rounds gradients
    rounded = "text_" if network.title.startswith("Kandinsky") else None
    named = ((name, p) for name, p in network.named_parameters() if rounded is None or not name.startswith(rounded))
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    pairs = network.tally.take()[0] if network.tally else torch.zeros(2)
    if ranks is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= ranks.size
        dist.all_reduce(pairs)
    # the input has its whole gradient on every rank
    means = {name: mean.detach() for name, mean in means.items()}
    return {"out": out.detach(), "input": x.grad, "pairs": pairs, **means, **gradients}


def differences(world: int, *cases) -> list[float]:
    """Difference between one process and `world` ranks for a function that makes a network and the arguments of its
    pass, by case."""

    def on_rank(rank: int) -> list[float]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        ranks = SequenceRanks(group=dist.group.WORLD.group_name, size=world, rank=rank)
        return [
            difference(passed(make(), None, *arguments), passed(make(), ranks, *arguments))
            for make, *arguments in cases
        ]

    return run_ranks(world, on_rank)[0]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_are_one_at_every_level_and_kind_of_times(world):
    def make(level, **sizes) -> Network:
        model = make_model(SPARSE, absolute_positions=True, **sizes)
        model.activation_checkpointing = level
        return model.double()

    kinds = [("none", "sample"), ("none", "frames"), ("none", "tokens"), *((level, "sample") for level in LEVELS[1:])]
    cases = [(partial(make, level), RAGGED, times) for level, times in kinds]
    # 3 heads: a head for each rank is none
    cases += [(partial(make, "none", num_attention_heads=3), RAGGED, times) for times in ("sample", "frames")]
    assert max(differences(world, *cases)) < 1e-11


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_classes_of_diffusers_are_divided(world):
    # 2 x 3 x 5 or 2 x 6 x 10 tokens
    cases = [(lambda name=name: built(name).double(), (16, 2, 6, 10), "sample", LENGTHS.get(name)) for name in FAMILIES]
    for name, found in zip(FAMILIES, differences(world, *cases), strict=True):
        assert found < BOUNDS.get(name, 1e-11), name


@pytest.mark.slow
def test_averaged_gradients_would_be_seen(monkeypatch):
    gather = Division.gather
    monkeypatch.setattr(Division, "gather", lambda self, x: gather(self, x / 2 + x.detach() / 2))
    assert min(differences(2, *((partial(built, name), LATENT) for name in ("cogvideox", "minimax_h3")))) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        *(
            (partial(make_model, partial(SPARSE, rule="topk", top_p=None, over=over)), RAGGED)
            for over in ("row", "layer")
        ),
        *((partial(built, name), LATENT) for name in ("cogvideox", "hunyuan", "minimax_h3")),
    ],
    ids=["row", "layer", "cogvideox", "hunyuan", "minimax_h3"],
)
def test_compiled_blocks_are_divided(make, shape):
    def on_rank(rank: int) -> float:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        ranks = SequenceRanks(group=dist.group.WORLD.group_name, size=2, rank=rank)
        compiled = make().double()
        compiled.compile_blocks(backend="aot_eager")
        return difference(passed(make().double(), None, shape), passed(compiled, ranks, shape))

    assert max(run_ranks(2, on_rank)) < 2e-7


def test_ranks_make_as_many_passes_of_a_batch():
    """Each pass of sharded blocks is a collective: ranks with samples of other lengths and times would wait forever."""
    text, noise = tiny.randn(2, tiny.TEXT, 64, seed=1), tiny.randn(2, *LATENT)

    def on_rank(rank: int) -> list[list[float]]:
        dist.init_process_group("gloo")
        network = built("minimax_h3", init_device_mesh("cpu", (2,)))
        passes, one_pass = [], network._pass
        network._pass = lambda given, now: passes.append(len(given.x)) or one_pass(given, now)
        mask = torch.arange(tiny.TEXT) < torch.tensor([[5, 5], [5, 2]][rank])[:, None]
        out = network(noise, torch.tensor([[500.0, 500.0], [500.0, 300.0]][rank]), text, mask, topk=3)
        out.square().mean().backward()
        assert passes == [1, 1]
        return out.flatten(1).tolist()

    first, second = run_ranks(2, on_rank)
    assert first[0] == second[0]
    assert first[1] != second[1]
