"""Kandinsky 5: video tokens in self-attention, its own sparse attention replaced."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_kandinsky import nablaT_v2

from tests.integrations import checks, tiny
from vsa.attention.context import AttnContext, recorded_index
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.staged import StagedAttention
from vsa.integrations.diffusers import apply, remove

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")


def test_all_tiles_equal_the_model():
    checks.check_all_tiles_equal_the_model(tiny.kandinsky5())


def test_sparse_equals_the_model_under_a_tile_mask():
    checks.check_sparse_equals_masked_model(tiny.kandinsky5())


@pytest.mark.parametrize("topk", [3, tiny.TILES])
def test_gradients_equal_those_of_the_model(topk):
    # the class casts q and k to bfloat16, and with them their gradients, whose last bit depends on the order of sums
    checks.check_gradients_equal_the_masked_model(tiny.kandinsky5(), topk, tolerance=2e-3)


@torch.no_grad()
def test_masks_of_its_own_sparse_attention_are_replaced():
    case = tiny.kandinsky5(attention_type="nabla", attention_P=0.9)
    dense = case.run()
    params = {"to_fractal": True, "sta_mask": torch.ones(1), "P": 0.9}
    apply(case.model, sparsity=0, tile_thw=tiny.TILE)
    assert tiny.difference(case.run(sparse_params=params), dense) < 1e-5
    remove(case.model)
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    assert torch.equal(case.run(sparse_params=params), case.run())
    assert tiny.difference(case.run(), dense) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_nabla_keeps_the_blocks_of_its_own_rule(top_p):
    """The share and the window, by diffusers' own functions."""
    settings = dict(stages="fl", fine_gate=False, rule="top_p", top_p=top_p, tile_thw=(1, 8, 8))
    settings |= dict(window_thw=(3, 1, 3), window_edge="truncate")
    method = StagedAttention(dim=32, num_heads=2, head_dim=16, **settings)
    layout = method.layout([Segment((5, 16, 24))], "cpu")
    q, k, v = (3 * layout.permute(tiny.randn(1, 5 * 16 * 24, 2, 16, seed=seed)) for seed in range(3))
    seen: dict[str, torch.Tensor] = {}
    method(
        q, k, v, {}, AttnContext(layout=layout, topk=KeptTiles.of(1), recorder=lambda _, tensors: seen.update(tensors))
    )
    kept = recorded_index(seen).to_dense(layout.num_blocks)
    tokens = torch.cartesian_prod(torch.arange(5), torch.arange(16), torch.arange(24))
    # every tile has 64 tokens
    places = layout.permute(tokens[None])[0, ::64] // torch.tensor([1, 8, 8])
    window = ((places[:, None] - places).abs() <= torch.tensor([1, 0, 1])).all(-1)
    expected = nablaT_v2(q, k, window, thr=top_p).to_dense()
    assert torch.equal(kept, expected.bool())
    assert 0.1 < kept.float().mean() < 0.95
    # the control: the share alone
    assert not torch.equal(kept, nablaT_v2(q, k, window & False, thr=top_p).to_dense().bool())
    # as a user says it
    case = tiny.kandinsky5()
    apply(case.model, "staged", settings=settings)
    assert case.run().isfinite().all()


def test_remove_is_exact():
    checks.check_remove_is_exact(tiny.kandinsky5())


def test_gates_train():
    checks.check_gates_train(tiny.kandinsky5())
