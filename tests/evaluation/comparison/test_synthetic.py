"""Drawn fields have the structure they are said to have, noise has none."""

from __future__ import annotations

import pytest
import torch

from vsa.evaluation.comparison.synthetic import LOGIT_STD, draw_captures


def test_fields_are_alike_nearby_and_noise_is_not():
    fields, noise = draw_captures((4, 12, 12), heads=3, head_dim=24).items
    assert (fields.name, noise.name) == ("fields", "noise")
    for item in (fields, noise):
        assert all(x.shape == (1, 576, 3, 24) and x.dtype == torch.float32 for x in (item.q, item.k, item.v))
    # values of neighbours along the width, of places far away, and of noise
    v = fields.v.view(4, 12, 12, 3, 24)
    near = torch.nn.functional.cosine_similarity(v[:, :, 1:], v[:, :, :-1], dim=-1).mean((0, 1, 2))
    far = torch.nn.functional.cosine_similarity(v[:, :, 6:], v[:, :, :-6], dim=-1).mean((0, 1, 2))
    # half of a value is noise, and wider fields change less
    assert (near > far + 0.1).all()
    assert near[0] < near[1] < near[2] < 0.6
    u = noise.v.view(4, 12, 12, 3, 24)
    assert torch.nn.functional.cosine_similarity(u[:, :, 1:], u[:, :, :-1], dim=-1).mean().abs() < 0.02
    # variance is the same in the middle and at a border
    assert float(v[:, 0].var() / v[:, 6].var()) == pytest.approx(1, abs=0.25)


def test_attention_prefers_what_is_near_and_keeps_some_far():
    fields, noise = draw_captures((4, 12, 12), heads=3, head_dim=24).items
    places = torch.cartesian_prod(torch.arange(4), torch.arange(12), torch.arange(12))
    near = ((places[:, None] - places).abs() <= 2).all(-1)
    shares = {}
    for item in (fields, noise):
        q, k = (x.transpose(1, 2) for x in (item.q, item.k))
        logits = q @ k.transpose(-1, -2) / 24**0.5
        shares[item.name] = float((logits.softmax(-1) * near).sum(-1).mean())
        expected = LOGIT_STD if item.name == "fields" else 1
        assert float(logits.std(dim=(-2, -1)).mean()) == pytest.approx(expected, rel=0.15)
    assert shares["fields"] > 2 * float(near.float().mean()) > 0
    assert shares["fields"] < 0.9
    assert shares["noise"] == pytest.approx(float(near.float().mean()), rel=0.1)


def test_a_seed_gives_the_same_fields():
    a, b, c = (draw_captures((2, 3, 5), heads=2, head_dim=6, seed=seed).items for seed in (1, 1, 2))
    for x, y, z in zip(a, b, c, strict=True):
        assert torch.equal(x.q, y.q)
        assert torch.equal(x.v, y.v)
        assert not torch.allclose(x.q, z.q)


def test_bad_sizes():
    with pytest.raises(ValueError, match="attention_head_dim must be even and at least 6 for 3-D RoPE, got 7"):
        draw_captures((2, 2, 2), heads=1, head_dim=7)
    with pytest.raises(ValueError, match=r"sizes must be at least 1, got grid \(2, 0, 2\)"):
        draw_captures((2, 0, 2), heads=1, head_dim=8)
