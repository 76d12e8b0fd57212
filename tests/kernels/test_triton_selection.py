"""The Triton top-k against a sort written out in Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vsa_kernels import select_topk

from tests.kernels.interpreted import further, fuzz, poisoned_outputs  # noqa: F401 (the fixture)

# few values, so that ties are the rule; a subnormal, both zeros, both neighbours of the infinities
values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-40, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan])

ANY_ROWS = (st.data(), st.integers(1, 3), st.integers(1, 70))


def select(scores, topk=None, rows=None, candidates=None, always=None, capacity=None):
    # triton is imported by those tests only that run
    from vsa_kernels.selection import triton_topk

    return triton_topk.select(
        scores, topk, rows, candidates, always, scores.shape[-1] if capacity is None else capacity
    )


def expected(scores, topk, candidates=None, always=None):
    """The kept columns of one row of Python floats."""
    columns = range(len(scores))
    candidates = [True] * len(scores) if candidates is None else candidates
    always = [False] * len(scores) if always is None else always

    def rank(j):
        # NaN last, then by falling score, then by index
        return (math.isnan(scores[j]), 0.0 if math.isnan(scores[j]) else -scores[j], j)

    best = sorted((j for j in columns if candidates[j] and not always[j]), key=rank)[: max(topk, 0)]
    return sorted(best + [j for j in columns if always[j]])


def assert_rows(got, scores, topk, candidates=None, always=None):
    """Every row lists what `expected` says, then zeros; topk is one int or one per query block."""
    indices, counts = (x.cpu() for x in got)
    assert indices.dtype == counts.dtype == torch.int32
    B, H, Nq, _ = scores.shape
    for b, h, n in ((b, h, n) for b in range(B) for h in range(H) for n in range(Nq)):
        masks = (None if m is None else m[n].tolist() for m in (candidates, always))
        columns = expected(scores[b, h, n].tolist(), topk if isinstance(topk, int) else topk[n], *masks)
        assert counts[b, h, n] == len(columns)
        columns = (columns + [0] * indices.shape[-1])[: indices.shape[-1]]
        assert indices[b, h, n].tolist() == columns


@fuzz(5, 15)
@given(*ANY_ROWS)
def test_ties_masks_and_counts_per_row(triton_device, data, num_q, num_kv):
    draw, size = data.draw, num_q * num_kv
    pool = draw(st.lists(values, min_size=1, max_size=4))
    scores = torch.tensor(draw(st.lists(st.sampled_from(pool), min_size=2 * size, max_size=2 * size)))
    scores = scores.view(1, 2, num_q, num_kv)
    candidates, always = (
        None if m is None else torch.tensor(m).view(num_q, num_kv)
        for m in (draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size)) for _ in range(2))
    )
    dtypes = [torch.float32] if triton_device.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]
    on_device = [None if m is None else m.to(triton_device) for m in (candidates, always)]
    topk = draw(st.integers(1, num_kv))
    rows = draw(st.lists(st.integers(0, num_kv + 2), min_size=num_q, max_size=num_q))
    for dtype in dtypes:
        x = scores.to(dtype)
        actual = select(x.to(triton_device), topk, None, *on_device)
        assert_rows(actual, x, topk, candidates, always)
        for int_dtype in (torch.int32, torch.int64):
            actual = select(
                x.to(triton_device), None, torch.tensor(rows, dtype=int_dtype, device=triton_device), *on_device
            )
            assert_rows(actual, x, rows, candidates, always)


test_further_ties = pytest.mark.slow(
    fuzz(15, 15)(given(*ANY_ROWS)(test_ties_masks_and_counts_per_row.hypothesis.inner_test))
)


def families(num):
    """Rows that stop a bisection: `[12, num]`, many orders of magnitude, plateaus, nothing but special values."""
    g = torch.Generator().manual_seed(num)
    normal = torch.randn(num, generator=g)
    some = torch.rand(num, generator=g) < 0.5
    powers = torch.linspace(-148, 127, num).exp2()
    near = torch.full((num,), 1.0).view(torch.int32) + torch.arange(num, dtype=torch.int32) % 7
    rows = [
        normal,
        normal * 1e-3 + 100,
        normal.bfloat16().float(),
        torch.zeros(num),
        torch.full((num,), torch.nan),
        torch.full((num,), -torch.inf),
        torch.where(some, torch.inf, -torch.inf),
        torch.where(some, normal, -torch.inf),
        torch.where(some, normal, torch.nan),
        torch.where(some, powers, -powers),
        near.view(torch.float32),
        torch.where(some, 0.0, -0.0),
    ]
    return torch.stack(rows)[None, None]


@pytest.mark.parametrize("num", [1, 33, 64, 161])
def test_hard_rows_at_every_kind_of_k(triton_device, num):
    scores = families(num)
    for topk in sorted({1, num // 10, num - 1, num} & set(range(1, num + 1))):
        assert_rows(select(scores.to(triton_device), topk), scores, topk)


@pytest.mark.parametrize("num", [1537, 4096, *map(further, (1200, 2048, 2500))])
def test_wide_rows(triton_device, num):
    rows = [0, 2, 7, 9] if triton_device.type == "cpu" else range(12)
    scores = families(num)[:, :, rows]
    candidates = torch.rand(len(rows), num) < 0.7
    always = torch.rand(len(rows), num) < 0.02
    for topk in (num // 10, num):
        assert_rows(select(scores.to(triton_device), topk), scores, topk)
    actual = select(scores.to(triton_device), 33, None, candidates.to(triton_device), always.to(triton_device))
    assert_rows(actual, scores, 33, candidates, always)


def test_equals_the_reference_entry_by_entry(triton_device):
    from vsa_kernels.selection import reference

    scores = torch.randint(-3, 4, (1, 2, 3, 50)).float().to(triton_device)
    for topk, capacity in ((1, 32), (7, 32), (33, 50), (50, 50)):
        ours, theirs = (
            select(scores, topk, capacity=capacity),
            reference.select(scores, topk, None, None, None, capacity),
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_strided_scores(triton_device):
    store = torch.full((2, 4, 3, 80), torch.inf, device=triton_device)
    views = [
        store[:, 1:3, :, 5:70].normal_(),
        torch.randn(2, 4, 3, 40, device=triton_device).permute(0, 2, 1, 3),
        torch.randn(1, 4, 3, 40, device=triton_device).expand(2, -1, -1, -1),
        torch.randn(2, 40, 3, 4, device=triton_device).permute(0, 3, 2, 1),
    ]
    for scores in views:
        assert not scores.is_contiguous()
        assert_rows(select(scores, 6), scores.cpu(), 6)


def test_a_list_never_runs_into_the_next(triton_device):
    scores = torch.randn(1, 1, 6, 40, device=triton_device)
    indices, counts = select(scores, 9, capacity=4)
    whole, _ = select(scores, 9)
    assert torch.equal(indices, whole[..., :4])
    assert (counts == 9).all()


def test_public_call(triton_device):
    scores = torch.randn(1, 2, 3, 70, device=triton_device)
    always = torch.rand(3, 70, device=triton_device) < 0.1
    for arguments in ({"topk": 5}, {"topk": 99}, {"topk": 5, "always": always}):
        ours, theirs = (select_topk(scores, **arguments, backend=name) for name in ("triton", "reference"))
        assert torch.equal(ours.to_dense(70), theirs.to_dense(70))
        assert ours.kv_indices.shape == theirs.kv_indices.shape
        assert (ours.max_blocks, ours.min_blocks) == (theirs.max_blocks, theirs.min_blocks)


def test_opcheck(triton_device):
    from vsa_kernels.selection.op import select_topk_op

    scores = torch.randn(2, 1, 3, 5, device=triton_device)
    candidates = torch.rand(3, 5, device=triton_device) < 0.5
    rows = torch.tensor([1, 2, 3], dtype=torch.int32, device=triton_device)
    torch.library.opcheck(select_topk_op, (scores, 2, None, None, None, 5, "triton"))
    torch.library.opcheck(select_topk_op, (scores, None, rows, candidates, ~candidates, 5, "triton"))


def test_what_does_not_fit_takes_the_reference(triton_device):
    wide = torch.randn(1, 1, 2, 4097, device=triton_device)
    assert_rows(select(wide, 40), wide.cpu(), 40)
    double = torch.tensor([1.0, 1.0 + 1e-12, 1.0 - 1e-12], dtype=torch.float64, device=triton_device).view(1, 1, 1, 3)
    assert_rows(select(double, 1), double.cpu(), 1)
    with pytest.raises(ValueError, match="backend triton takes at most 4096 kv blocks, got 4097"):
        select_topk(wide, 40, backend="triton")
    assert torch.equal(select_topk(wide, 40).kv_indices[..., :40], select(wide, 40)[0][..., :40])


def test_named_backend_says_why_it_refuses():
    with pytest.raises(ValueError, match="backend must be reference, triton or None"):
        select_topk(torch.zeros(1, 1, 2, 2), 1, backend="gather")
    with pytest.raises(ValueError, match="float64"):
        select_topk(torch.zeros(1, 1, 2, 2, dtype=torch.float64), 1, backend="triton")
