"""Radial attention against a mask over all pairs of tokens, one by one, and fp64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.attention.test_row_rules import assert_same, inputs, run
from vsa.attention.full import dense_attn
from vsa.attention.layout import Segment
from vsa.attention.radial import RadialAttention, radial_blocks

SIZES = {"dim": 16, "num_heads": 4, "head_dim": 4}
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def sees(row, column, size, tokens, decay):
    d = abs(row // size - column // size)
    if d <= 1 or column < size:
        return True
    w = 2 ** len(f"{size:b}") / 2 ** len(f"{d:b}")
    if w < tokens and d % int(tokens / w) != 0:
        return False
    return abs(row % size - column % size) <= max(w * decay, tokens)


def blocks_by_pairs(grid, tokens, decay):
    total, size = math.prod(grid), grid[1] * grid[2]
    mask = torch.tensor([[sees(r, c, size, tokens, decay) for c in range(total)] for r in range(total)])
    parts = list(range(0, total, tokens))
    kept = torch.eye(len(parts), dtype=torch.bool)
    for i, a in enumerate(parts):
        for j, b in enumerate(parts):
            share = mask[a : a + tokens, b : b + tokens].double().mean(0)
            if (share > 0).any() and (share > 1 / 3).sum() / (share > 0).sum() > 0.6:
                kept[i, j] = True
    return kept


@pytest.mark.parametrize(("grid", "tokens"), [((9, 5, 5), 4), ((7, 3, 5), 8), ((11, 3, 3), 4)])
def test_it_is_its_definition(grid, tokens):
    method, leaves, total = RadialAttention(**SIZES, tokens=tokens), inputs(grid)[:3], math.prod(grid)
    kept = blocks_by_pairs(grid, tokens, 1.0)
    mask = kept.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)[:total, :total]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    expected = ((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -math.inf).softmax(-1) @ v).transpose(1, 2)
    out = run(method, grid, leaves)
    assert_same(out, expected, leaves)
    layout = method.layout([Segment(grid)], "cpu")
    assert method.pairs(layout, 1) == mask.sum() < 0.9 * total**2
    # the controls: dense attention, and bands of another width
    assert (out - dense_attn(*leaves)).abs().max() > 1e-3
    wide = radial_blocks(layout, tokens, 4.0)
    assert torch.equal(wide, blocks_by_pairs(grid, tokens, 4.0))


def test_one_frame_is_dense_attention():
    grid = (1, 7, 9)
    leaves = inputs(grid)[:3]
    assert_same(run(RadialAttention(**SIZES, tokens=8), grid, leaves), dense_attn(*leaves), leaves)
