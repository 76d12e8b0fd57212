"""Row rules against their definitions in plain Python and exact fractions."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import select_topk

from tests.sizes import SIZES
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.selection import (
    RowRule,
    Shares,
    select_blocks,
    sparge_top_p,
)

WEIGHTS = [Fraction(1, 2**n) for n in range(7)]
"""Dyadic weights: their logarithms give a softmax whose sums are exact, with many ties."""


def keeps(crossing, before, reached, wanted):
    return {"keep": before < wanted, "drop": reached <= wanted, "exceed": before <= wanted}[crossing]


def kept_by_definition(heads, rule, compete, first):
    """Set of (head, row, column) that the rule keeps; heads: rows of fractions of each head, masks: rows of all heads.

    One list of candidates for everything that competes, sorted: the best of every row, then `first`, then the others.
    """
    rows, columns = len(heads[0]), len(heads[0][0])
    places = [(h, i) for h in range(len(heads)) for i in range(rows)]
    cells = [(h, i, j) for h, i in places for j in range(columns) if compete[i][j]]
    weight = {(h, i, j): heads[h][i][j] for h, i, j in cells}
    of_row = {place: [cell for cell in cells if cell[:2] == place] for place in places}

    def rank(cell):
        return not first[cell[1]][cell[2]], -weight[cell], cell

    best = {min(row, key=rank) for row in of_row.values() if row}

    def share(cell):
        return weight[cell] / (1 if rule.over != "row" else sum(weight[c] for c in of_row[cell[:2]]))

    groups = {"row": lambda cell: cell[:2], "head": lambda cell: cell[0], "layer": lambda cell: 0}[rule.over]
    selection = set(best)
    for group in {groups(cell) for cell in cells}:
        order = sorted((c for c in cells if groups(c) == group), key=lambda cell: (cell not in best, *rank(cell)))
        if rule.topk is not None:
            selection |= set(order[: rule.topk * len({cell[:2] for cell in order})])
        if rule.top_p is not None:
            target, total = Fraction(rule.top_p) * sum(map(share, order)), Fraction(0)
            for cell in order:
                before, total = total, total + share(cell)
                if rule.top_p == 1 or keeps(rule.crossing, before, total, target):
                    selection.add(cell)
    return selection


def mask_of(selection, heads):
    """Bool `[H, rows, columns]` of a set of (head, row, column)."""
    return torch.tensor(
        [
            [[(h, i, j) in selection for j in range(len(row))] for i, row in enumerate(rows)]
            for h, rows in enumerate(heads)
        ]
    )


CROSSINGS = st.sampled_from(["keep", "drop", "exceed"])
RULES = st.builds(
    RowRule,
    topk=st.integers(1, 40),
    top_p=st.sampled_from([None, 0.125, 0.5, 0.75, 1]),
    crossing=CROSSINGS,
    over=st.sampled_from(["row", "head", "layer"]),
) | st.builds(
    RowRule,
    top_p=st.sampled_from([0.125, 0.25, 0.5, 0.625, 0.75, 0.875, 1]),
    crossing=CROSSINGS,
    over=st.sampled_from(["row", "head", "layer"]),
)


@st.composite
def problems(draw):
    rows, columns, rng = draw(st.integers(1, 4)), draw(SIZES.columns), random.Random(draw(st.integers(0, 1 << 20)))
    heads = [[rng.choices(WEIGHTS, k=columns) for _ in range(rows)] for _ in range(2)]
    return heads, *([rng.choices([False, True], k=columns) for _ in range(rows)] for _ in range(4))


@settings(deadline=None, max_examples=150)
@given(problems(), RULES, st.booleans())
def test_rules_keep_what_their_definition_keeps(problem, rule, plain):
    heads, compete, first, always, union = problem
    if plain:
        compete, first = [[True] * len(row) for row in compete], [[False] * len(row) for row in first]
        always = union = first
    # logits; over a head or layer shares
    to_score = math.log if rule.over == "row" else float
    scores = torch.tensor([[[[to_score(w) for w in row] for row in head] for head in heads]], dtype=torch.float64)
    tensors = {name: torch.tensor(m) for name, m in (("always", always), ("first", first), ("union", union))}
    index = select_blocks(scores, rule, candidates=torch.tensor(compete), **({} if plain else tensors))
    actual = index.to_dense(scores.shape[-1])[0]
    free = [[c and not a for c, a in zip(*rows, strict=True)] for rows in zip(compete, always, strict=True)]
    expected = mask_of(kept_by_definition(heads, rule, free, first), heads)
    assert torch.equal(actual, expected | tensors["always"] | tensors["union"])


@st.composite
def problems_by_head(draw):
    rows, columns, rng = draw(st.integers(1, 3)), draw(SIZES.columns), random.Random(draw(st.integers(0, 1 << 20)))
    weights = [[[rng.choices(WEIGHTS, k=columns) for _ in range(rows)] for _ in "hh"] for _ in "bb"]
    # every size of a mask that broadcasts
    sizes = [
        (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, rows])), columns)
    ] * 2
    bits = [rng.choices([False, True], k=math.prod(size)) for size in sizes]
    return weights, *(torch.tensor(b).view(size) for b, size in zip(bits, sizes, strict=True))


@settings(deadline=None, max_examples=150)
@given(
    problems_by_head(),
    st.tuples(*[st.sampled_from([0.125, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0])] * 2),
    CROSSINGS,
    st.none() | st.integers(1, 40),
)
def test_heads_have_shares_and_masks_of_their_own(problem, shares, crossing, topk):
    weights, compete, always = problem
    scores = torch.tensor([[[[math.log(w) for w in row] for row in head] for head in b] for b in weights]).double()
    rule = Shares(torch.tensor(shares), crossing) if topk is None else KeptTiles.of(topk)
    actual = select_blocks(scores, rule, candidates=compete, always=always).to_dense(scores.shape[-1])
    compete, always = compete.expand(scores.shape), always.expand(scores.shape)
    for b, heads in enumerate(weights):
        for h, rows in enumerate(heads):
            free = (compete & ~always)[b, h].tolist()
            nothing = [[False] * len(row) for row in rows]
            same = RowRule(topk=topk, top_p=None if topk else shares[h], crossing=crossing)
            expected = mask_of(kept_by_definition([rows], same, free, nothing), [rows])
            assert torch.equal(actual[b, h], expected[0] | always[b, h])


def test_masks_of_heads_mean_the_same_as_masks_of_all(device):
    scores = torch.randn(2, 3, 5, 9, generator=torch.Generator().manual_seed(6)).to(device)
    always, candidates = (torch.rand(5, 9, generator=torch.Generator().manual_seed(i)).to(device) < 0.4 for i in (7, 8))
    rules = [RowRule(topk=2, over="head"), RowRule(topk=2, over="layer"), RowRule(deviations=0.5)]
    for rule in (KeptTiles.of(4), RowRule(top_p=0.7), *rules):
        shared = select_blocks(scores, rule, candidates=candidates, always=always)
        own = {"candidates": candidates.expand(2, 3, 5, 9), "always": always.expand(1, 3, 5, 9)}
        assert torch.equal(shared.to_dense(9), select_blocks(scores, rule, **own).to_dense(9))
    shares = Shares(torch.tensor([0.2, 0.9, 1.0], device=device))
    selection = select_blocks(scores, shares).to_dense(9)
    for head, tau in enumerate((0.2, 0.9, 1.0)):
        assert torch.equal(selection[:, head], select_blocks(scores, sparge_top_p(tau)).to_dense(9)[:, head])


def test_the_published_spellings_differ_at_the_crossing_entry():
    """Thresholds on a cumulative sum and beside one, as the three sources write their loops."""
    weights = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8)]
    scores = torch.tensor([float(w) for w in weights], dtype=torch.float64).log()[None, None, None]
    crossings = ("drop", "keep", "exceed")
    counts = {}
    for p in (0.1, 0.5, 0.6, 0.7, 0.75, 0.875, 0.9):
        counts[p] = [int(select_blocks(scores, RowRule(top_p=p, crossing=c)).kv_num_blocks) for c in crossings]
        sums = [sum(weights[: n + 1]) for n in range(4)]
        sparge = max(1, sum(total <= Fraction(p) for total in sums))
        fine_grained = next(n for n, total in enumerate(sums, 1) if total >= Fraction(p))
        svg2 = sum(total - w <= Fraction(p) for total, w in zip(sums, weights, strict=True))
        assert counts[p] == [sparge, fine_grained, svg2]
    # on the sum 3/4 the first two agree, beside it the last two
    assert (counts[0.75], counts[0.7]) == ([2, 2, 3], [1, 2, 2])


@pytest.mark.parametrize("over", ["row", "head", "layer"])
@pytest.mark.parametrize("deviations", [-0.5, 0.0, 1.0, 2.0])
def test_deviations_keep_scores_above_the_mean(over, deviations, device):
    """Mean and deviation are those of the candidates alone."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, 17, generator=generator).to(device)
    for share in (1.0, 0.5):
        candidates = torch.rand(5, 17, generator=generator).to(device) < share
        rule = RowRule(deviations=deviations, over=over)
        actual = select_blocks(scores, rule, candidates=candidates).to_dense(17)
        competing = scores.double().masked_fill(~candidates, math.nan)
        rows = {
            "row": competing,
            "head": competing.flatten(2)[:, :, None],
            "layer": competing.flatten(1)[:, None, None],
        }
        rows = rows[over]
        mean = rows.nanmean(-1, keepdim=True)
        above = competing > mean + deviations * (rows - mean).square().nanmean(-1, keepdim=True).sqrt()
        best = competing.nan_to_num(-math.inf).argmax(-1, keepdim=True)
        assert torch.equal(actual, above | torch.zeros_like(above).scatter_(-1, best, True))
        # more deviations, fewer blocks; a row that would have none keeps its best
        assert actual.sum(-1).min() >= 1


def test_a_budget_over_rows_is_kept_exactly(device):
    """VSA2's N * K pairs of a head, or H * N * K of a layer, by an independent threshold: the pairs of a budget are
    known without measuring them. A control per row keeps as many pairs, but others."""
    shares = torch.rand(2, 3, 7, 19, generator=torch.Generator().manual_seed(5)).to(device)
    # whole rows that lose against all others, and a head that wins
    shares[:, :, 2] *= 1e-3
    shares[:, 1] += 1
    shares = shares / 2
    rows = select_blocks(shares, RowRule(topk=4)).to_dense(19)
    for over, dims in (("head", (2, 3)), ("layer", (1, 2, 3))):
        mask = select_blocks(shares, RowRule(topk=1, over=over), topk=KeptTiles.of(4)).to_dense(19)
        size = math.prod(shares.shape[d] for d in dims[:-1])
        assert (mask.sum(dims) == size * 4).all()
        assert (rows.sum(dims) == size * 4).all()
        assert not torch.equal(mask, rows)
        assert mask[:, :, 2].sum(-1).max() == 1
        # without the best of its row, nothing that is left out is above anything that is kept
        best = torch.zeros_like(mask).scatter_(-1, shares.argmax(-1, keepdim=True), True)
        kept, left = shares.masked_fill(~mask | best, math.inf), shares.masked_fill(mask, -math.inf)
        assert (kept.amin(dims) >= left.amax(dims)).all()
        by_sample = KeptTiles((6,), samples=torch.tensor([6, 3], dtype=torch.int32, device=device))
        counts = select_blocks(shares, RowRule(topk=1, over=over), topk=by_sample).kv_num_blocks.flatten(1).sum(1)
        assert counts.tolist() == [21 * 6, 21 * 3]


def test_a_schedules_count_replaces_that_of_a_rule(device):
    scores = torch.randn(2, 2, 5, 12, generator=torch.Generator().manual_seed(4)).to(device)
    for rule in (RowRule(topk=3), RowRule(topk=3, top_p=0.6), RowRule(topk=3, deviations=1.0)):
        given = select_blocks(scores, replace(rule, topk=1), topk=KeptTiles.of(3))
        assert torch.equal(given.to_dense(12), select_blocks(scores, rule).to_dense(12))
    # a rule without a count has none to replace
    rule = RowRule(top_p=0.6)
    assert torch.equal(
        select_blocks(scores, rule, topk=KeptTiles.of(12)).kv_num_blocks, select_blocks(scores, rule).kv_num_blocks
    )
    samples = KeptTiles((5,), samples=torch.tensor([5, 2], dtype=torch.int32, device=device))
    both = select_blocks(scores, RowRule(topk=1, top_p=0.3), topk=samples).to_dense(12)
    for b, k in enumerate((5, 2)):
        assert torch.equal(both[b], select_blocks(scores[b : b + 1], RowRule(topk=k, top_p=0.3)).to_dense(12)[0])


def test_the_union_of_two_rules_is_the_larger_count(device):
    scores = torch.randn(1, 4, 6, 40, generator=torch.Generator().manual_seed(1)).to(device)
    both = select_blocks(scores, RowRule(topk=5, top_p=0.4)).to_dense(40)
    k, p = (select_blocks(scores, rule).to_dense(40) for rule in (RowRule(topk=5), RowRule(top_p=0.4)))
    assert torch.equal(both, k | p)
    counts = both.sum(-1)
    assert torch.equal(counts, torch.maximum(k.sum(-1), p.sum(-1)))
    assert counts.min() < counts.max()


def test_a_plain_topk_is_the_kernels(device):
    scores = torch.randn(1, 2, 5, 12, generator=torch.Generator().manual_seed(2)).to(device)
    candidates = torch.rand(5, 12, generator=torch.Generator().manual_seed(3)).to(device) < 0.7
    ours = select_blocks(scores, RowRule(topk=4), candidates=candidates)
    expected = select_topk(scores, 4, candidates=candidates)
    assert torch.equal(ours.to_dense(12), expected.to_dense(12))
    # the composition agrees: a union with nothing leaves the kernel's path
    composition = select_blocks(scores, RowRule(topk=4), candidates=candidates, union=torch.zeros_like(candidates))
    assert torch.equal(composition.to_dense(12), expected.to_dense(12))


def test_scores_without_order_and_weight(device):
    scores = torch.tensor([[[[math.nan, 1.0, -math.inf, 0.0, -0.0]]]], device=device)
    mask_of = lambda **rule: select_blocks(scores, RowRule(**rule)).to_dense(5)[0, 0, 0].tolist()  # noqa: E731
    assert mask_of(topk=3, top_p=0.1) == [False, True, False, True, True]
    assert mask_of(topk=2, top_p=0.1) == [False, True, False, True, False]
    assert mask_of(top_p=0.9) == [False, True, False, True, True]
    nothing = torch.full((1, 1, 2, 3), -math.inf, device=device)
    shares = [RowRule(top_p=0.9, crossing=crossing) for crossing in ("keep", "drop", "exceed")]
    for rule in (
        *shares,
        RowRule(top_p=0.9, over="head"),
        RowRule(top_p=0.9, over="layer"),
        RowRule(deviations=1.0),
        Shares(torch.tensor([0.9], device=device)),
    ):
        assert select_blocks(nothing, rule).kv_num_blocks.tolist() == [[[1, 1]]]


def test_half_precision_scores_are_ranked_as_they_are(device):
    scores = torch.randn(1, 2, 3, 30, generator=torch.Generator().manual_seed(4)).to(device).bfloat16()
    for rule in (RowRule(top_p=0.5), RowRule(topk=3, over="head"), RowRule(topk=3, over="layer")):
        assert torch.equal(select_blocks(scores, rule).kv_indices, select_blocks(scores.float(), rule).kv_indices)


def test_bad_input():
    with pytest.raises(ValueError, match=r"a row rule needs topk, top_p or deviations"):
        RowRule()
    with pytest.raises(ValueError, match=r"^top_p=1.5: expected a number above 0 and of at most 1"):
        RowRule(top_p=1.5)
    with pytest.raises(ValueError, match=r"^deviations=nan: expected a number"):
        RowRule(deviations=math.nan)
    scores = torch.zeros(1, 1, 2, 3)
    with pytest.raises(ValueError, match=r"union must be bool \[2, 3\] or \[1, 1, 2, 3\], got torch.bool \[3, 2\]"):
        select_blocks(scores, RowRule(topk=1), union=torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"always must be bool .* got torch.bool \[1, 2, 2, 3\]"):
        select_blocks(scores, KeptTiles.of(1), always=torch.zeros(1, 2, 2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"share must be a number, or a float \[1\] or \[1, 1, 2\], got .*32 \[3\]"):
        select_blocks(scores, Shares(torch.ones(3)))
    with pytest.raises(ValueError, match=r"scores must be a float"):
        select_blocks(scores.long(), RowRule(top_p=0.5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nothing_waits_for_the_device():
    scores = torch.randn(1, 2, 64, 64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for over in ("row", "head", "layer"):
            for rule in (RowRule(top_p=0.9, over=over), RowRule(topk=3, over=over), RowRule(deviations=1.0, over=over)):
                select_blocks(scores, rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_entry_that_crosses_the_share():
    scores = torch.tensor([0.25, 0.5, 0.25, 0.0], dtype=torch.float64).log()[None, None, None]

    def mask_of(top_p, crossing):
        return select_blocks(scores, RowRule(top_p=top_p, crossing=crossing)).to_dense(4)[0, 0, 0].tolist()

    assert mask_of(0.75, "keep") == mask_of(0.75, "drop") == [True, True, False, False]
    assert mask_of(0.7, "keep") == [True, True, False, False]
    assert mask_of(0.7, "drop") == [False, True, False, False]
    # one at the least, and all of them when all are asked for
    assert mask_of(0.2, "drop") == [False, True, False, False]
    assert mask_of(1, "keep") == mask_of(1, "drop") == [True] * 4
    assert mask_of(1 - 1e-12, "keep") == [True, True, True, False]
