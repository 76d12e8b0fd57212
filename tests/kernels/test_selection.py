"""`select_topk` against a sort written out in Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import select_topk

from tests.sizes import SIZES

# few values, so that ties are the rule
values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-40, math.inf, -math.inf, math.nan])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


def lists(index, row):
    count = int(index.kv_num_blocks[row])
    return index.kv_indices[row][:count].tolist()


def expected(scores, topk, candidates, always):
    def rank(j):
        # NaN last, then by falling score, then by index
        return (math.isnan(scores[j]), 0.0 if math.isnan(scores[j]) else -scores[j], j)

    compete = [j for j in range(len(scores)) if candidates[j] and not always[j]]
    best = sorted(compete, key=rank)[:topk]
    return sorted(best + [j for j in range(len(scores)) if always[j]])


@settings(max_examples=120, deadline=None)
@given(st.data(), st.integers(1, 3), SIZES.columns, dtypes)
def test_matches_a_sort(data, num_q, num_kv, dtype):
    draw = data.draw
    scores = torch.tensor(draw(st.lists(values, min_size=2 * num_q * num_kv, max_size=2 * num_q * num_kv)))
    scores = scores.to(dtype).view(2, 1, num_q, num_kv)
    topk = draw(st.integers(1, num_kv + 2) | st.lists(st.integers(1, num_kv + 2), min_size=num_q, max_size=num_q))
    masks = [
        draw(st.none() | st.lists(st.booleans(), min_size=num_q * num_kv, max_size=num_q * num_kv)) for _ in range(2)
    ]
    candidates, always = (None if m is None else torch.tensor(m).view(num_q, num_kv) for m in masks)
    rows = torch.tensor(topk, dtype=torch.int32) if isinstance(topk, list) else topk
    index = select_topk(scores, rows, candidates=candidates, always=always)
    for b in range(2):
        for n in range(num_q):
            columns = expected(
                scores[b, 0, n].tolist(),
                topk[n] if isinstance(topk, list) else topk,
                [True] * num_kv if candidates is None else candidates[n].tolist(),
                [False] * num_kv if always is None else always[n].tolist(),
            )
            assert lists(index, (b, 0, n)) == columns
            if index.max_blocks is not None:
                assert len(columns) <= index.max_blocks
            if index.min_blocks is not None:
                assert len(columns) >= index.min_blocks
    assert index.kv_indices.min() >= 0
    assert index.kv_indices.max() < num_kv


@pytest.mark.parametrize(("topk", "capacity"), [(1, 32), (32, 32), (33, 64), (65, 70), (70, 70), (999, 70)])
def test_capacity_is_padded_and_capped(topk, capacity, device):
    index = select_topk(torch.randn(1, 2, 3, 70, device=device), topk)
    assert index.kv_indices.shape == (1, 2, 3, capacity)
    assert (index.kv_num_blocks == min(topk, 70)).all()
    assert index.max_blocks == index.min_blocks == min(topk, 70)


def test_every_k_keeps_the_largest(device):
    scores = torch.randn(2, 2, 5, 40, device=device)
    for topk in range(1, 41):
        index = select_topk(scores, topk)
        mask = index.to_dense(40)
        assert (mask.sum(-1) == topk).all()
        lowest = scores.masked_fill(~mask, torch.inf).amin(-1)
        assert (lowest >= scores.masked_fill(mask, -torch.inf).amax(-1)).all()


def test_permuted_scores_are_read_by_their_shape(device):
    scores = torch.randn(2, 9, 5, 3, device=device).permute(0, 3, 2, 1)
    assert not scores.is_contiguous()
    view_index, copy_index = select_topk(scores, 4), select_topk(scores.contiguous(), 4)
    assert torch.equal(view_index.kv_indices, copy_index.kv_indices)


def test_gradients_do_not_flow(device):
    index = select_topk(torch.randn(1, 1, 3, 4, device=device, requires_grad=True), 2)
    assert not index.kv_indices.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"topk": torch.ones(4, dtype=torch.int32)}, r"topk must be an int or an int32 tensor \[3\]"),
        ({"topk": 1, "candidates": torch.ones(3, 3, dtype=torch.bool)}, r"candidates must be bool \[3, 5\]"),
        ({"topk": 1, "always": torch.ones(3, 5)}, r"always must be bool \[3, 5\]"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        select_topk(torch.zeros(1, 1, 3, 5), **arguments)
