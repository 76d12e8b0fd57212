"""Attention with a pooled tail against a softmax written out over tokens and tiles, in fp64."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from vsa_kernels import BlockIndex

from tests.attention.oracle import cube_ids, grads_of
from vsa.attention.context import AttnContext, recorded_index
from vsa.attention.full import dense_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.pooled_tail import PooledTail

SIZES = {"dim": 16, "num_heads": 4, "head_dim": 4}
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def oracle(q, k, v, *, grid, tile, topk, order, score, tail="excluded"):
    """Raster order; one row of logits per token: every token of the selected tiles, then every tile of the tail."""
    absent = {"excluded": lambda rows: rows, "double_count": torch.zeros_like, "none": torch.ones_like}[tail]
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    ids = torch.tensor(cube_ids(grid, tile))
    members = [(ids == n).nonzero()[:, 0] for n in range(int(ids.max()) + 1)]
    mean_k = torch.stack([k[:, :, m].mean(2) for m in members], 2)
    mean_v = torch.stack([v[:, :, m].mean(2) for m in members], 2)
    sizes = torch.tensor([len(m) for m in members], dtype=q.dtype)
    tail = scale * q @ mean_k.transpose(-1, -2) + sizes.log()
    if order == 2:
        var = torch.stack([k[:, :, m].var(2, correction=0) for m in members], 2)
        tail = tail + scale**2 / 2 * q.square() @ var.transpose(-1, -2)
    if score == "mass":
        ranks = torch.stack([tail.softmax(-1)[:, :, m].mean(2) for m in members], 2)
    else:
        ranks = torch.stack([q[:, :, m].mean(2) for m in members], 2) @ mean_k.transpose(-1, -2)
    selection = torch.zeros_like(ranks, dtype=torch.bool).scatter_(
        -1, ranks.topk(min(topk, len(members))).indices, True
    )
    rows = selection[:, :, ids]
    logits = (scale * q @ k.transpose(-1, -2)).masked_fill(~rows[..., ids], -math.inf)
    both = torch.cat((logits, tail.masked_fill(absent(rows), -math.inf)), -1).softmax(-1)
    return (both @ torch.cat((v, mean_v), 2)).transpose(1, 2)


def run(method, grid, qkv, topk):
    layout = method.layout([Segment(grid)], "cpu")
    leaves = [x.clone().requires_grad_() for x in qkv]
    q, k, v = (layout.permute(x) for x in leaves)
    out = layout.unpermute(method.attend_combine(q, k, v, {}, AttnContext(layout=layout, topk=KeptTiles.of(topk))))
    return out, grads_of(out, leaves)


def random_qkv(grid, kv_heads=4):
    generator = torch.Generator().manual_seed(sum(grid))
    shape = (2, math.prod(grid))
    return [torch.randn(*shape, h, 4, generator=generator, dtype=torch.float64) for h in (4, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("grid", [(4, 4, 6), (3, 5, 4)], ids=str)
@pytest.mark.parametrize("score", ["mean", "mass"])
@pytest.mark.parametrize("order", [1, 2])
def test_it_is_one_softmax_over_tokens_and_tiles(order, score, grid, kv_heads):
    qkv = random_qkv(grid, kv_heads)
    method = PooledTail(**SIZES, tile_thw=(2, 2, 2), order=order, score=score)
    out, grads = run(method, grid, qkv, 3)
    leaves = [x.clone().requires_grad_() for x in qkv]
    definition = {"grid": grid, "tile": (2, 2, 2), "topk": 3}
    expected = oracle(*leaves, **definition, order=order, score=score)
    for ours, theirs in zip((out, *grads), (expected, *grads_of(expected, leaves)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-11)
    # the other order and other scores are noticed
    assert not torch.allclose(out, oracle(*qkv, **definition, order=3 - order, score=score), atol=1e-4)
    other = {"mean": "mass", "mass": "mean"}[score]
    assert not torch.allclose(out, oracle(*qkv, **definition, order=order, score=other), atol=1e-4)


def masks_of(q, k, grid, tile, node, topk):
    """Selected tiles [B, H, N, N] and open nodes [B, H, N, M], the tile rows and node rows of tokens, all by ids."""
    tiles, nodes = (torch.tensor(cube_ids(grid, size)) for size in (tile, node))
    in_tile = torch.stack([tiles == n for n in range(int(tiles.max()) + 1)]).double()
    in_node = torch.stack([nodes == n for n in range(int(nodes.max()) + 1)]).double()
    node_of = torch.stack([nodes[row > 0][0] for row in in_tile])
    means = lambda x, rows: (rows / rows.sum(1, keepdim=True)) @ x  # noqa: E731
    best = lambda x: torch.zeros_like(x).scatter(-1, x.topk(min(topk, x.shape[-1])).indices, 1.0) > 0  # noqa: E731
    opened = best(means(q, in_node) @ means(k, in_node).transpose(-1, -2))[:, :, node_of]
    ranks = means(q, in_tile) @ means(k, in_tile).transpose(-1, -2)
    return best(ranks.masked_fill(~opened[..., node_of], -math.inf)), opened, in_tile, in_node, node_of


def two_levels(q, k, v, *, grid, tile, node, topk, tail):
    """Raster order; tokens of selected tiles, tiles of open nodes, nodes."""
    q, k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    selected, opened, in_tile, in_node, node_of = masks_of(q, k, grid, tile, node, topk)
    logits, values = [], []
    closed = torch.ones_like(opened) if tail == "double_count" else ~opened
    of_tiles = opened[..., node_of] if tail == "double_count" else opened[..., node_of] & ~selected
    for rows, seen in (
        (torch.eye(q.shape[2]).to(q), selected.double() @ in_tile > 0),
        (in_tile, of_tiles),
        (in_node, closed),
    ):
        mean = rows / rows.sum(1, keepdim=True)
        seen = (in_tile.T @ seen.double()) > 0
        logits.append((scale * q @ (mean @ k).transpose(-1, -2) + rows.sum(1).log()).masked_fill(~seen, -math.inf))
        values.append(mean @ v)
    return (torch.cat(logits, -1).softmax(-1) @ torch.cat(values, 2)).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("grid", [(4, 4, 6), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("tail", ["excluded", "double_count"])
def test_two_levels_are_one_softmax_over_tokens_tiles_and_nodes(tail, grid, kv_heads):
    """A node that is not open stands for all of its tiles; LLSA has the tail of every level whole."""
    qkv = random_qkv(grid, kv_heads)
    definition = {"grid": grid, "tile": (1, 2, 2), "node": (2, 4, 2), "topk": 3}
    method = PooledTail(**SIZES, tile_thw=(1, 2, 2), node_thw=(2, 4, 2), levels=2, tail=tail)
    out, grads = run(method, grid, qkv, 3)
    leaves = [x.clone().requires_grad_() for x in qkv]
    expected = two_levels(*leaves, **definition, tail=tail)
    for ours, theirs in zip((out, *grads), (expected, *grads_of(expected, leaves)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-11)
    other = {"excluded": "double_count", "double_count": "excluded"}[tail]
    assert not torch.allclose(out, two_levels(*qkv, **definition, tail=other), atol=1e-3)
    flat, _ = run(PooledTail(**SIZES, tile_thw=(1, 2, 2), tail=tail), grid, qkv, 3)
    assert not torch.allclose(out, flat, atol=1e-3)
    # all tiles are dense attention, unless they count again in the means
    every, _ = run(method, grid, qkv, 1000)
    assert torch.allclose(every, dense_attn(*qkv), atol=1e-12) == (tail == "excluded")


def test_a_reused_selection_opens_the_nodes_of_its_tiles():
    """Every token then counts once still: with equal values the output is that value, with equal keys the mean."""
    grid = (4, 4, 6)
    method = PooledTail(**SIZES, tile_thw=(1, 2, 2), node_thw=(2, 4, 2), levels=2)
    layout = method.layout([Segment(grid)])
    q, _, v = random_qkv(grid)
    index = BlockIndex.from_dense(torch.rand(2, 4, 24, 24, generator=torch.Generator().manual_seed(1)) < 0.1)
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(2), selection=index)
    out = method.attend(q, torch.zeros_like(q), v, ctx)["out"]
    assert torch.allclose(out, v.mean(1, keepdim=True).expand_as(v), atol=1e-12)


@pytest.mark.parametrize("tail", ["double_count", "none"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_tail_that_counts_twice_and_none(tail, kv_heads):
    """With order 2 too where there is a tail; the selection is the same."""
    grid = (3, 5, 4)
    for order in (1, 2) if tail == "double_count" else (1,):
        qkv = random_qkv(grid, kv_heads)
        out, grads = run(PooledTail(**SIZES, tile_thw=(2, 2, 2), order=order, tail=tail), grid, qkv, 3)
        leaves = [x.clone().requires_grad_() for x in qkv]
        definition = {"grid": grid, "tile": (2, 2, 2), "topk": 3, "order": order, "score": "mean"}
        expected = oracle(*leaves, **definition, tail=tail)
        for ours, theirs in zip((out, *grads), (expected, *grads_of(expected, leaves)), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-11)
        assert not torch.allclose(out, oracle(*qkv, **definition), atol=1e-3)


@pytest.mark.parametrize("order", [1, 2])
def test_all_tiles_and_tiles_of_one_token_are_dense_attention(order):
    grid = (3, 4, 4)
    qkv = random_qkv(grid)
    leaves = [x.clone().requires_grad_() for x in qkv]
    dense = dense_attn(*leaves)
    expected = (dense, *grads_of(dense, leaves))
    for tile, topk in (((2, 2, 2), 1000), ((1, 1, 1), 5)):
        out, grads = run(PooledTail(**SIZES, tile_thw=tile, order=order), grid, qkv, topk)
        for ours, theirs in zip((out, *grads), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12)
    out, _ = run(PooledTail(**SIZES, tile_thw=(2, 2, 2), order=order), grid, qkv, 2)
    assert not torch.allclose(out, expected[0], atol=1e-3)


def test_the_second_order_is_nearer_to_dense_attention():
    """Keys are normal inside a tile, so the logarithm of their mean exponential is quadratic; spreads differ."""
    torch.manual_seed(0)
    grid = (8, 8, 8)
    q, k, v = torch.randn(3, 1, 512, 4, 4, dtype=torch.float64).unbind(0)
    # the later frames' tiles
    k = torch.cat((k[:, :256] * 0.2, k[:, 256:] * 1.5), dim=1)
    errors = []
    for order in (1, 2):
        out, _ = run(PooledTail(**SIZES, order=order), grid, (q, k, v), 1)
        errors.append((out - dense_attn(q, k, v)).square().mean().sqrt())
    assert errors[1] < 0.9 * errors[0]


ROWS = {
    "text": [Segment((1, 1, 5), "text"), Segment((3, 4, 6))],
    "two videos": [Segment((2, 4, 4)), Segment((1, 1, 3), "text", 1), Segment((2, 5, 4), "video", 1)],
}


@pytest.mark.parametrize("score", ["mean", "subblock_softmax"])
@pytest.mark.parametrize("tail", ["excluded", "double_count", "none"])
@pytest.mark.parametrize("row", ROWS)
def test_rows_with_text_and_of_several_videos(row, tail, score):
    sizes = {"dim": 8, "num_heads": 2, "head_dim": 4}
    method = PooledTail(**sizes, tile_thw=(2, 2, 4), score=score, score_thw=(1, 2, 2), tail=tail)
    layout = method.layout(ROWS[row], "cpu")
    generator = torch.Generator().manual_seed(0)
    size = (1, layout.num_tokens, 2, 4)
    leaves = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    recorded = {}
    for topk in (2, layout.num_video_tiles):
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk), recorder=lambda _, tensors: recorded.update(tensors))
        out = method.attend(*leaves, ctx)["out"]
        torch.testing.assert_close(out, expected := by_sample(leaves, recorded, layout, tail), rtol=1e-9, atol=1e-10)
        for grad, want in zip(grads_of(out, leaves), grads_of(expected, leaves), strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-10)
        parts = recorded["fine"] + (recorded["tail"] if tail != "none" else 0)
        torch.testing.assert_close(parts, out.detach(), rtol=1e-9, atol=1e-10)
        # the same without a recorder
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk))
        torch.testing.assert_close(method.attend(*leaves, ctx)["out"], out, rtol=1e-9, atol=1e-10)


def by_sample(leaves, recorded, layout, tail):
    """Token by token in tile-major order: text sees its sample, a video token its text, its listed tiles and the tail
    of its sample's video tiles."""
    q, k, v = (x.transpose(1, 2) for x in leaves)
    starts = layout.blocks.offsets.tolist()
    text = [any(a <= start < b for a, b, _ in layout.text_spans) for start in starts[:-1]]
    sample = [next(i for i, (a, b) in enumerate(layout.sample_spans) if a <= start < b) for start in starts[:-1]]
    listed = recorded_index(recorded).to_dense(layout.blocks.num)
    means = [[x[:, :, a:b].mean(2) for a, b in pairwise(starts)] for x in (k, v)]
    out, row = torch.zeros_like(q), 0
    for i, (first, last) in enumerate(pairwise(starts)):
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            keys, values, bias = [], [], []
            for j, (start, stop) in enumerate(pairwise(starts)):
                if sample[i] != sample[j]:
                    continue
                shown = text[i] or bool(listed[b % listed.shape[0], h % listed.shape[1], row, j])
                if shown:
                    keys += [k[b, h, start:stop]]
                    values += [v[b, h, start:stop]]
                    bias += [torch.zeros(stop - start, dtype=q.dtype)]
                pooled = tail == "double_count" or (tail == "excluded" and not shown)
                if pooled and not text[i] and not text[j]:
                    keys += [means[0][j][b, h][None]]
                    values += [means[1][j][b, h][None]]
                    bias += [torch.tensor([math.log(stop - start)], dtype=q.dtype)]
            logits = q[b, h, first:last] @ torch.cat(keys).T / 2 + torch.cat(bias)
            out[b, h, first:last] = logits.softmax(-1) @ torch.cat(values)
        row += not text[i]
    return out.transpose(1, 2)


def test_pairs_and_bad_input():
    method = PooledTail(**SIZES)
    layout = method.layout([Segment((8, 8, 8))])
    assert method.pairs(layout, 2) == 512 * (2 * 64 + 8)
    assert PooledTail(**SIZES, order=2).pairs(layout, 2) == 512 * (2 * 64 + 8 + 4)
    # no tail is no pair of it, and both levels are computed for every token
    assert PooledTail(**SIZES, tail="none").pairs(layout, 2) == 512 * 2 * 64
    assert PooledTail(**SIZES, tail="none", score="mass").pairs(layout, 2) == 512 * (2 * 64 + 4)
    # the eager tail has logits that the score takes
    assert PooledTail(**SIZES, score="error").pairs(layout, 2) == 512 * (2 * 64 + 8 + 8)
    assert PooledTail(**SIZES, score="error", order=2).pairs(layout, 2) == 512 * (2 * 64 + 12 + 4)
    two = PooledTail(**SIZES, levels=2, node_thw=(4, 8, 8), tail="double_count")
    assert two.pairs(two.layout([Segment((8, 8, 8))]), 2) == 512 * (2 * 64 + 8 + 2)
    assert PooledTail(**SIZES, tile_thw=(2, 4, 4)).node_thw == (4, 16, 16)
    for options in ({"order": 2}, {"levels": 2}):
        with pytest.raises(ValueError, match=r"(order|levels)=2 needs a tail, got tail=none"):
            PooledTail(**SIZES, tail="none", **options)
    with pytest.raises(ValueError, match="levels=2 needs rule=topk, got rule=top_p"):
        PooledTail(**SIZES, levels=2, rule="top_p", top_p=0.5)
    with pytest.raises(ValueError, match=r"tile_thw=\[4, 4, 4\] must divide node_thw=\[4, 6, 4\]"):
        PooledTail(**SIZES, levels=2, node_thw=(4, 6, 4))
    with pytest.raises(ValueError, match="order=3: expected one of 1, 2"):
        PooledTail(**SIZES, order=3)
    row = method.layout([Segment((4, 4, 4)), Segment((1, 1, 3), "text")])
    assert method.pairs(row, 1) == 64 * (64 + 3 + 1) + 3 * 67
    method = PooledTail(**SIZES, order=2)
    with pytest.raises(ValueError, match="takes rows of one video"):
        method.attend(*[torch.zeros(1, 67, 4, 4)] * 3, AttnContext(layout=row, topk=KeptTiles.of(1)))
