"""VSA's stages, alone and together, against dense masks over all token pairs in fp64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.attention.oracle import cube_ids, grads_of
from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention

SIZES = {"dim": 8, "num_heads": 2, "head_dim": 4}
TILE = (2, 2, 2)
GRIDS = [(4, 6, 8), (3, 5, 7), (2, 2, 9)]
STAGES = ["l", "f", "c_l", "c_f", "c_f_l", "c_f_l_e", "c_fl", "fl"]

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def window_by_definition(grid, window, edge):
    """Bool [N, N] over tiles numbered in raster order of their places."""
    counts = [math.ceil(n / c) for n, c in zip(grid, TILE, strict=True)]
    places = list(itertools.product(*(range(n) for n in counts)))

    def span(centre, n, size):
        if edge == "clamp":
            size = min(size, n)
            first = max(0, min(centre - window_half(size, n), n - size))
            return range(first, first + size)
        return range(max(0, centre - size // 2), min(n, centre - size // 2 + size))

    def window_half(size, n):
        # the window as asked for is centred, a smaller grid has all of its tiles
        return size // 2 if size < n else 0

    ranges = [[span(c, n, s) for c, n, s in zip(place, counts, window, strict=True)] for place in places]
    return torch.tensor([[all(x in r for x, r in zip(other, row, strict=True)) for other in places] for row in ranges])


def oracle(q, k, v, gates, *, grid, stages, topk, window, edge, budget, pooling, gate="own"):
    """Output in raster order, fp64."""
    ids = torch.tensor(cube_ids(grid, TILE))
    members = torch.stack([ids == n for n in range(int(ids.max()) + 1)])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5

    def pool(x):
        rows = [x[:, :, row] for row in members]
        return torch.stack([row.amax(2) if pooling == "max" else row.mean(2) for row in rows], dim=2)

    scores = pool(q) @ pool(k).transpose(-1, -2) * scale
    local = window_by_definition(grid, window, edge)

    def attend(tiles):
        mask = tiles[..., ids, :][..., ids]
        logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
        return (logits.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)

    if budget == "within" and stages in ("c_f_l", "c_f_l_e"):
        topk = max(1, topk - int(local.sum(1).max()))
    ranks = scores
    if stages == "c_f_l_e":
        ranks = scores.masked_fill(local, -math.inf)
    if stages in ("c_fl", "fl") and budget == "within":
        ranks = scores.masked_fill(local, 1e9) + scores * 1e-3
    selection = torch.zeros_like(scores, dtype=torch.bool)
    selection.scatter_(-1, ranks.topk(min(topk, scores.shape[-1])).indices, True)
    if stages == "c_f_l_e":
        selection &= ~local
    if stages in ("c_fl", "fl") and budget == "union":
        selection |= local
    local = local.expand_as(selection)
    out = attend(local if stages in ("l", "c_l") else selection) * gates["fine"]
    if stages in ("c_f_l", "c_f_l_e"):
        out = out + attend(local) * gates["window" if gate == "own" else "fine"]
    if "c" in stages:
        coarse = scores.softmax(-1) @ pool(v)
        out = out + coarse[:, :, ids].transpose(1, 2) * gates["compress"]
    return out


def make(grid, stages, **options):
    torch.manual_seed(0)
    method = StagedAttention(**SIZES, stages=stages, tile_thw=TILE, **options).double()
    layout = method.layout([Segment(grid)], "cpu")
    tokens = math.prod(grid)
    tensors = [torch.randn(2, tokens, 2, 4, dtype=torch.float64) for _ in range(6)]
    return method, layout, tensors


def run(method, layout, tensors, topk):
    """Output and gradients of q, k, v and gates in raster order; gates are given, not projected."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    q, k, v, *gates = (layout.permute(x) for x in leaves)
    extra = dict(zip(("fine", "compress", "window"), gates, strict=True))
    extra = {name: gate for name, gate in extra.items() if f"to_gate_{name}" in method.extra_modules()}
    out = layout.unpermute(method.attend_combine(q, k, v, extra, AttnContext(layout=layout, topk=KeptTiles.of(topk))))
    return out, grads_of(out, leaves)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("stages", STAGES)
def test_stages_are_dense_masks(stages, grid):
    check(grid, stages, edge="clamp")


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        ("l", {"edge": "truncate"}),
        ("c_f_l", {"edge": "truncate", "window": (1, 3, 2)}),
        ("c_fl", {"budget": "within"}),
        ("fl", {"edge": "truncate"}),
        ("c_f", {"pooling": "max"}),
        ("c_f_l", {"gate": "fine"}),
        ("c_f_l", {"budget": "within", "window": (1, 2, 2), "topk": 6}),
        ("c_f_l_e", {"budget": "within", "window": (2, 2, 1), "edge": "truncate", "topk": 7}),
        ("c_l", {"window": (5, 1, 3)}),
    ],
    ids=str,
)
def test_options_are_dense_masks(stages, options):
    check((3, 9, 7), stages, **options)


def check(grid, stages, edge="clamp", window=(1, 3, 3), budget="union", pooling="mean", topk=3, gate="own"):
    options = {"window_thw": window, "window_edge": edge, "window_budget": budget, "pooling": pooling}
    options["window_gate"] = gate
    method, layout, tensors = make(grid, stages, **options)
    out, grads = run(method, layout, tensors, topk)
    leaves = [x.clone().requires_grad_() for x in tensors]
    gates = dict(zip(("fine", "compress", "window"), leaves[3:], strict=True))
    definition = {"grid": grid, "topk": topk, "window": window, "edge": edge, "budget": budget, "pooling": pooling}
    definition["gate"] = gate
    expected = oracle(*leaves[:3], gates, stages=stages, **definition)
    for ours, theirs in zip((out, *grads), (expected, *grads_of(expected, leaves)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    # another budget or gate of the window is noticed
    for other in [{"budget": "union"}] * (budget == "within") + [{"gate": "own"}] * (gate == "fine"):
        assert not torch.allclose(out, oracle(*leaves[:3], gates, stages=stages, **definition | other), atol=1e-3)
    # the definition of other stages is noticed
    others = {s for s in STAGES if s != stages}
    assert not any(
        torch.allclose(out, oracle(*leaves[:3], gates, stages=other, **definition), atol=1e-3) for other in others
    )


def test_c_f_is_vsa():
    grid = (4, 6, 6)
    method, layout, tensors = make(grid, "c_f")
    q, k, v, fine, compress, _ = (layout.permute(x) for x in tensors)
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(4))
    vsa = VideoSparseAttention(**SIZES, tile_thw=TILE).double()
    ours = method.attend_combine(q, k, v, {"fine": fine, "compress": compress}, ctx)
    theirs = vsa.attend_combine(q, k, v, {"gate_fine": fine, "gate_compress": compress}, ctx)
    assert torch.allclose(ours, theirs, atol=1e-12)
    assert method.pairs(layout, 4) == vsa.pairs(layout, 4)
    assert set(method.extra_modules()) == set(vsa.extra_modules())


@pytest.mark.parametrize("grid", [(4, 4, 4), (3, 5, 3)], ids=str)
def test_conv_pooling_is_a_convolution_over_zero_padded_tiles(grid):
    method, layout, tensors = make(grid, "c_f", pooling="conv")
    x = tensors[0]
    pool = method.pool["q"]
    actual = pool(layout.permute(x), layout)
    # [B * H, D, T, H, W]
    video = x.permute(0, 2, 3, 1).flatten(0, 1).unflatten(-1, grid)
    padding = [p for n, c in reversed(list(zip(grid, TILE, strict=True))) for p in (0, -n % c)]
    weight = pool.conv.weight.unflatten(1, (*TILE, 4)).permute(0, 4, 1, 2, 3)
    expected = torch.nn.functional.conv3d(torch.nn.functional.pad(video, padding), weight, stride=TILE)
    # tiles of the layout in nested order: the place of each tile's first token
    offsets = layout.blocks.offsets[:-1].long()
    first = torch.stack(torch.unravel_index(layout.order[offsets], grid), -1) // torch.tensor(TILE)
    expected = expected[:, :, first[:, 0], first[:, 1], first[:, 2]].unflatten(0, (2, 2)).permute(0, 3, 1, 2)
    assert torch.allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("sharing", "modules", "convolutions"),
    [("heads", ["to_pool_q", "to_pool_k", "to_pool_v"], 3), ("all", ["to_pool"], 1), ("none", None, 6)],
)
def test_convolutions_are_shared_as_asked(sharing, modules, convolutions):
    """Own weights change what they pool and nothing else."""
    method, layout, tensors = make((3, 5, 3), "c_f", pooling="conv", conv_sharing=sharing, gate_init="model")
    own = {name: module for name, module in method.extra_modules().items() if name.startswith("to_pool")}
    assert list(own) == (modules or ["to_pool_q", "to_pool_k", "to_pool_v"])
    weights = [p for module in own.values() for p in module.parameters()]
    assert [tuple(p.shape) for p in weights] == [(4, 8 * 4)] * convolutions
    x = layout.permute(tensors[0])
    outputs = lambda: [method.pool[name](x, layout).unbind(2) for name in "qkv"]  # noqa: E731
    before = outputs()
    weights[0].data.add_(1)
    changes = [
        not torch.equal(a, b) for old, new in zip(before, outputs(), strict=True) for a, b in zip(old, new, strict=True)
    ]
    assert (
        changes
        == {
            "heads": [True, True, False, False, False, False],
            "all": [True] * 6,
            "none": [True, False, False, False, False, False],
        }[sharing]
    )


def test_conv_pooling_starts_as_the_mean():
    method, layout, tensors = make((4, 6, 2), "c_f", pooling="conv")
    mean, _, _ = make((4, 6, 2), "c_f")
    x = layout.permute(tensors[0])
    assert torch.allclose(method.pool["k"](x, layout), mean.pool["k"](x, layout), atol=1e-12)
    other, _, _ = make((4, 6, 2), "c_f", pooling="conv", gate_init="model")
    assert not torch.allclose(other.pool["k"](x, layout), mean.pool["k"](x, layout), atol=1e-3)


def test_a_new_layer_is_its_fine_stage():
    """Gates at their start: selected tiles alone, with window and coarse output switched off."""
    for stages in ("c_f", "c_f_l", "f"):
        method, layout, tensors = make((4, 4, 4), stages)
        x = torch.randn(2, 64, 8, dtype=torch.float64)
        q, k, v = (layout.permute(t) for t in tensors[:3])
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(2))
        out = method.attend_combine(q, k, v, method.project(x), ctx)
        assert torch.equal(out, method.attend(q, k, v, ctx)["fine"])


def test_pairs_of_the_window():
    method = StagedAttention(**SIZES, stages="l", tile_thw=(4, 4, 4))
    layout = method.layout([Segment((16, 32, 32))])
    # 27 of 256 cubes, always whole
    assert method.pairs(layout, 32) == 27 * 256 * 64 * 64
    assert StagedAttention(**SIZES, stages="l", window_edge="truncate").pairs(layout, 32) < 27 * 256 * 64 * 64
    # a window that leaves fewer tiles than the top-k, and one that is taken off the top-k
    rest = StagedAttention(**SIZES, stages="c_f_l_e").pairs(layout, 250)
    assert rest == 256**2 + (229 + 27) * 256 * 64 * 64
    both = StagedAttention(**SIZES, stages="c_f_l", window_budget="within").pairs(layout, 32)
    assert both == 256**2 + (5 + 27) * 256 * 64 * 64


def test_bad_input():
    with pytest.raises(ValueError, match="stages=x: expected one of l, f, c_l"):
        StagedAttention(**SIZES, stages="x")
    method = StagedAttention(**SIZES, stages="c_fl", tile_thw=TILE)
    layout = method.layout([Segment((1, 2, 2)), Segment((1, 2, 2), sample=1)])
    with pytest.raises(ValueError, match="takes rows of one video"):
        method.attend(*[torch.zeros(1, 8, 2, 4)] * 3, AttnContext(layout=layout, topk=KeptTiles.of(1)))
