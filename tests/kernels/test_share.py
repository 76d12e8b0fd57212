"""`select_share` against its definition: a sort in Python, sums of whole numbers, weights to forty digits."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import select_share
from vsa_kernels.selection import weight_units

from tests.sizes import SIZES

# few values, so that ties are the rule
values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -9.0, 1e-40, 200.0, math.inf, -math.inf, math.nan])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
crossings = st.sampled_from(["keep", "drop", "exceed"])
shares = st.sampled_from([1e-9, 0.1, 0.25, 0.5, 0.9, 0.999, 1 - 1e-12, 1.0])


def tensors_of_shares(shape):
    number = math.prod(shape)
    elements = st.lists(shares, min_size=number, max_size=number)
    return elements.map(lambda x: torch.tensor(x, dtype=torch.float64).view(shape))


def lists(index, row):
    return index.kv_indices[row][: int(index.kv_num_blocks[row])].tolist()


def units_of(scores, candidates):
    """Weights of one row of Python floats, to the nearest 2^-24 of the largest."""
    alive = [c and x > -math.inf for x, c in zip(scores, candidates, strict=True)]
    largest = max((x for x, c in zip(scores, alive, strict=True) if c), default=0.0)
    units = []
    with localcontext(prec=40):
        for x, c in zip(scores, alive, strict=True):
            below = 0.0 if x == largest else min(largest - x, 100.0)
            units.append(int((Decimal(-below).exp() * 2**24).to_integral_value()) if c else 0)
    return units


def expected(scores, units, share, crossing, candidates, always):
    """The kept columns of one row."""

    def rank(j):
        # NaN last, then by falling score, then by index
        return (math.isnan(scores[j]), 0.0 if math.isnan(scores[j]) else -scores[j], j)

    order = sorted((j for j in range(len(scores)) if candidates[j] and not always[j]), key=rank)
    total, before, columns = sum(units), 0, []
    budget = total * share
    for j in order:
        after = before + units[j]
        inside = {
            "keep": before < budget,
            "drop": total > 0 and after <= budget,
            "exceed": total > 0 and before <= budget,
        }[crossing]
        if inside or share >= 1 or not columns:
            columns.append(j)
        before = after
    return sorted(columns + [j for j in range(len(scores)) if always[j]])


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 3), SIZES.columns, dtypes, crossings)
def test_matches_sums_in_python(data, num_q, num_kv, dtype, crossing):
    draw, size = data.draw, num_q * num_kv
    scores = torch.tensor(draw(st.lists(values, min_size=2 * size, max_size=2 * size)))
    scores = scores.to(dtype).view(1, 2, num_q, num_kv)
    # one, of each head, or of each row
    share = draw(st.sampled_from([(), (2,), (1, 2, num_q), (1, 1, num_q)]).flatmap(tensors_of_shares))
    by_row = (share.view(1, 2, 1) if share.ndim == 1 else share).expand(1, 2, num_q)
    shapes = [(num_q, num_kv), (1, 2, 1, num_kv), (1, 2, num_q, 1), (1, 2, num_q, num_kv)]
    masks = []
    for _ in range(2):
        shape = draw(st.none() | st.sampled_from(shapes))
        bits = st.booleans()
        count = 0 if shape is None else math.prod(shape)
        mask = draw(st.lists(bits, min_size=count, max_size=count))
        masks.append(None if shape is None else torch.tensor(mask).view(shape))
    index = select_share(
        scores, share if share.ndim else share.item(), crossing=crossing, candidates=masks[0], always=masks[1]
    )
    candidates, always = (
        torch.full_like(scores, default, dtype=torch.bool) if m is None else m.expand(scores.shape)
        for m, default in zip(masks, (True, False), strict=True)
    )
    for h, n in ((h, n) for h in range(2) for n in range(num_q)):
        row, compete = scores[0, h, n].tolist(), (candidates & ~always)[0, h, n].tolist()
        own = by_row[0, h, n].item()
        row_masks = (candidates[0, h, n].tolist(), always[0, h, n].tolist())
        assert lists(index, (0, h, n)) == expected(row, units_of(row, compete), own, crossing, *row_masks)


def test_weights_are_the_nearest_units(device):
    below = torch.cat([torch.zeros(1), torch.rand(80, generator=torch.Generator().manual_seed(0)) * 19])
    below = below.double().view(1, 1, 1, -1)
    everything = torch.ones_like(below, dtype=torch.bool)
    error = weight_units(-below.to(device), everything.to(device)).cpu() - (-below).exp() * 2**24
    # half a unit of the rounding, a little of the difference's; the control: weights of fp16 differences are not
    assert error.abs().max() < 0.76
    rough = weight_units(-below.half().to(device), everything.to(device)).cpu() - (-below).exp() * 2**24
    assert rough.abs().max() > 100
    assert weight_units(-below, everything)[0, 0, 0, 0] == 1 << 24


@pytest.mark.parametrize("num", [64, 65, 100, 4096, 100_000])
def test_sums_of_a_row_fit_31_bits(device, num):
    scores = torch.zeros(1, 1, 2, num, device=device)
    scores[:, :, 1, num // 2 :] = -3
    units = weight_units(scores, torch.ones_like(scores, dtype=torch.bool))
    total = units.sum(-1)
    assert total.max() < 1 << 31
    assert total.max() >= 1 << 29
    ratio = units[0, 0, 1, -1] / units[0, 0, 1, 0]
    assert abs(float(ratio) - math.exp(-3)) < 2**-29 * num
    counts = select_share(scores, 0.5, crossing="keep").kv_num_blocks
    assert int(counts[0, 0, 0]) == (num + 1) // 2


def test_far_logits_have_no_weight_and_a_whole_share_keeps_them(device):
    scores = torch.tensor([[[[5.0, 5.0 - 18, -3e38, -math.inf, math.nan]]]], device=device)
    for crossing in ("keep", "drop", "exceed"):
        assert select_share(scores, 1.0, crossing=crossing).kv_num_blocks.item() == 5
        assert lists(select_share(scores, 1 - 1e-12, crossing=crossing), (0, 0, 0)) == [0]
    nothing = torch.full((1, 1, 1, 4), -math.inf, device=device)
    nothing[..., 0] = math.nan
    for crossing in ("keep", "drop", "exceed"):
        assert lists(select_share(nothing, 0.9, crossing=crossing), (0, 0, 0)) == [1]


def test_shares_that_are_none_keep_the_best(device):
    scores = torch.tensor([[[[0.0, 2.0, 1.0]]]], device=device).expand(1, 4, 1, 3)
    values = torch.tensor([0.0, -1.0, math.nan, 3.0], device=device)
    for crossing in ("keep", "drop", "exceed"):
        index = select_share(scores, values, crossing=crossing)
        assert [lists(index, (0, h, 0)) for h in range(4)] == [[1], [1], [1], [0, 1, 2]]


def test_gradients_do_not_flow(device):
    scores = torch.randn(1, 2, 3, 4, device=device, requires_grad=True)
    index = select_share(scores, torch.tensor([0.4, 0.6], device=device, requires_grad=True), crossing="keep")
    assert not index.kv_indices.requires_grad


def test_opcheck_and_meta(device):
    from vsa_kernels.selection.op import select_share_op

    scores = torch.randn(2, 3, 4, 5, device=device)
    each = torch.tensor([0.3, 0.9, 1.0], dtype=torch.float64, device=device).view(1, 3, 1)
    mask = torch.rand(1, 3, 1, 5, device=device) < 0.5
    torch.library.opcheck(
        select_share_op, (scores, each, "keep", mask, ~mask), test_utils=("test_schema", "test_faketensor")
    )
    index = select_share(torch.empty(2, 4, 3, 5, device="meta"), 0.9, crossing="keep")
    assert (index.kv_indices.shape, index.kv_num_blocks.shape) == ((2, 4, 3, 5), (2, 4, 3))
    empty = select_share(torch.zeros(0, 2, 3, 5, device=device), 0.9, crossing="keep")
    assert empty.kv_indices.shape == (0, 2, 3, 5)


@pytest.mark.slow
def test_compiles_whole():
    torch._dynamo.reset()
    scores = torch.randn(1, 2, 3, 40)

    def select(scores):
        return select_share(scores, 0.5, crossing="drop").kv_num_blocks

    compiled = torch.compile(select, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(scores), select(scores))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0.0}, "share must be above 0 and at most 1, got 0.0"),
        ({"share": math.nan}, "share must be above 0 and at most 1, got nan"),
        ({"share": 90}, "share must be above 0 and at most 1, got 90"),
        (
            {"share": torch.ones(3)},
            r"share must be a number, or a float \[2\] or \[1, 2, 3\], got torch.float32 \[3\]",
        ),
        (
            {"share": torch.ones(2, dtype=torch.long)},
            r"share must be a number, or a float \[2\] or \[1, 2, 3\], got torch.int64 \[2\]",
        ),
        ({"share": torch.ones(2, device="meta")}, "share must be on cpu like scores, got meta"),
        ({"crossing": "past"}, "crossing must be one of keep, drop, exceed, got 'past'"),
        (
            {"candidates": torch.ones(3, 3, dtype=torch.bool)},
            r"candidates must be bool and broadcast to \[1, 2, 3, 5\]",
        ),
        ({"always": torch.ones(3, 5)}, r"always must be bool and broadcast to .*, got torch.float32 \[3, 5\]"),
        ({"always": torch.ones(3, 5, dtype=torch.bool, device="meta")}, "always must be on cpu like scores, got meta"),
        ({"backend": "gather"}, "backend must be reference, triton or None"),
        ({"scores": torch.zeros(1, 2, 3, 5).long()}, "scores must be a float"),
        ({"scores": torch.zeros(1, 2, 0, 5)}, "scores must have at least one head"),
    ],
    ids=lambda x: None if isinstance(x, dict) else x[:20],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        select_share(**{"scores": torch.zeros(1, 2, 3, 5), "share": 0.5, "crossing": "keep", **arguments})
