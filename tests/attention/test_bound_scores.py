"""Selections between which every other lies: by the exact attention mass, and at random."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from vsa_kernels import BlockIndex

from tests.attention.oracle import cube_ids
from vsa.attention.context import AttnContext
from vsa.attention.grouped import GroupedAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.scores import oracle_scores, random_scores
from vsa.attention.staged import StagedAttention

SIZES = {"dim": 8, "num_heads": 2, "head_dim": 4}

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def selected(score, layout, q, k, topk, **options):
    method = StagedAttention(**SIZES, stages="f", tile_thw=layout.tile_thw, score=score, **options)
    lists = {}
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk), recorder=lambda _, tensors: lists.update(tensors))
    method.attend(q, k, k, ctx)
    index = BlockIndex(kv_indices=lists["kv_indices"], kv_num_blocks=lists["kv_num_blocks"])
    return index.to_dense(layout.kv_blocks.num)


@pytest.mark.parametrize("grid", [(2, 4, 4), (3, 3, 5)], ids=str)
def test_no_selection_of_as_many_tiles_a_row_holds_more_mass(grid):
    tile, topk, length = (1, 2, 2), 3, math.prod(grid)
    generator = torch.Generator().manual_seed(0)
    q, k = (2 * torch.randn(1, length, 2, 4, generator=generator) for _ in range(2))
    method = StagedAttention(**SIZES, stages="f", tile_thw=tile)
    layout = method.layout([Segment(grid)])
    ids = torch.tensor(cube_ids(grid, tile))
    # by definition: softmax over all tokens in fp64, summed over the members of a tile, raster order
    weights = torch.einsum("blhd,bshd->bhls", q.double(), k.double()).div(2).softmax(-1)[0]
    rows = [ids == n for n in ids[layout.order][layout.blocks.offsets[:-1].long()].tolist()]
    mass = torch.stack(
        [torch.stack([weights[:, row][:, :, column].sum(-1).mean(-1) for column in rows], -1) for row in rows], 1
    )
    tensors = layout.permute(q), layout.permute(k)
    assert torch.allclose(oracle_scores(*tensors, layout)[0].double(), mass, atol=1e-6)
    selections = {name: selected(name, layout, *tensors, topk)[0] for name in ("oracle", "mean", "random")}
    masses = {name: (mass * tiles).sum(-1) for name, tiles in selections.items()}
    best = torch.stack([mass[..., list(some)].sum(-1) for some in itertools.combinations(range(len(rows)), topk)])
    assert torch.allclose(masses["oracle"], best.amax(0), atol=1e-6)
    # control: the other scores are not the best, each row keeps as many tiles
    assert (masses["mean"] < best.amax(0) - 1e-3).any()
    assert masses["random"].mean() < masses["mean"].mean() < masses["oracle"].mean()
    assert all((tiles.sum(-1) == topk).all() for tiles in selections.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_scores_are_the_same_compiled():
    layout = StagedAttention(**SIZES, tile_thw=(1, 2, 2)).layout([Segment((4, 16, 15))])
    q = torch.zeros(2, 960, 3, 4)
    compiled = torch.compile(random_scores)
    for seed in (0, 5, 1009):
        assert torch.equal(compiled(q.cuda(), layout, seed).cpu(), random_scores(q, layout, seed))


def test_random_scores_are_uniform_and_depend_on_seed_and_layer_alone():
    layout = StagedAttention(**SIZES, tile_thw=(1, 2, 2)).layout([Segment((4, 16, 16))])
    q = torch.zeros(2, 1024, 3, 4)
    scores = random_scores(q, layout, 0)
    assert scores.shape == (2, 3, 256, 256)
    assert torch.equal(scores, random_scores(torch.randn_like(q), layout, 0))
    assert 0 <= float(scores.min()) < 1e-4 < 1 - 1e-4 < float(scores.max()) < 1
    # of 393,216 numbers: the standard deviation of a share of a tenth is 0.0005
    shares = torch.histc(scores, 10, 0, 1) / scores.numel()
    assert torch.allclose(shares, torch.full((10,), 0.1), atol=0.0025)
    for other in (scores.roll(1, -1), scores.roll(1, -2), scores.roll(1, 1), scores.roll(1, 0)):
        assert abs(float(torch.corrcoef(torch.stack([scores.flatten(), other.flatten()]))[0, 1])) < 0.01
    for seed in (1, 2, 1009):
        other = random_scores(q, layout, seed)
        assert abs(float(torch.corrcoef(torch.stack([scores.flatten(), other.flatten()]))[0, 1])) < 0.01
    # every kv tile is in as many lists, about
    selection = selected("random", layout, q[..., :2, :], q[..., :2, :], 64)
    counts = selection.sum(2).float()
    assert abs(float(counts.mean()) - 64) < 1e-4
    assert float(counts.std()) < 2 * math.sqrt(64 * 0.75)
    again = selected("random", layout, q[..., :2, :], q[..., :2, :], 64)
    layer = selected("random", layout, q[..., :2, :], q[..., :2, :], 64, layer_idx=1)
    other_seed = selected("random", layout, q[..., :2, :], q[..., :2, :], 64, score_seed=1)
    assert torch.equal(selection, again)
    assert not torch.equal(selection, layer)
    assert not torch.equal(selection, other_seed)


def test_random_scores_are_not_what_a_row_is_expected_to_attend_to():
    records = {}
    for score in ("random", "oracle"):
        method = StagedAttention(**SIZES, stages="f", tile_thw=(1, 2, 2), score=score, fine_gate=False)
        layout = method.layout([Segment((2, 4, 4))])
        ctx = AttnContext(
            layout=layout,
            topk=KeptTiles.of(2),
            recorder=lambda _, tensors, score=score: records.update({score: tensors}),
        )
        q, k, v = torch.randn(3, 1, 32, 2, 4)
        method.attend(q, k, v, ctx)
    assert "scores" not in records["random"]
    assert torch.allclose(records["oracle"]["scores"].exp().sum(-1), torch.ones(()))


@pytest.mark.parametrize("group", [(1, "all", "all"), ("all", 1, 1), (2, 3, "all")], ids=str)
def test_groups_tell_which_keys_a_token_sees(group):
    grid = (3, 4, 5)
    method = GroupedAttention(**SIZES, groups=[group])
    layout = method.layout([Segment(grid)])
    tokens = torch.tensor([0, 7, 33, 59])
    ids = torch.tensor(cube_ids(grid, tuple(n if g == "all" else g for n, g in zip(grid, group, strict=True))))
    sees = method.sees(tokens, layout)
    assert torch.equal(sees, ids[tokens, None] == ids)
    # by what comes out: values that mark a token reach those that see it, and no others
    q, k = torch.randn(2, 1, 60, 2, 4)
    for key in (0, 24, 59):
        marks = torch.zeros(1, 60, 2, 4)
        marks[:, key] = 1
        out = method.attend(q, k, marks, AttnContext(layout=layout, topk=KeptTiles.of(1)))["out"]
        assert torch.equal(out[0, tokens, 0, 0] > 0, sees[:, key])
