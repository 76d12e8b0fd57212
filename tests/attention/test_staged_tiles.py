"""Stages with query, kv and coarse tiles of different sizes and other scores, against dense masks in fp64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.attention.oracle import cube_ids, grads_of
from vsa.attention import ruled
from vsa.attention.context import AttnContext
from vsa.attention.hilbert import hilbert_order
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.selection import select_blocks
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention

SIZES = {"dim": 8, "num_heads": 2, "head_dim": 4}
GRIDS = [(4, 8, 8), (3, 5, 7)]
# grids that every tile below divides, and odd ones
TILES = {
    "64x16": {"tile_thw": (2, 4, 4), "kv_tile_thw": (1, 4, 2)},
    "16x64": {"tile_thw": (1, 4, 2), "kv_tile_thw": (2, 4, 4)},
    "coarse 64, fine 256": {"tile_thw": (2, 4, 4), "pool_thw": (2, 2, 2)},
    "of logits": {"tile_thw": (2, 4, 4), "pool_thw": (2, 2, 2), "pooled_map": "logits"},
    "128 rows a list": {"tile_thw": (2, 4, 2), "kv_tile_thw": (2, 2, 2), "pool_thw": (2, 2, 2)},
    "three sizes": {"tile_thw": (4, 4, 4), "kv_tile_thw": (2, 2, 4), "pool_thw": (1, 2, 2)},
    "sub-blocks": {"tile_thw": (2, 4, 4), "score": "subblock_softmax", "score_thw": (2, 2, 1)},
    "sub-blocks 64x16": {
        "tile_thw": (2, 4, 4),
        "kv_tile_thw": (2, 4, 2),
        "score": "subblock_softmax",
        "score_thw": (1, 2, 2),
    },
    "sub-blocks in one pass": {"tile_thw": (2, 4, 4), "score": "subblock_lse", "score_thw": (2, 2, 1)},
    "mass": {"tile_thw": (2, 2, 4), "score": "mass"},
    "mass 64x16": {"tile_thw": (2, 4, 4), "kv_tile_thw": (1, 4, 2), "score": "mass"},
    "error": {"tile_thw": (2, 2, 4), "score": "error"},
    "error 64x16": {"tile_thw": (2, 4, 4), "kv_tile_thw": (1, 4, 2), "score": "error"},
    "oracle": {"tile_thw": (2, 2, 4), "score": "oracle"},
    "oracle 64x16": {"tile_thw": (2, 4, 4), "kv_tile_thw": (1, 4, 2), "score": "oracle"},
}

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def members_of(grid, tile):
    """Bool [N, L], raster order of tokens."""
    ids = torch.tensor(cube_ids(grid, tile))
    return torch.stack([ids == n for n in range(int(ids.max()) + 1)])


def scores_of(q, k, members, *, score, pooled_map, score_members, v=None):
    """[B, H, Nq, Nkv] by sums over pairs of small tiles; members: bool rows of tokens by name."""
    scale = q.shape[-1] ** -0.5
    means = lambda x, rows: torch.stack([x[:, :, row].mean(2) for row in rows], 2)  # noqa: E731
    fine_q, fine_kv = members["q"], members["kv"]
    if score == "oracle":
        weights = (q @ k.transpose(-1, -2) * scale).softmax(-1)
        return means(weights @ fine_kv.double().T, fine_q)
    if score in ("mass", "error"):
        shares = (q @ means(k, fine_kv).transpose(-1, -2) * scale + fine_kv.sum(1).log()).softmax(-1)
        if score == "error":
            var_k, var_v = (torch.stack([x[:, :, row].var(2, correction=0) for row in fine_kv], 2) for x in (k, v))
            spread = torch.stack(
                [(q * scale * var_k[:, :, j, None].sqrt()).square().sum(-1) for j in range(len(fine_kv))], -1
            )
            shares = shares.square() * spread * var_v.sum(-1)[:, :, None]
        return means(shares, fine_q)
    subs = score.startswith("subblock")
    small_q, small_kv = (score_members,) * 2 if subs else (members["pool_q"], members["pool_kv"])
    cells = means(q, small_q) @ means(k, small_kv).transpose(-1, -2) * scale
    if subs:
        cells = cells + small_kv.sum(1).log()
        cells = cells.exp() if score == "subblock_lse" else cells.softmax(-1)
    elif pooled_map == "probabilities":
        cells = cells.softmax(-1)
    # which small tiles lie in which tile
    rows = (fine_q.double() @ small_q.double().T > 0).double()
    columns = (fine_kv.double() @ small_kv.double().T > 0).double()
    sums = rows @ cells @ columns.T / rows.sum(1, keepdim=True)
    return sums if subs else sums / columns.sum(1)


def oracle(
    q, k, v, gates, topk, members, *, score="mean", pooled_map="probabilities", score_members=None, stages="c_f"
):
    """Raster order."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    scores = scores_of(q, k, members, score=score, pooled_map=pooled_map, score_members=score_members, v=v)
    topk = min(topk, scores.shape[-1])
    selection = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(topk).indices, True)
    mask = members["q"].double().T @ selection.double() @ members["kv"].double()
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(mask == 0, -math.inf)
    out = (logits.softmax(-1) @ v).transpose(1, 2) * gates["fine"]
    of_q, of_kv = (rows.double() / rows.sum(1, keepdim=True) for rows in (members["pool_q"], members["pool_kv"]))
    weights = ((of_q @ q) @ (of_kv @ k).transpose(-1, -2) * scale).softmax(-1)
    coarse = members["pool_q"].double().T @ (weights @ (of_kv @ v))
    return out + coarse.transpose(1, 2) * gates["compress"], mask


def tensors_of(grid):
    generator = torch.Generator().manual_seed(sum(grid))
    return [torch.randn(2, math.prod(grid), 2, 4, generator=generator, dtype=torch.float64) for _ in range(5)]


def run(method, grid, tensors, topk):
    layout = method.layout([Segment(grid)], "cpu")
    leaves = [x.clone().requires_grad_() for x in tensors]
    q, k, v, *gates = (layout.permute(x) for x in leaves)
    extra = dict(zip(("fine", "compress"), gates, strict=True))
    out = layout.unpermute(method.attend_combine(q, k, v, extra, AttnContext(layout=layout, topk=KeptTiles.of(topk))))
    return out, grads_of(out, leaves)


def members_by_name(grid, options):
    q, kv = options["tile_thw"], options.get("kv_tile_thw", options["tile_thw"])
    pool = options.get("pool_thw")
    tiles = {"q": q, "kv": kv, "pool_q": pool or q, "pool_kv": pool or kv}
    return {name: members_of(grid, tile) for name, tile in tiles.items()}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", TILES)
def test_tiles_of_several_sizes_are_a_dense_mask(name, grid):
    options, topk = TILES[name], 3
    method = StagedAttention(**SIZES, **options).double()
    tensors = tensors_of(grid)
    out, grads = run(method, grid, tensors, topk)
    leaves = [x.clone().requires_grad_() for x in tensors]
    members = members_by_name(grid, options)
    how = {name: options[name] for name in ("score", "pooled_map") if name in options}
    if "score_thw" in options:
        how["score_members"] = members_of(grid, options["score_thw"])
    gates = dict(zip(("fine", "compress"), leaves[3:], strict=True))
    expected, mask = oracle(*leaves[:3], gates, topk, members, **how)
    for ours, theirs in zip((out, *grads), (expected, *grads_of(expected, leaves)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    # one tile more, and means of the tiles themselves, are noticed
    more, _ = oracle(*leaves[:3], gates, topk + 1, members, **how)
    assert not torch.allclose(out, more, atol=1e-3)
    if "pool_thw" in options or how:
        plain = {**members, "pool_q": members["q"], "pool_kv": members["kv"]}
        other, _ = oracle(*leaves[:3], gates, topk, plain)
        assert not torch.allclose(out, other, atol=1e-3)
    # top-k counts kv tiles, and pairs are what was computed
    layout = method.layout([Segment(grid)])
    assert layout.num_video_tiles == len(members["kv"])
    assert layout.num_blocks == len(members["q"])
    if grid == (4, 8, 8):
        coarse = len(members["pool_q"]) * len(members["pool_kv"])
        tokens = math.prod(grid)
        each = tokens * len(members["kv"])
        pairs = {"mass": each, "error": 2 * each, "oracle": tokens**2}.get(options.get("score"), 0)
        pairs = len(how["score_members"]) ** 2 if "score_members" in how else pairs
        assert method.pairs(layout, topk) == coarse + pairs / 2 + int(mask[0, 0].sum())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["sub-blocks", "sub-blocks in one pass", "mass", "error", "oracle"])
def test_video_sparse_attention_has_the_scores_too(name, grid):
    """Its coarse output has the means whatever the score."""
    options, tensors = TILES[name], tensors_of(grid)
    method = VideoSparseAttention(**SIZES, **options).double()
    layout = method.layout([Segment(grid)])
    leaves = [x.clone().requires_grad_() for x in tensors]
    q, k, v, *gates = (layout.permute(x) for x in leaves)
    extra = dict(zip(("gate_fine", "gate_compress"), gates, strict=True))
    seen = {}
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(3))
    out = layout.unpermute(method.attend_combine(q, k, v, extra, ctx))
    recording = AttnContext(layout=layout, topk=KeptTiles.of(3), recorder=lambda _, found: seen.update(found))
    assert torch.equal(out, layout.unpermute(method.attend_combine(q, k, v, extra, recording)))
    members = members_by_name(grid, options)
    subs = members_of(grid, options["score_thw"]) if "score_thw" in options else None
    gates = dict(zip(("fine", "compress"), leaves[3:], strict=True))
    expected, mask = oracle(*leaves[:3], gates, 3, members, score=options["score"], score_members=subs)
    for ours, theirs in zip((out, *grads_of(out, leaves)), (expected, *grads_of(expected, leaves)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert not torch.allclose(out, oracle(*leaves[:3], gates, 3, members)[0], atol=1e-3)
    # an error is no share of the attention map
    assert ("scores" in seen) == (name != "error")
    if name != "error":
        best = seen["scores"].topk(3, dim=-1).indices.sort(-1).values
        assert torch.equal(best, seen["kv_indices"][..., :3].long())
    if grid == (4, 8, 8):
        each = 256 * len(members["kv"])
        score = {"mass": each, "error": 2 * each, "oracle": 256**2}.get(name, 0 if subs is None else len(subs) ** 2)
        assert method.pairs(layout, 3) == layout.num_blocks**2 + score / 2 + int(mask[0, 0].sum())


@pytest.mark.parametrize("score", ["subblock_softmax", "subblock_lse"])
def test_sub_blocks_rank_the_tiles_of_rows_with_text(score):
    """The video's rows of a layout alone, whose lists have the text's tiles besides."""
    grid, row = (2, 4, 6), [Segment((1, 1, 5), "text"), Segment((2, 4, 6)), Segment((2, 2, 2), sample=1)]
    method = VideoSparseAttention(**SIZES, tile_thw=(2, 2, 2), score=score, score_thw=(1, 2, 1)).double()
    generator, lists = torch.Generator().manual_seed(2), {}
    q, k, v = torch.randn(3, 1, 5 + 48 + 8, 2, 4, generator=generator, dtype=torch.float64)
    for name, segments, some in (("row", row, slice(None)), ("alone", [Segment(grid)], slice(5, 53))):
        layout = method.layout(segments)
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(2), recorder=lambda _, t, name=name: lists.update({name: t}))
        method.attend(*(layout.permute(x[:, some]) for x in (q, k, v)), ctx)
    alone = lists["alone"]["kv_indices"][..., :2]
    listed = lists["row"]["kv_indices"][:, :, :6]
    assert (lists["row"]["kv_num_blocks"][:, :, :6] == 3).all()
    assert torch.equal(listed[..., 1:3] - 1, alone)
    assert (listed[..., 0] == 0).all()
    ctx = AttnContext(layout=method.layout(row), topk=KeptTiles.of(2))
    for other in ("mass", "error", "oracle", "random"):
        method.score = other
        with pytest.raises(ValueError, match=f"score={other} takes rows of one video"):
            method.attend(q, k, v, ctx)


@pytest.mark.parametrize("grid", [(4, 4, 4), (3, 5, 7)], ids=str)
def test_all_kv_tiles_are_dense_attention(grid):
    tensors = tensors_of(grid)
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])
    dense = ((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v).transpose(1, 2)
    for name, options in TILES.items():
        method = StagedAttention(**SIZES, stages="f", **{k: v for k, v in options.items() if k != "pool_thw"}).double()
        out, _ = run_fine(method, grid, tensors, 1000)
        assert torch.allclose(out, dense, atol=1e-12), name
        out, _ = run_fine(method, grid, tensors, 1)
        assert not torch.allclose(out, dense, atol=1e-3), name


def run_fine(method, grid, tensors, topk):
    tensors = [*tensors[:3], torch.ones_like(tensors[3]), tensors[4]]
    layout = method.layout([Segment(grid)], "cpu")
    q, k, v, fine, _ = (layout.permute(x) for x in tensors)
    return layout.unpermute(
        method.attend_combine(q, k, v, {"fine": fine}, AttnContext(layout=layout, topk=KeptTiles.of(topk)))
    ), None


def test_one_list_for_two_tiles_is_the_mean_of_their_scores():
    """The tile of 128 rows with full tiles: logits averaged over a pair are those of the pair's mean query."""
    grid, tensors = (4, 8, 4), tensors_of((4, 8, 4))
    pair = StagedAttention(
        **SIZES, tile_thw=(2, 4, 2), kv_tile_thw=(2, 2, 2), pool_thw=(2, 2, 2), pooled_map="logits", stages="f"
    ).double()
    whole = StagedAttention(**SIZES, tile_thw=(2, 4, 2), kv_tile_thw=(2, 2, 2), stages="f").double()
    ours, theirs = (run_fine(method, grid, tensors, 3)[0] for method in (pair, whole))
    assert torch.allclose(ours, theirs, atol=1e-12)
    alone = StagedAttention(**SIZES, tile_thw=(2, 2, 2), stages="f").double()
    assert not torch.allclose(ours, run_fine(alone, grid, tensors, 3)[0], atol=1e-3)


def test_runs_along_a_curve_are_tiles_too():
    grid, tensors = (3, 5, 7), tensors_of((3, 5, 7))
    order = hilbert_order(grid)
    members = {}
    for name, size in {"q": 16, "kv": 8, "pool_q": 16, "pool_kv": 8}.items():
        runs = order.split(size)
        members[name] = torch.zeros(len(runs), 105, dtype=torch.bool)
        for n, tokens in enumerate(runs):
            members[name][n, tokens] = True
    method = StagedAttention(**SIZES, tile_thw=(2, 2, 4), kv_tile_thw=(2, 2, 2), partition="hilbert_run").double()
    out, grads = run(method, grid, tensors, 4)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected, _ = oracle(*leaves[:3], dict(zip(("fine", "compress"), leaves[3:], strict=True)), 4, members)
    for ours, theirs in zip((out, *grads), (expected, *grads_of(expected, leaves)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    cubes = StagedAttention(**SIZES, tile_thw=(2, 2, 4), kv_tile_thw=(2, 2, 2)).double()
    assert not torch.allclose(out, run(cubes, grid, tensors, 4)[0], atol=1e-3)


@pytest.mark.parametrize("kv_tile", [(1, 2, 2), (4, 4, 4)], ids=str)
def test_a_window_counts_the_larger_tiles(kv_tile):
    grid = (4, 12, 8)
    large = max((2, 4, 4), kv_tile, key=math.prod)
    method = StagedAttention(
        **SIZES, stages="l", tile_thw=(2, 4, 4), kv_tile_thw=kv_tile, window_thw=(1, 3, 1)
    ).double()
    tensors = tensors_of(grid)
    out, _ = run_fine(method, grid, tensors, 1)
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])
    places = [tuple(n // c for n, c in zip(at, large, strict=True)) for at in itertools.product(*map(range, grid))]
    # three tiles high, so the whole height of the grid
    mask = torch.tensor([[a[0] == b[0] and a[2] == b[2] for b in places] for a in places])
    logits = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, -math.inf)
    assert torch.allclose(out, (logits.softmax(-1) @ v).transpose(1, 2), atol=1e-12)
    assert method.pairs(method.layout([Segment(grid)]), 1) == mask.sum()


def test_sub_blocks_rank_the_tiles_of_a_pooled_tail(monkeypatch):
    grid, topk, calls = (4, 4, 6), 3, []
    tensors = tensors_of(grid)
    method = PooledTail(**SIZES, tile_thw=(2, 2, 2), score="subblock_softmax", score_thw=(1, 2, 2))
    layout = method.layout([Segment(grid)])
    q, k, v = (layout.permute(x) for x in tensors[:3])
    monkeypatch.setattr(
        ruled,
        "select_blocks",
        lambda scores, *rest, **named: calls.append(scores) or select_blocks(scores, *rest, **named),
    )
    method.attend(q, k, v, AttnContext(layout=layout, topk=KeptTiles.of(topk)))
    members = {name: members_of(grid, (2, 2, 2)) for name in ("q", "kv")}
    expected = scores_of(
        *(x.transpose(1, 2) for x in tensors[:2]),
        members,
        score="subblock_softmax",
        pooled_map="",
        score_members=members_of(grid, (1, 2, 2)),
    )
    # tiles of the layout in nested order
    first = layout.order[layout.blocks.offsets[:-1].long()]
    at = torch.tensor(cube_ids(grid, (2, 2, 2)))[first]
    assert torch.allclose(calls[0], expected[:, :, at][..., at], atol=1e-12)
    assert method.pairs(layout, topk) == 96 * (topk * 8 + 12) + 24**2 / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tile_thw": (3, 4, 2)}, r"tiles must divide each other along every axis, got \(4, 4, 4\) and \(3, 4, 2\)"),
        ({"pool_thw": (4, 8, 8)}, r"pool_thw=\[4, 8, 8\] must divide tile_thw=\[4, 4, 4\]"),
        ({"kv_tile_thw": (2, 4, 2), "pool_thw": (4, 4, 4)}, r"pool_thw=.* must divide kv_tile_thw=\[2, 4, 2\]"),
        ({"score": "subblock_softmax", "score_thw": (3, 2, 2)}, r"score_thw=\[3, 2, 2\] must divide tile_thw"),
        ({"kv_tile_thw": (0, 4, 2)}, r"kv_tile_thw=\[0,4,2\]: expected"),
        ({"partition": "hilbert_run", "stages": "c_fl"}, "stages=c_fl needs partition=cube"),
        ({"partition": "raster_run", "pooling": "conv"}, "pooling=conv needs partition=cube, got raster_run"),
        (
            {"pooling": "conv", "conv_sharing": "all", "kv_tile_thw": (2, 4, 2)},
            "conv_sharing=all needs tiles of one size",
        ),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        StagedAttention(**SIZES, **options)
