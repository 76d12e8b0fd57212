"""Neighborhood attention as a method, against masked attention in fp64, and its special cases."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.attention.neighborhood.oracle import grid_mask, masked_attention
from tests.attention.neighborhood.test_neighborhood_mask import Setting, draw
from tests.attention.oracle import grads_of
from vsa.attention import stats
from vsa.attention.context import AttnContext, recorded_index
from vsa.attention.full import FullAttention
from vsa.attention.grouped import GroupedAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.neighborhood.method import NeighborhoodAttention, window_index
from vsa.attention.staged import StagedAttention
from vsa.evaluation.inspection.metrics import layer_metrics

SIZES = {"dim": 8, "num_heads": 2, "head_dim": 4}
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def tensors_of(length, *, kv_heads=2, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, heads, 4) for heads in (2, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul_(2) for shape in shapes]


def run(method, segments, tensors, **context):
    """Output in raster order."""
    layout = method.layout([Segment(segments)] if isinstance(segments[0], int) else segments, "cpu")
    parts = (layout.permute(x) for x in tensors)
    return layout.unpermute(
        method.attend_combine(*parts, {}, AttnContext(layout=layout, topk=KeptTiles.of(1), **context))
    )


def method_of(setting: Setting, **options):
    return NeighborhoodAttention(
        **SIZES,
        window_thw=setting.window,
        stride_thw=setting.stride,
        dilation_thw=setting.dilation,
        causal_thw=setting.causal,
        tile_thw=setting.tile,
        kv_tile_thw=setting.kv_tile,
        block_order=setting.block_order,
        **options,
    )


def segments_of(setting: Setting):
    before, after = (() if n == 0 else (Segment((1, 1, n), kind="text"),) for n in setting.text)
    return [*before, Segment(setting.grid), *after]


def row_mask(setting: Setting, mask=None):
    """The mask of the whole row: text sees and is seen by all."""
    first, video = setting.text[0], math.prod(setting.grid)
    whole = torch.ones(video + sum(setting.text), video + sum(setting.text), dtype=torch.bool)
    whole[first : first + video, first : first + video] = setting.mask if mask is None else mask
    return whole


def check_attention(setting: Setting, **options) -> None:
    segments = segments_of(setting)
    mask = row_mask(setting)
    kv_heads = random.Random(str(setting)).choice((1, 2))
    leaves = [x.requires_grad_() for x in tensors_of(len(mask), kv_heads=kv_heads)]
    out = run(method_of(setting, **options), segments, leaves)
    q, k, v = leaves
    expected = masked_attention(q, *(x.expand(-1, -1, 2, -1) for x in (k, v)), mask)
    for ours, theirs in zip((out, *grads_of(out, leaves)), (expected, *grads_of(expected, leaves)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


RAGGED = Setting((3, 5, 7), (2, 4, 3), (1, 2, 1), (1, 1, 2), (True, False, False), (2, 4, 2), None, (3, 2))
CASES = {
    "ragged, text on both sides": RAGGED,
    "kv tiles smaller": Setting((4, 6, 8), (3, 4, 4), (1, 2, 4), tile=(4, 2, 4), kv_tile=(2, 2, 2)),
    "kv tiles larger": Setting((4, 6, 5), (2, 3, 5), (2, 1, 1), tile=(1, 2, 2), kv_tile=(2, 2, 4)),
    "whole tiles, text": Setting((4, 4, 8), (2, 4, 4), (2, 4, 4), tile=(2, 2, 4), text=(0, 5)),
    "flat tiles": Setting((3, 8, 8), (1, 5, 6), tile=(1, 8, 8)),
    "one token": Setting((3, 4, 5), (1, 1, 1), tile=(2, 2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_masked_attention(name):
    check_attention(CASES[name])
    if name == "kv tiles smaller":
        check_attention(CASES[name], backend="reference")


def test_fuzzed_layers():
    for seed in range(30):
        check_attention(draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_fuzzed_layers_long(part):
    for seed in range(20000 + part * 250, 20250 + part * 250):
        check_attention(draw(seed))


def test_a_wrong_mask_is_noticed():
    leaves = [x.requires_grad_() for x in tensors_of(len(row_mask(RAGGED)))]
    expected = masked_attention(*leaves, row_mask(RAGGED))
    grads = grads_of(expected, leaves)
    changes = {"window": (2, 4, 2), "stride": (1, 1, 1), "dilation": (1, 1, 1), "causal": (False,) * 3}
    for name, value in changes.items():
        other = Setting(**{**vars(RAGGED), name: value})
        out = run(method_of(other), segments_of(RAGGED), leaves)
        assert not torch.allclose(out, expected, atol=1e-3), name
        for ours, theirs in zip(grads_of(out, leaves), grads, strict=True):
            assert not torch.allclose(ours, theirs, atol=1e-3), name
    # text that is seen by no video token
    alone = row_mask(RAGGED)
    alone[3:-2, :3] = alone[3:-2, -2:] = False
    assert not torch.allclose(masked_attention(*leaves, alone), expected, atol=1e-3)


def test_gradients_are_derivatives():
    setting = Setting((2, 1, 5), (2, 1, 3), (1, 1, 2), tile=(1, 2, 2), text=(2, 0))
    method = method_of(setting)
    leaves = [x[:, :, :1].clone().requires_grad_() for x in tensors_of(12)]
    assert torch.autograd.gradcheck(lambda *x: run(method, segments_of(setting), x), leaves, atol=1e-7)


@pytest.mark.parametrize("text", [0, 3])
@pytest.mark.parametrize("window", [(1.0, 1.0, 1.0), (3, 4, 5)])
def test_a_window_as_large_as_the_grid_is_dense_attention(window, text):
    segments = [Segment((3, 4, 5)), *([Segment((1, 1, text), kind="text")] if text else [])]
    tensors = tensors_of(60 + text)
    method = NeighborhoodAttention(**SIZES, window_thw=window, stride_thw=(1, 1, 4))
    dense = FullAttention(**SIZES)
    assert torch.equal(run(method, segments, tensors), run(dense, segments, tensors))
    layout = method.layout(segments)
    assert layout.is_identity
    assert method.pairs(layout, 1) == dense.pairs(dense.layout(segments), 1) == (60 + text) ** 2
    # a causal axis is no dense attention, nor is a window that is a key shorter
    for options in ({"window_thw": window, "causal_thw": (False, True, False)}, {"window_thw": (3, 4, 4)}):
        other = run(NeighborhoodAttention(**SIZES, **options), segments, tensors)
        assert not torch.allclose(other, run(dense, segments, tensors), atol=1e-3)


@pytest.mark.parametrize("tile", [None, (2, 2, 4), (1, 3, 2)])
def test_a_stride_of_the_window_is_blocked_attention(tile):
    grid, window, tensors = (4, 6, 8), (2, 3, 4), tensors_of(192)
    blocked = NeighborhoodAttention(**SIZES, window_thw=window, stride_thw=window, tile_thw=tile)
    groups = GroupedAttention(**SIZES, groups=[window])
    expected = run(groups, grid, tensors)
    assert torch.allclose(run(blocked, grid, tensors), expected, atol=1e-12)
    sliding = NeighborhoodAttention(**SIZES, window_thw=window, tile_thw=tile)
    assert not torch.allclose(run(sliding, grid, tensors), expected, atol=1e-3)
    # a short last block looks back: 2 of its 4 keys are those of the block before
    ragged = NeighborhoodAttention(**SIZES, window_thw=(1, 1, 4), stride_thw=(1, 1, 4), tile_thw=tile)
    expected = masked_attention(*tensors_of(10), torch.block_diag(*[torch.ones(4, 4)] * 2, torch.ones(2, 2)).bool())
    ours = run(ragged, (1, 1, 10), tensors_of(10))
    assert torch.allclose(ours[:, :8], expected[:, :8], atol=1e-12)
    assert not torch.allclose(ours[:, 8:], expected[:, 8:], atol=1e-3)


@pytest.mark.parametrize("windows", [(3, 3, 3), (1, 3, 1), (3, 1, 5)])
def test_a_stride_of_the_tile_is_sliding_tile_attention(windows):
    grid, tile, tensors = (6, 6, 20), (2, 2, 4), tensors_of(720)
    window = tuple(k * t for k, t in zip(windows, tile, strict=True))
    ours = NeighborhoodAttention(**SIZES, window_thw=window, stride_thw=tile, tile_thw=tile)
    tiles = StagedAttention(
        **SIZES, stages="l", tile_thw=tile, window_thw=windows, window_edge="clamp", fine_gate=False
    )
    expected = run(tiles, grid, tensors)
    assert torch.allclose(run(ours, grid, tensors), expected, atol=1e-12)
    # nothing to mask, and the same work
    layout = ours.layout([Segment(grid)])
    assert layout.derive(window_index, ours.rules).mask_bits is None
    assert ours.pairs(layout, 1) == tiles.pairs(tiles.layout([Segment(grid)]), 1) == 720 * math.prod(window)
    other = NeighborhoodAttention(**SIZES, window_thw=window, stride_thw=(1, 1, 1), tile_thw=tile)
    if windows != (1, 3, 1):
        assert not torch.allclose(run(other, grid, tensors), expected, atol=1e-3)


def test_dilation_is_attention_inside_groups():
    grid, dilation, tensors = (4, 6, 7), (2, 1, 3), tensors_of(168)
    out = run(NeighborhoodAttention(**SIZES, window_thw=(2, 3, 2), dilation_thw=dilation), grid, tensors)
    grids = [x.unflatten(1, grid) for x in tensors]
    for t in range(2):
        for w in range(3):
            parts = [x[:, t::2, :, w::3].contiguous() for x in grids]
            small = parts[0].shape[1:4]
            plain = NeighborhoodAttention(**SIZES, window_thw=(2, 3, 2), tile_thw=(1, 2, 2))
            alone = run(plain, tuple(small), [x.flatten(1, 3) for x in parts]).unflatten(1, small)
            assert torch.allclose(out.unflatten(1, grid)[:, t::2, :, w::3], alone, atol=1e-12)


def test_pairs_are_those_of_visited_tiles():
    method = NeighborhoodAttention(**SIZES, window_thw=(1, 1, 3), tile_thw=(1, 1, 4))
    # 10 tokens in tiles of 4, 4 and 2 that see their neighbours
    layout = method.layout([Segment((1, 1, 10))])
    assert method.pairs(layout, 1) == method.pairs(layout, 7) == 4 * 8 + 4 * 10 + 2 * 6
    text = [Segment((1, 1, 10)), Segment((1, 1, 3), kind="text")]
    assert method.pairs(method.layout(text), 1) == 84 + 10 * 3 + 3 * 13


def test_what_a_recorder_gets():
    setting = Setting((3, 5, 7), (2, 4, 3), (1, 2, 1), tile=(2, 4, 2))
    tensors, calls, method = tensors_of(105), [], method_of(setting, layer_idx=3)
    out = run(method, setting.grid, tensors, recorder=lambda layer, records: calls.append((layer, records)))
    assert torch.equal(out, run(method, setting.grid, tensors))
    [(layer, records)] = calls
    layout = method.layout([Segment(setting.grid)])
    assert layer == 3
    assert torch.equal(layout.unpermute(records["fine"]), out)
    density = stats.density(recorded_index(records), layout.blocks, layout.kv_blocks)
    assert density.item() == pytest.approx(setting.mask.double().mean().item(), abs=1e-12)
    # the tiles alone are more
    tiles = {name: records[name] for name in ("kv_indices", "kv_num_blocks")}
    assert (
        stats.density(recorded_index(tiles), layout.blocks, layout.kv_blocks)
        == method.pairs(layout, 1) / 105**2
        > density
    )
    q, k, _ = (x.transpose(1, 2) for x in tensors)
    weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
    tokens = torch.tensor([0, 17, 50, 104])
    recall = layer_metrics(records, layout, tokens, None)
    rows = layout.order[tokens]
    expected = (weights * setting.mask).sum(-1)[..., rows].mean()
    assert recall["recall"].item() == pytest.approx(expected.item(), abs=1e-6)
    assert recall["recall_random"].item() == pytest.approx(setting.mask[rows].double().mean().item(), abs=1e-6)
    # control: the recall of whole tiles is higher
    whole = {name: records[name] for name in (*tiles, "q", "k", "fine")}
    assert layer_metrics(whole, layout, tokens, None)["recall"] > recall["recall"] + 1e-3


def test_layers_of_one_grid_share_their_index():
    options = {**SIZES, "window_thw": (2, 0.5, 3), "tile_thw": (2, 2, 2)}
    first, second = (NeighborhoodAttention(**options, layer_idx=i) for i in range(2))
    layout = first.layout([Segment((3, 5, 7))])
    entries = dict(layout.derived)
    assert second.layout([Segment((3, 5, 7))]) is layout
    assert layout.derived == entries
    # one token is not the whole axis
    for window in (1, 1.0):
        third = NeighborhoodAttention(**{**options, "window_thw": (window, 2, 2)})
        mask = grid_mask((3, 5, 7), (3 if window == 1.0 and isinstance(window, float) else 1, 2, 2), (1, 1, 1))
        tensors = tensors_of(105)
        assert torch.allclose(run(third, (3, 5, 7), tensors), masked_attention(*tensors, mask), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_thw": (0, 2, 2)}, r"window_thw=\[0,2,2\]: expected"),
        ({"window_thw": (1.5, 2, 2)}, r"window_thw=\[1\.5,2,2\]: expected"),
        ({"window_thw": (2, 2)}, r"window_thw=\[2,2\]: expected"),
        ({"causal_thw": (1, 0, 0)}, r"causal_thw=\[1,0,0\]: expected"),
        ({"dilation_thw": (1, 1, 0.5)}, r"dilation_thw=\[1,1,0\.5\]: expected"),
        ({"stride_thw": (1, 3, 1)}, "^stride of height must be at most its window 2, got 3"),
        ({"kv_tile_thw": (2, 2, 2)}, r"^kv_tile_thw=\[2, 2, 2\] needs a tile_thw"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        NeighborhoodAttention(**SIZES, **{"window_thw": (2, 2, 2), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_thw": (5, 2, 2)}, "^window of time must be at most its 4 tokens, got 5"),
        ({"window_thw": (2, 2, 2), "dilation_thw": (1, 1, 4)}, r"^dilation 4 of width does not fit: window 2 \* 4 is"),
        ({"window_thw": (2, 0.2, 2), "stride_thw": (1, 9, 1)}, "^stride of height must be at most its window 1, got 9"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(options, message):
    method = NeighborhoodAttention(**SIZES, **options)
    with pytest.raises(ValueError, match=message):
        method.layout([Segment((4, 6, 6))])


def test_rows_of_several_clips_are_refused():
    method = NeighborhoodAttention(**SIZES, window_thw=(2, 2, 2))
    with pytest.raises(ValueError, match="neighborhood attention takes rows of one video and its text"):
        method.layout([Segment((2, 2, 2)), Segment((2, 2, 2), sample=1)])
