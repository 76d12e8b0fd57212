"""SLA against dense masks in raster order and fp64, forward and gradients."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tests.attention.test_row_rules import assert_same, inputs, kept_tiles, members, preset, run, runs, scores_of
from vsa.attention.full import dense_attn
from vsa.attention.layout import Segment
from vsa.attention.sparse_linear import SparseLinearAttention, linear_attn

SIZES = {"dim": 16, "num_heads": 4, "head_dim": 4}
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")
GRID, TILE = (3, 5, 4), (2, 2, 2)


def made(**options):
    method = SparseLinearAttention(**SIZES, tile_thw=TILE, **options).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return method


def definition(q, k, v, weight, bias, *, tiles, linear, topk):
    """Output by masks over all pairs of tokens; tiles: 0 or 1 `[N, L]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = kept_tiles(scores_of(q, k, tiles, tiles).detach(), rule="topk", topk=topk).double()
    selected = (tiles.T @ mask @ tiles) > 0
    sparse = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~selected, -math.inf).softmax(-1) @ v
    products = q.softmax(-1) @ k.softmax(-1).mT
    products = products if linear == "all" else products.masked_fill(selected, 0)
    branch = products @ v / (products.sum(-1, keepdim=True) + 1e-5)
    return (sparse + branch @ weight.T + bias).transpose(1, 2)


@pytest.mark.parametrize("linear", ["all", "marginal"])
@pytest.mark.parametrize("raster", [False, True])
def test_it_is_its_definition(linear, raster):
    shape = {"tile_thw": (1, 1, 8), "partition": "raster_run"} if raster else {}
    method, leaves = made(linear=linear), inputs(GRID)
    if raster:
        weights = method.proj_l.state_dict()
        method = preset("sla", linear=linear, **shape).double()
        assert all(p.abs().max() == 0 for p in method.parameters())
        method.proj_l.load_state_dict(weights)
    weights = [method.proj_l.weight, method.proj_l.bias]
    tiles = runs(GRID, 8) if raster else members(GRID, TILE)
    by_masks = partial(definition, *leaves[:3], *weights, tiles=tiles)
    out = run(method, GRID, leaves[:3])
    assert_same(out, by_masks(linear=linear, topk=3), [*leaves[:3], *weights])
    # the controls: the other branch, another number of tiles, a projection by columns
    other = "all" if linear == "marginal" else "marginal"
    transposed = definition(*leaves[:3], weights[0].T, weights[1], tiles=tiles, linear=linear, topk=3)
    for control in (by_masks(linear=other, topk=3), by_masks(linear=linear, topk=4), transposed):
        assert (out - control).abs().max() > 1e-3


def test_marginal_with_all_tiles_is_dense_attention():
    leaves, method = inputs(GRID)[:3], made(linear="marginal")
    torch.nn.init.zeros_(method.proj_l.bias)
    expected = dense_attn(*leaves)
    for how in ({"topk": 1000}, {"topk": 1, "dense": True}):
        out = run(method, GRID, leaves, **how)
        # its weight gets a gradient of 0, not NaN
        assert torch.autograd.grad(out.sum(), method.proj_l.weight, retain_graph=True)[0].abs().max() == 0
        assert_same(out, dense_attn(*leaves), leaves)
    # the controls
    assert (run(method, GRID, leaves, topk=11) - expected).abs().max() > 1e-4
    assert (run(made(linear="all"), GRID, leaves, topk=1000) - expected).abs().max() > 1e-3


def test_it_starts_as_topk_attention_whose_projection_learns():
    leaves, start = inputs(GRID)[:3], SparseLinearAttention(**SIZES, tile_thw=TILE).double()
    out = run(start, GRID, leaves)
    assert torch.autograd.grad((out * leaves[2]).sum(), start.proj_l.weight, retain_graph=True)[0].abs().min() > 0
    zero = torch.zeros(4, 4, dtype=torch.float64)
    expected = definition(*leaves, zero, zero[0], tiles=members(GRID, TILE), linear="all", topk=3)
    assert_same(out, expected, leaves)


def test_sums_of_a_few_marginal_tokens_keep_their_digits():
    layout = made().layout([Segment((4, 8, 8))], "cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, layout.num_tokens, 1, 4, generator=generator) for _ in range(3))
    # only the last tile is marginal, all others have large values
    v[:, :-8] *= 1e5
    marginal = torch.zeros(1, 1, layout.blocks.num, layout.blocks.num, dtype=torch.bool)
    marginal[..., -1] = True
    expected = linear_attn(*(x.double() for x in (q, k, v)), marginal, layout.blocks)
    torch.testing.assert_close(linear_attn(q, k, v, marginal, layout.blocks).double(), expected, atol=1e-5, rtol=1e-5)
    # the control: the sums as total minus selected, as published code forms them
    total, selected = (torch.einsum("blhd,blhe->hde", k[:, :n].softmax(-1), v[:, :n]) for n in (None, -8))
    exact = torch.einsum("blhd,blhe->hde", k[:, -8:].softmax(-1), v[:, -8:])
    assert (total - selected - exact).abs().max() > 1e-2


def test_charged_pairs():
    pairs = {}
    for linear in ("all", "marginal"):
        method = made(linear=linear)
        layout = method.layout([Segment((4, 4, 4))], "cpu")
        pairs[linear] = method.pairs(layout, 2)
    # 8 tiles of 8: selected, scores at half a pair, states and products, three of the four projections
    assert pairs["all"] == 64 * 16 + 32 + 64 * 4 + 64 * 4 / 2 * 3 / 4
    # 2 N N D D of 4 D each
    assert pairs["marginal"] == pairs["all"] + 64 * 4 / 2
