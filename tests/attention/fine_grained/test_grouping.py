"""Groups of query tiles against Python loops, and what the paper says they are for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import BlockIndex, group_tiles

from tests.attention.fine_grained.oracle import greedy_groups, objective
from vsa.attention.fine_grained.grouping import plan_groups


def sets_of(mask):
    """Kv tiles of each row of a mask `[Nq, Nkv]`."""
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


def groups_of(members):
    """Members `[G, R]` without the places that are empty, which come last."""
    groups = [[i for i in group if i >= 0] for group in members.tolist()]
    assert [group + [-1] * (members.shape[1] - len(group)) for group in groups] == members.tolist()
    return groups


@st.composite
def masks(draw):
    heads, num_q, num_kv = draw(st.integers(1, 2)), draw(st.integers(1, 14)), draw(st.integers(1, 40))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    mask = torch.rand(1, heads, num_q, num_kv, generator=g) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    if draw(st.booleans()):
        # few kinds of rows: most distances are equal
        mask = mask[:, :, torch.randint(0, min(3, num_q), (num_q,), generator=g)]
    return mask


@settings(deadline=None, max_examples=60)
@given(masks(), st.integers(1, 8))
def test_groups_are_the_greedy_ones(mask, size):
    check_groups(mask, size)


@pytest.mark.slow
@settings(deadline=None, max_examples=2000)
@given(masks(), st.integers(1, 8))
def test_thousands_of_groups_are_the_greedy_ones(mask, size):
    check_groups(mask, size)


def check_groups(mask, size):
    members = group_tiles(mask, size, backend="reference")
    for rows, row_members in zip(mask[0], members[0], strict=True):
        assert groups_of(row_members) == greedy_groups(sets_of(rows), size)


@settings(deadline=None, max_examples=60)
@given(masks(), st.sampled_from([1, 2, 4]), st.sampled_from(["xor", "consecutive"]), st.sampled_from(["union", "tile"]))
def test_a_plan_lists_the_union_and_says_who_sees_what(mask, size, merge, attend):
    check_plan(mask, size, merge, attend)


@pytest.mark.slow
@settings(deadline=None, max_examples=2000)
@given(masks(), st.sampled_from([1, 2, 4]), st.sampled_from(["xor", "consecutive"]), st.sampled_from(["union", "tile"]))
def test_thousands_of_plans_list_the_union(mask, size, merge, attend):
    check_plan(mask, size, merge, attend)


def check_plan(mask, size, merge, attend):
    num_q, num_kv = mask.shape[2:]
    plan = plan_groups(BlockIndex.from_dense(mask), num_kv, size, merge=merge, attend=attend)
    dense = plan.to_dense(num_q, num_kv)
    assert sorted(plan.order.tolist()) == list(range(plan.kv_num_blocks.numel()))
    for h, rows in enumerate(mask[0]):
        sets, groups = sets_of(rows), groups_of(plan.members[0, h])
        if merge == "consecutive":
            assert groups == [list(range(i, min(i + size, num_q))) for i in range(0, num_q, size)]
        for g, group in enumerate(groups):
            union = set().union(*(sets[i] for i in group))
            assert plan.kv_indices[0, h, g, : plan.kv_num_blocks[0, h, g]].tolist() == sorted(union)
            for i in group:
                assert sets_of(dense[0, h])[i] == (sets[i] if attend == "tile" else union)


def interleaved(num_q, num_kv, kinds, seed):
    """Rows of a few kinds in turns, each with some noise."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.rand(kinds, num_kv, generator=g) < 0.4
    noise = torch.rand(num_q, num_kv, generator=g) < 0.05
    return kind[torch.arange(num_q) % kinds] ^ noise


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kinds", [2, 3, 5])
def test_alike_tiles_come_together(kinds, seed):
    mask = interleaved(24, 60, kinds, seed)[None, None]
    index, sets = BlockIndex.from_dense(mask), sets_of(mask[0, 0])
    cost, tile_counts = {}, {}
    for merge in ("xor", "consecutive"):
        plan = plan_groups(index, 60, 4, merge=merge)
        cost[merge] = objective(sets, groups_of(plan.members[0, 0]))
        tile_counts[merge] = int(plan.kv_num_blocks.sum())
    assert cost["xor"] < cost["consecutive"]
    assert tile_counts["xor"] < tile_counts["consecutive"]


@pytest.mark.parametrize("merge", ["xor", "consecutive"])
def test_groups_stay_in_their_sample(merge):
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    plan = plan_groups(BlockIndex.from_dense(mask), 9, 2, merge=merge, samples=(3, 5, 1))
    assert groups_of(plan.members[0, 0]) == [[0, 1], [2], [3, 4], [5, 6], [7], [8]]
