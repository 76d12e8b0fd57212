"""Spread of generated latents, and the rule that stops a collapsed run."""

from __future__ import annotations

import math

import pytest
import torch

from vsa.training.distill_metrics import CollapseRule, CollapseWatch, LatentSpread, SpreadMeter


def test_spread_is_that_of_all_latents_together():
    class Alone:
        def reduce(self, tensor, reduce_op):
            return tensor

    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(3, 4, 2, 5, 6, generator=generator) * 2 + torch.arange(4).view(1, 4, 1, 1, 1) for _ in range(3)
    ]
    parts[0][0, 0, 0, 0, :3] = 50
    meter = SpreadMeter()
    assert meter.spread(Alone()) is None
    for part in parts:
        meter.add(part)
    spread, whole = meter.spread(Alone()), torch.cat(parts).double()
    channels = whole.transpose(0, 1).flatten(1)
    assert spread is not None
    assert spread.std == pytest.approx(float(channels.var(1, correction=0).mean().sqrt()))
    assert spread.mean == pytest.approx(float(channels.mean(1).square().mean().sqrt()))
    assert spread.saturation == pytest.approx(float((whole.abs() > 5).double().mean()))
    assert spread.saturation > 0


def test_rule_counts_in_a_row_only():
    rule = CollapseRule(min_std=0.2, max_std=3, max_saturation=0.1, patience=2)
    good, blank = LatentSpread(std=1, mean=0, saturation=0.01), LatentSpread(std=0.1, mean=0, saturation=0)
    wild = LatentSpread(std=4, mean=0, saturation=0)
    bright, broken = (
        LatentSpread(std=1, mean=0, saturation=0.2),
        LatentSpread(std=math.nan, mean=math.nan, saturation=0),
    )
    tinted = LatentSpread(std=1, mean=1.5, saturation=0)
    assert not rule.breaks(good)
    assert all(map(rule.breaks, (blank, wild, bright, broken, tinted)))
    watch = CollapseWatch(rule)
    assert [watch.judge(spread) for spread in (blank, good, wild, good, bright)] == [False] * 5
    assert watch.judge(broken)
    assert "2 batches in a row had latents of standard deviation nan" in watch.report(broken)
