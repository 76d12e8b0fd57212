"""Factorised attention and pooled keys against dense masks in fp64, forward and gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.attention.oracle import grads_of
from vsa.attention.compressed_kv import CompressedKV
from vsa.attention.context import AttnContext
from vsa.attention.grouped import GroupedAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment

GRIDS = [(4, 6, 4), (5, 3, 7), (1, 4, 4), (3, 9, 10)]
SIZES = {"dim": 8, "num_heads": 2, "head_dim": 4}


def places(grid):
    return list(itertools.product(*(range(n) for n in grid)))


def masked_attn(q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    logits = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~mask, -math.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2)


def run(method, grid, qkv):
    """Output and gradients in raster order."""
    layout = method.layout([Segment(grid)], "cpu")
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = method.attend_combine(
        *(layout.permute(x) for x in leaves), {}, AttnContext(layout=layout, topk=KeptTiles.of(1))
    )
    out = layout.unpermute(out)
    return out, grads_of(out, leaves)


def expected_of(function, qkv):
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    return out, grads_of(out, leaves)


def random_qkv(grid):
    generator = torch.Generator().manual_seed(sum(grid))
    return [torch.randn(2, math.prod(grid), 2, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


SAME = {
    "spatial": ((1, "all", "all"), lambda a, b: a[0] == b[0]),
    "temporal": (("all", 1, 1), lambda a, b: a[1:] == b[1:]),
    "frames": ((2, "all", "all"), lambda a, b: a[0] // 2 == b[0] // 2),
    "windows": (("all", 8, 8), lambda a, b: a[1] // 8 == b[1] // 8 and a[2] // 8 == b[2] // 8),
    "full": (("all", "all", "all"), lambda a, b: True),
}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", SAME)
def test_groups_are_a_dense_mask(kind, grid):
    group, same = SAME[kind]
    qkv = random_qkv(grid)
    mask = torch.tensor([[same(a, b) for b in places(grid)] for a in places(grid)])
    method = GroupedAttention(**SIZES, groups=[group])
    out, grads = run(method, grid, qkv)
    expected, expected_grads = expected_of(lambda q, k, v: masked_attn(q, k, v, mask), qkv)
    for ours, theirs in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert method.pairs(method.layout([Segment(grid)]), topk=3) == mask.sum()
    # a mask of another kind is noticed
    if 1 < mask.float().mean() * mask.shape[0] < mask.shape[0]:
        other = mask.roll(1, 1)
        assert not torch.allclose(out, masked_attn(*qkv, other | torch.eye(len(mask), dtype=torch.bool)), atol=1e-3)


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("pool", [(2, 2, 2), (1, 3, 2)], ids=str)
def test_pooled_keys_are_means_of_cuboids(pool, grid):
    qkv = random_qkv(grid)
    tiles = [tuple(x // c for x, c in zip(place, pool, strict=True)) for place in places(grid)]
    names = sorted(set(tiles))
    members = torch.tensor([[tile == name for tile in tiles] for name in names], dtype=torch.float64)
    mean = members / members.sum(1, keepdim=True)

    def by_definition(q, k, v):
        k, v = (torch.einsum("nl,blhd->bnhd", mean, x) for x in (k, v))
        return masked_attn(q, k, v, torch.ones(q.shape[1], len(names), dtype=torch.bool))

    method = CompressedKV(**SIZES, pool_thw=pool)
    out, grads = run(method, grid, qkv)
    expected, expected_grads = expected_of(by_definition, qkv)
    for ours, theirs in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert not torch.allclose(out, masked_attn(*qkv, torch.ones(1, 1, dtype=torch.bool)), atol=1e-3)
    assert method.pairs(method.layout([Segment(grid)]), topk=3) == math.prod(grid) * len(names)


def test_layers_take_turns():
    groups = [(1, "all", "all"), ("all", 1, 1), ("all", 8, 8)]
    layer_groups = [GroupedAttention(**SIZES, layer_idx=i, groups=groups).group for i in range(5)]
    assert layer_groups == [*groups, *groups[:2]]
    other = [GroupedAttention(**SIZES, layer_idx=i, groups=groups, first=2).group for i in range(4)]
    assert other == [groups[2], *groups]


def test_density_of_strided_windows():
    """Densities of the paper's strided windows on its 16 x 32 x 32 grid."""
    layout = GroupedAttention(**SIZES, groups=[("all", "all", "all")]).layout([Segment((16, 32, 32))])
    full = layout.num_tokens**2
    assert GroupedAttention(**SIZES, groups=[(2, "all", "all")]).pairs(layout, 1) / full == 0.125
    assert GroupedAttention(**SIZES, groups=[("all", 8, 8)]).pairs(layout, 1) / full == 0.0625


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
def test_bad_input():
    with pytest.raises(ValueError, match=r"^groups=\[\]: expected a list of at least 1 values"):
        GroupedAttention(**SIZES, groups=[])
    with pytest.raises(ValueError, match=r"^groups=\[\[0,all,all\]\]: expected"):
        GroupedAttention(**SIZES, groups=[(0, "all", "all")])
    with pytest.raises(ValueError, match=r"first must be an index into the 1 groups, from 0, got 1"):
        GroupedAttention(**SIZES, groups=[(1, "all", "all")], first=1)
    row = [Segment((1, 2, 2)), Segment((1, 1, 3), "text")]
    for method in (GroupedAttention(**SIZES, groups=[(1, "all", "all")]), CompressedKV(**SIZES)):
        layout = method.layout(row)
        q = torch.zeros(1, 7, 2, 4)
        with pytest.raises(ValueError, match=r"takes rows of one video, got \['video', 'text'\]"):
            method.attend(q, q, q, AttnContext(layout=layout, topk=KeptTiles.of(1)))
