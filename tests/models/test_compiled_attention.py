"""Blocks compiled as one graph with every attention method, against the same blocks in eager mode."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from vsa.attention.compressed_kv import CompressedKV
from vsa.attention.fine_grained.method import FineGrainedAttention
from vsa.attention.grouped import GroupedAttention
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.sparse_linear import SparseLinearAttention
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.pair_tally import PairTally
from vsa.models.video_dit import VideoDiT

SLOW = pytest.mark.slow
METHODS = {
    "within the budget": partial(StagedAttention, tile_thw=(2, 2, 2), stages="c_fl", window_budget="within"),
    "max": partial(StagedAttention, tile_thw=(2, 2, 2), pooling="max"),
    "excluded window": partial(
        StagedAttention, tile_thw=(2, 2, 2), stages="c_f_l_e", pooling="conv", window_thw=(1, 2, 1)
    ),
    "three sizes": partial(StagedAttention, tile_thw=(2, 4, 4), kv_tile_thw=(2, 2, 4), pool_thw=(1, 2, 2)),
    "sub-blocks": partial(PooledTail, tile_thw=(2, 2, 2), score="subblock_softmax", score_thw=(1, 2, 2)),
    "mass": partial(StagedAttention, tile_thw=(2, 2, 2), score="mass"),
    "second order": partial(PooledTail, tile_thw=(2, 2, 2), score="mass", order=2),
    "budget of a layer": partial(
        VideoSparseAttention, tile_thw=(2, 2, 2), rule="larger_of_both", top_p=0.1, over="layer"
    ),
    "two levels": partial(PooledTail, tile_thw=(2, 2, 2), levels=2, node_thw=(4, 4, 4), tail="double_count"),
    "linear": partial(SparseLinearAttention, tile_thw=(2, 2, 2), linear="marginal"),
    "groups": partial(GroupedAttention, groups=[(1, "all", "all"), ("all", 1, 1)]),
    "pooled keys": CompressedKV,
    # shares and tokens, a fine mask and none, 30 tokens in tiles of 64 and of 8
    "windows": partial(NeighborhoodAttention, window_thw=(1.0, 0.6, 3), causal_thw=(True, False, False)),
    "strided windows": partial(
        NeighborhoodAttention, window_thw=(2, 4, 2), stride_thw=(2, 2, 2), tile_thw=(2, 2, 2), kv_tile_thw=(1, 2, 2)
    ),
    "whole windows": partial(NeighborhoodAttention, window_thw=(1.0, 1.0, 1.0)),
    # the union of a group of its query tiles is every kv tile of so few tokens
    "fine tiles": partial(
        FineGrainedAttention, q_tokens=16, kv_tokens=4, top_p=0.6, attended="tile", allow_training=True
    ),
}
QUICK = ("excluded window", "groups")
UNSELECTIVE = ("groups", "pooled keys", "windows", "strided windows", "whole windows", "fine tiles")


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in METHODS])
def test_compiled_blocks_equal_eager_ones(name):
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 48, "text_dim": 8, "freq_dim": 16}
    model = VideoDiT(**sizes, num_layers=2 if name == "groups" else 1, attention=METHODS[name])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    latents = torch.randn(1, 16, 3, 10, 8, generator=generator)
    text = torch.randn(1, 4, 8, generator=generator)

    model.tally = PairTally(torch.device("cpu")) if model.measured else None

    def losses():
        for topk in (2, 3):
            model.zero_grad()
            loss = model(latents, torch.tensor([500.0]), text, topk=topk).square().mean()
            loss.backward()
            yield [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    eager = list(losses())
    counted = model.tally and model.tally.take()
    torch.compiler.reset()
    model.compile_blocks(backend="eager")
    for ours, theirs in zip(losses(), eager, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)
    if counted:
        (pairs, dense), (theirs, _) = model.tally.take(), counted
        assert torch.equal(pairs, theirs)
        assert 0 == pairs[0] < pairs[1] < dense
    if name not in UNSELECTIVE:
        assert not all(torch.equal(a, b) for a, b in zip(*eager, strict=True))
