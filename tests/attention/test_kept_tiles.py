"""Numbers of kept tiles by layer, range, step and sample against their definitions; expected shares in FLOPs."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vsa.attention.fine_grained.method import FineGrainedAttention
from vsa.attention.kept_tiles import Budget, KeptTiles
from vsa.models.video_dit import VideoDiT

LAYERS = 3
ROWS = st.integers(1, 99).map(lambda k: (k,)) | st.tuples(*[st.integers(1, 99)] * LAYERS)


@st.composite
def changing(draw) -> KeptTiles:
    borders = sorted(draw(st.sets(st.integers(0, 20), max_size=6)))
    ranges = [(a / 20, b / 20, draw(ROWS)) for a, b in zip(borders[::2], borders[1::2], strict=False)]
    steps = [(step, draw(ROWS)) for step in sorted(draw(st.sets(st.integers(0, 9), max_size=3)))]
    return KeptTiles(draw(ROWS), tuple(draw(st.permutations(ranges))), tuple(steps))


def by_definition(topk: KeptTiles, progress: Fraction, step: int | None = None) -> tuple[float, ...]:
    row = topk.layers
    for start, stop, layers in topk.ranges:
        if Fraction(str(start)) <= progress < Fraction(str(stop)):
            row = layers
    for start, layers in topk.steps:
        if step is not None and step >= start:
            row = layers
    return row * LAYERS if len(row) == 1 else row


@given(changing(), st.lists(st.integers(0, 1000), min_size=1, max_size=7), st.none() | st.integers(0, 12))
def test_numbers_at_a_moment_of_samples_and_in_the_mean(topk, timesteps, step):
    moments = [Fraction(1000 - t, 1000) for t in timesteps]
    for t, moment in zip(timesteps, moments, strict=True):
        assert topk.at((1000 - t) / 1000, step).by_layer(LAYERS) == by_definition(topk, moment, step)
    rows = [by_definition(topk, moment) for moment in moments]
    kept = topk.at_timesteps(torch.tensor(timesteps).float(), LAYERS)
    assert (kept.samples is None) == (not topk.ranges)
    for layer in range(LAYERS):
        one, own = kept.layer(layer), [row[layer] for row in rows]
        assert [one.count] * len(own) == own if one.samples is None else one.samples.tolist() == own
        assert one.count >= max(own)

    def share(start: float, stop: float) -> float:
        return sum(Fraction(str(start)) <= m < Fraction(str(stop)) for m in moments) / len(moments)

    means = [sum(row[layer] for row in rows) / len(rows) for layer in range(LAYERS)]
    assert topk.expected(share).by_layer(LAYERS) == pytest.approx(means, rel=1e-12)
    assert topk.expected(lambda start, stop: 0.0).by_layer(LAYERS) == by_definition(KeptTiles(topk.layers), moments[0])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 40), st.none() | st.integers(1, 40))
def test_fewer_tiles_of_one_layer(counts, fewer, every):
    expected = [k if every is not None and k >= every else max(1, k - fewer) for k in counts]
    samples = torch.tensor(counts, dtype=torch.int32)
    less = KeptTiles((max(counts),), samples=samples).less(fewer, all_tiles=every)
    assert less.samples.tolist() == expected
    assert [KeptTiles.of(k).less(fewer, all_tiles=every).count for k in counts] == expected
    assert less.count == KeptTiles.of(max(counts)).less(fewer, all_tiles=every).count


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KeptTiles.of([1, 2]).by_layer(3), r"one int or one per layer \(3\), got \[1, 2\]"),
        (lambda: KeptTiles.of([1, 0, 3]).by_layer(3), r"topk must be at least 1, .* got \[1, 0, 3\]"),
        (lambda: Budget(topk=9).check(8), "topk=9 is above the number of tiles, 8"),
        (lambda: Budget(sparsity=0.9).check(8), "sparsity=0.9 leaves less than one of 8 tiles, at most 0.875"),
    ],
)
def test_what_no_grid_or_model_can_give(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    Budget(topk=8).check(8)
    Budget(sparsity="0.875").check(8)
    # a single tile is always kept
    Budget(topk=9).check(1)


def test_flops_of_a_rule_without_a_fixed_count_take_an_expected_share():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 48, "text_dim": 8, "freq_dim": 16}
    model = VideoDiT(**sizes, num_layers=2, attention=FineGrainedAttention)
    shape, tokens = (16, 5, 14, 18), 5 * 7 * 9
    tiles = model.layout_for(shape).num_video_tiles
    assert tiles == math.ceil(tokens / 64)
    bound = model.flops(shape)
    assert bound == model.flops(shape, KeptTiles.of(tiles))
    for share in (0.25, 0.5):
        count = model.flops(shape, KeptTiles.of(share * tiles))
        assert count.self_attention == pytest.approx(share * bound.self_attention, rel=1e-12)
        assert bound.executed - count.executed == pytest.approx((1 - share) * bound.self_attention, rel=1e-9)
        assert count.dense_equivalent == bound.dense_equivalent
    by_layer = model.flops(shape, KeptTiles((0.25 * tiles, 0.5 * tiles)))
    assert by_layer.self_attention == pytest.approx(0.375 * bound.self_attention, rel=1e-12)
