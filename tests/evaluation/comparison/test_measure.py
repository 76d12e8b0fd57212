"""Density, recall and errors against dense attention and masks by definition; bounds and identities."""

from __future__ import annotations

import math

import pytest
import torch

from tests.attention.oracle import cube_ids
from vsa.evaluation.comparison import measure as measure_module
from vsa.evaluation.comparison.captures import Capture
from vsa.evaluation.comparison.measure import Row, measure
from vsa.evaluation.comparison.methods import parse_methods
from vsa.evaluation.comparison.synthetic import draw_captures

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

TILE = (2, 2, 2)


def rows_of(capture: Capture, *methods: str, tile=TILE, **options) -> dict[str, Row]:
    rows = measure(capture, parse_methods(methods, tile_thw=tile), repeats=1, **options)
    return {row.method: row for row in rows}


def drawn(grid, *, kind="fields", heads=2, head_dim=12, seed=0) -> Capture:
    items = draw_captures(grid, heads=heads, head_dim=head_dim, seed=seed).items
    return next(item for item in items if item.name == kind)


def dense(capture: Capture) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, H, L, L] and outputs [B, L, H, D] in fp64, raster order."""
    q, k, v = (x.double().transpose(1, 2) for x in (capture.q, capture.k, capture.v))
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return weights, (weights @ v).transpose(1, 2)


def with_text(capture: Capture, before: list[int], after: list[int]) -> Capture:
    """Texts around the video, whose keys a video query attends to as much as to its own tile."""
    generator = torch.Generator().manual_seed(7)

    def around(x: torch.Tensor) -> torch.Tensor:
        pieces = (torch.randn(1, sum(n), *x.shape[2:], generator=generator) * 2 for n in (before, after))
        return torch.cat([next(pieces), x, next(pieces)], dim=1)

    q, k, v = map(around, (capture.q, capture.k, capture.v))
    return Capture(name="text", grid_thw=capture.grid_thw, q=q, k=k, v=v, before=before, after=after)


def mean_mask(capture: Capture, topk: int) -> torch.Tensor:
    """Bool [B, H, L, L]: the topk tiles by mean query times mean key, tile by tile; a text sees and is seen by all."""
    video = slice(sum(capture.before), capture.q.shape[1] - sum(capture.after))
    ids = torch.tensor(cube_ids(capture.grid_thw, TILE))
    members = torch.stack([ids == n for n in range(int(ids.max()) + 1)]).double()
    mean = members / members.sum(1, keepdim=True)
    q, k = (mean @ x[:, video].double().transpose(1, 2) for x in (capture.q, capture.k))
    scores = q @ k.transpose(-1, -2)
    selection = torch.zeros_like(scores).scatter_(-1, scores.topk(topk).indices, 1)
    mask = torch.ones(*selection.shape[:2], capture.q.shape[1], capture.q.shape[1], dtype=torch.bool)
    mask[:, :, video, video] = (members.T @ selection @ members) > 0
    return mask


@pytest.mark.parametrize(
    ("grid", "before", "after"),
    [((2, 4, 6), [], []), ((3, 5, 7), [], []), ((3, 5, 7), [6], []), ((3, 5, 7), [2, 9], [3])],
    ids=str,
)
@pytest.mark.parametrize("queries", [None, 20], ids=["all", "some"])
def test_numbers_are_those_of_dense_attention_under_the_mask(grid, before, after, queries):
    """Recall and errors of the video's queries, density of the row."""
    capture, topk, length = with_text(drawn(grid), before, after), 3, math.prod(grid)
    rows = rows_of(capture, f"video_sparse topk={topk}", queries=queries, seed=5)
    row, full = rows[f"video_sparse topk={topk}"], rows["full"]
    weights, exact = dense(capture)
    mask = mean_mask(capture, topk)
    masked_weights = weights * mask
    out = (masked_weights / masked_weights.sum(-1, keepdim=True) @ capture.v.double().transpose(1, 2)).transpose(1, 2)
    some = torch.randperm(length, generator=torch.Generator().manual_seed(5))[: queries or length] + sum(before)
    error, size = (out - exact)[:, some], exact[:, some]
    assert row.recall == pytest.approx(float(masked_weights.sum(-1)[:, :, some].mean()), abs=1e-5)
    heads = masked_weights.sum(-1)[:, :, some].mean(-1).flatten()
    assert row.head_recall == pytest.approx(heads.tolist(), abs=1e-5)
    # between the lowest of two heads and the other one
    assert row.recall_p5 == pytest.approx(float(heads.min() + 0.05 * (heads.max() - heads.min())), abs=1e-5)
    assert row.recall_p5 < row.recall - 1e-3
    assert row.density == row.visited == pytest.approx(float(mask.double().mean()))
    assert row.error_l1 == pytest.approx(float(error.abs().sum() / size.abs().sum()), rel=1e-4)
    assert row.error_l2 == pytest.approx(float(error.norm() / size.norm()), rel=1e-4)
    assert (row.topk, row.tiles) == (topk, len(set(cube_ids(grid, TILE))))
    # control: another top-k is another mask; other queries are another mean
    other = mean_mask(capture, topk + 1)
    assert abs(row.recall - float((weights * other).sum(-1)[:, :, some].mean())) > 1e-3
    if before or after:
        # control: all rows, or the video's keys alone
        video = slice(sum(before), sum(before) + length)
        assert abs(row.recall - float(masked_weights.sum(-1).mean())) > 1e-3
        assert row.recall > float(masked_weights[:, :, some, video].sum(-1).mean()) + 1e-2
    if queries is not None:
        assert abs(row.recall - float(masked_weights.sum(-1).mean())) > 1e-5
    assert (full.density, full.visited, full.recall) == (1, 1, pytest.approx(1, abs=1e-5))
    assert full.error_l1 < 1e-5
    assert (full.topk, full.tiles, full.prediction_ms) == (None, None, 0)


def test_the_parts_of_a_time_are_its_sum(monkeypatch):
    """Also where attention takes longer alone than with its prediction, as on a loaded machine."""
    times = [[1.0, 2.0], [3.0, 5.0], [4.0, 9.0], [6.0, 6.0], [2.0, 3.0]]
    monkeypatch.setattr(measure_module, "interleaved_ms", lambda calls, *args, **options: times[: len(calls)])
    rows = rows_of(drawn((4, 4, 4)), "video_sparse topk=2", "staged stages=f topk=2").values()
    assert [(row.ms, row.attention_ms, row.prediction_ms) for row in rows] == [(1.5, 1.5, 0), (4, 4, 0), (6, 2.5, 3.5)]


@pytest.mark.parametrize("grid", [(4, 4, 4), (3, 5, 7)], ids=str)
def test_all_tiles_are_dense_attention(grid):
    capture = drawn(grid)
    tiles = len(set(cube_ids(grid, TILE)))
    names = ["video_sparse", "pooled_tail", "staged stages=f", "staged stages=f score=oracle"]
    names += ["staged stages=f score=random", "staged stages=f score=mass", "staged stages=c_f score=random"]
    methods = [f"{name} topk={tiles}" for name in names]
    rows = rows_of(capture, *methods)
    for name in methods:
        row = rows[name]
        assert row.error_l2 < 1e-5, name
        assert row.recall == pytest.approx(1, abs=1e-5), name
        assert row.density == pytest.approx(1), name
        # control: one tile fewer is noticed
        fewer = name.replace(f"topk={tiles}", f"topk={tiles - 1}")
        assert rows_of(capture, fewer)[fewer].error_l2 > 1e-4, name


@pytest.mark.parametrize("grid", [(4, 8, 8), (5, 6, 9)], ids=str)
def test_oracle_and_random_tiles_are_around_every_score(grid):
    capture = drawn(grid, heads=3)
    scores = ("oracle", "subblock_softmax score_thw=[1,2,2]", "mass", "mean", "random")
    names = [f"staged stages=f score={score} sparsity=0.75" for score in scores]
    rows = rows_of(capture, *names, "pooled_tail sparsity=0.75", queries=None)
    oracle, *others, random = (rows[name] for name in names)
    assert all(oracle.recall >= row.recall - 1e-6 for row in others)
    assert all(row.recall > random.recall + 0.1 for row in others)
    assert all(row.error_l1 < random.error_l1 for row in (oracle, *others))
    # a tile at random holds its share of the mass, about
    assert random.recall == pytest.approx(random.density, abs=0.08)
    # a pooled tail selects as the mean does, and errs less
    tail, mean = rows["pooled_tail sparsity=0.75"], rows[names[3]]
    assert (tail.recall, tail.density) == (pytest.approx(mean.recall), mean.density)
    assert tail.error_l1 < mean.error_l1
    # in noise there is little to find
    noise = rows_of(drawn(grid, kind="noise", heads=3), *names, queries=None)
    assert noise[names[0]].recall - noise[names[-1]].recall < 0.5 * (oracle.recall - random.recall)


def test_methods_without_a_budget():
    capture = drawn((4, 6, 6))
    names = ("spatial_full", "strided_window groups=[[2,all,all]]", "compressed_kv pool_thw=[1,2,2]")
    rows = rows_of(capture, *names, queries=None)
    weights, _ = dense(capture)
    for name, group in zip(names, ((1, 6, 6), (2, 6, 6)), strict=False):
        ids = torch.tensor(cube_ids((4, 6, 6), group))
        mask = ids[:, None] == ids
        assert rows[name].recall == pytest.approx(float((weights * mask).sum(-1).mean()), abs=1e-5)
        assert rows[name].density == pytest.approx(float(mask.double().mean()))
    # no token is attended to
    assert (rows[names[2]].recall, rows[names[2]].head_recall, rows[names[2]].recall_p5) == (None, None, None)
    assert rows[names[2]].density == pytest.approx(0.25)
    assert rows[names[2]].error_l1 > 0.01


def test_layers_that_take_turns_are_those_of_the_capture():
    capture = drawn((2, 4, 4))
    at = {layer: Capture(**{**vars(capture), "layer": layer}) for layer in (0, 1)}
    densities = {layer: rows_of(item, "spatial_temporal")["spatial_temporal"].density for layer, item in at.items()}
    assert densities == {0: pytest.approx(1 / 2), 1: pytest.approx(1 / 16)}


def test_grouped_kv_heads():
    capture = drawn((2, 4, 4), heads=4)
    grouped = Capture(name="g", grid_thw=(2, 4, 4), q=capture.q, k=capture.k[:, :, :2], v=capture.v[:, :, :2])
    copies = {name: getattr(grouped, name).repeat_interleave(2, dim=2) for name in "kv"}
    plain = Capture(name="p", grid_thw=(2, 4, 4), q=capture.q, **copies)
    a, b = (rows_of(item, "video_sparse topk=2")["video_sparse topk=2"] for item in (grouped, plain))
    assert (a.density, a.recall) == (b.density, pytest.approx(b.recall, abs=1e-6))
    assert a.error_l1 == pytest.approx(b.error_l1, rel=1e-4)


def test_lower_precision_is_an_error_of_dense_attention_too():
    capture = drawn((2, 4, 4))
    rows = rows_of(capture, "video_sparse topk=4", dtype=torch.bfloat16)
    assert 1e-4 < rows["full"].error_l1 < 3e-2
    assert rows["full"].error_l1 < rows["video_sparse topk=4"].error_l1 + 1e-2


def test_a_top_k_above_the_tiles_is_told():
    with pytest.raises(ValueError, match=r"video_sparse topk=9: topk 9 is above the 8 tiles of \(4, 4, 4\)"):
        rows_of(drawn((4, 4, 4)), "video_sparse topk=9")
