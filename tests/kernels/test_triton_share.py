"""The Triton top-p against the reference bit by bit, and against sums written out in Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vsa_kernels import select_share

from tests.kernels.interpreted import INTERPRETED, further, fuzz, poisoned_outputs  # noqa: F401 (the fixture)
from tests.kernels.test_share import crossings, expected, shares, tensors_of_shares, units_of, values

ANY_ROWS = (st.data(), st.integers(1, 2), st.integers(1, 70), crossings)


def on(device, *tensors):
    return [None if x is None else x.to(device) for x in tensors]


def assert_as_reference(device, scores, share, crossing, candidates=None, always=None):
    """Both backends list the same blocks; what follows a count is 0."""
    x, candidates, always, share = *on(device, scores, candidates, always), share
    share = share.to(device) if isinstance(share, torch.Tensor) else share
    ours, theirs = (
        select_share(x, share, crossing=crossing, candidates=candidates, always=always, backend=name)
        for name in ("triton", "reference")
    )
    num = scores.shape[-1]
    assert ours.kv_indices.dtype == ours.kv_num_blocks.dtype == torch.int32
    assert ours.kv_indices.shape == theirs.kv_indices.shape == scores.shape
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    entries = torch.arange(num, device=device) < ours.kv_num_blocks[..., None]
    assert torch.equal(ours.kv_indices, theirs.kv_indices * entries)
    return ours


@fuzz(5, 25)
@given(*ANY_ROWS)
def test_ties_masks_and_shares_of_rows(triton_device, data, num_q, num_kv, crossing):
    draw, size = data.draw, 2 * num_q * num_kv
    scores = torch.tensor(draw(st.lists(values, min_size=size, max_size=size))).view(1, 2, num_q, num_kv)
    share = draw(st.sampled_from([(1, 2, num_q), (1, 1, num_q), (1, 2, 1)]).flatmap(tensors_of_shares))
    assert_as_reference(triton_device, scores, share, crossing)


def test_scores_that_are_close_to_each_other(triton_device):
    """The threshold is looked for between the least and the largest score, however near they are."""
    g = torch.Generator().manual_seed(0)
    near = 40 + 1e-5 * torch.randn(1, 1, 3, 200, generator=g)
    near[:, :, 1, 7], near[:, :, 2, 9] = -math.inf, -1e30
    for share in (0.05, 0.5, 0.95):
        assert_as_reference(triton_device, near, share, "keep")


@fuzz(5, 25)
@given(*ANY_ROWS)
def test_ties_masks_and_shares_of_heads(triton_device, data, num_q, num_kv, crossing):
    draw, size = data.draw, num_q * num_kv
    pool = draw(st.lists(values, min_size=1, max_size=4))
    scores = torch.tensor(draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size)))
    scores = scores.view(1, num_q, 1, num_kv)
    share = torch.tensor(draw(st.lists(shares, min_size=num_q, max_size=num_q)), dtype=torch.float64)
    candidates, always = (
        None if m is None else torch.tensor(m).view(1, num_q, 1, num_kv)
        for m in (draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size)) for _ in range(2))
    )
    index = assert_as_reference(triton_device, scores, share, crossing, candidates, always)
    everything = torch.ones_like(scores, dtype=torch.bool)
    candidates = everything if candidates is None else candidates
    always = ~everything if always is None else always
    for h in range(num_q):
        row, own, forced = (x[0, h, 0].tolist() for x in (scores, candidates, always))
        compete = [c and not a for c, a in zip(own, forced, strict=True)]
        columns = expected(row, units_of(row, compete), float(share[h]), crossing, own, forced)
        assert index.kv_indices[0, h, 0, : len(columns)].tolist() == columns
        assert index.kv_num_blocks[0, h, 0] == len(columns)


test_further_ties = pytest.mark.slow(
    fuzz(40, 40)(given(*ANY_ROWS)(test_ties_masks_and_shares_of_heads.hypothesis.inner_test))
)


def families(num):
    """Rows that stop a bisection, `[1, 1, 12, num]`: plateaus, near neighbours, huge and tiny and special values."""
    g = torch.Generator().manual_seed(num)
    normal = torch.randn(num, generator=g)
    some = torch.rand(num, generator=g) < 0.5
    near = torch.full((num,), 1.0).view(torch.int32) + torch.arange(num, dtype=torch.int32) % 7
    rows = [
        normal * 3,
        torch.zeros(num),
        near.view(torch.float32),
        torch.where(some, normal, -torch.inf),
        torch.where(some, normal, torch.nan),
        torch.where(some, torch.inf, normal),
        torch.full((num,), -torch.inf),
        torch.full((num,), torch.nan),
        torch.linspace(-148, -127, num).exp2(),
        torch.where(torch.arange(num) == num // 2, 3.4e38, -3.4e38),
        normal.bfloat16().float(),
        normal * 1e-3 + 1000,
    ]
    return torch.stack(rows)[None, None]


@pytest.mark.parametrize("crossing", ["keep", "drop", further("exceed")])
@pytest.mark.parametrize("num", [65, *map(further, (1, 32, 161, 1024))])
def test_hard_rows(triton_device, num, crossing):
    # a share of its own for every row
    scores = families(num).transpose(1, 2)
    for turn in range(1 if triton_device.type == "cpu" else 6):
        each = torch.tensor([0.5, 1e-9, 0.9, 0.3, 1 - 1e-12, 1.0], dtype=torch.float64).roll(turn)
        assert_as_reference(triton_device, scores, each.repeat(2), crossing)


@pytest.mark.parametrize("num", [2048, *map(further, (1200, 4097, 8192))])
def test_wide_rows(triton_device, num):
    scores = families(num)[:, :, [0, 1, 2, 11] if triton_device.type == "cpu" else range(12)]
    some = torch.rand(1, 1, 1, num, generator=torch.Generator().manual_seed(1))
    assert_as_reference(triton_device, scores, 0.9, "drop")
    assert_as_reference(triton_device, scores[:, :, :1], 0.9, "keep", some < 0.7, some > 0.98)


def test_masks_of_any_shape_and_strided_scores(triton_device):
    g = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 9, 3, 2, generator=g).permute(0, 3, 2, 1)
    assert not scores.is_contiguous()
    for shape in [(1, 2, 1, 9), (3, 9), (2, 1, 3, 1), (2, 2, 3, 9)][: 1 if INTERPRETED else 4]:
        candidates, always = (torch.rand(shape, generator=g) < p for p in (0.7, 0.2))
        assert_as_reference(triton_device, scores, 0.6, "keep", candidates, always)
        # views: every other entry of a wider mask
        wide = candidates.repeat_interleave(2, -1)[..., ::2]
        assert_as_reference(triton_device, scores, 0.6, "keep", wide)


def test_the_units_are_those_of_the_definition(triton_device, monkeypatch):
    """The control of all comparisons: a kernel that counts weights a little otherwise is noticed."""
    from vsa_kernels.selection import reference

    scores = torch.tensor([[[[0.0, math.log(0.5), math.log(0.5)]]]])
    assert assert_as_reference(triton_device, scores, 0.5, "drop").kv_num_blocks.item() == 1
    assert assert_as_reference(triton_device, scores, 0.5, "exceed").kv_num_blocks.item() == 2
    right = reference.weight_units
    first = torch.tensor([1, 0, 0], device=triton_device)
    monkeypatch.setattr(reference, "weight_units", lambda *args: right(*args) + first)
    with pytest.raises(AssertionError):
        assert_as_reference(triton_device, scores, 0.5, "exceed")


def test_half_scores(triton_device):
    if triton_device.type == "cpu":
        pytest.skip("the interpreter is wrong in half precision")
    for dtype in (torch.float16, torch.bfloat16):
        assert_as_reference(triton_device, torch.randn(1, 2, 40, 300).to(dtype), 0.8, "keep")


def test_opcheck(triton_device):
    from vsa_kernels.selection.op import select_share_op

    scores = torch.randn(1, 2, 1, 5, device=triton_device)
    each = torch.tensor([0.3, 0.9], dtype=torch.float64, device=triton_device).view(1, 2, 1)
    mask = torch.rand(1, 2, 1, 5, device=triton_device) < 0.5
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(select_share_op, (scores, each, "drop", mask, ~mask, "triton"), test_utils=utils)


def test_what_does_not_fit_takes_the_reference(triton_device):
    from vsa_kernels.selection import reference, triton_share

    each = torch.full((1, 1, 1), 0.5, dtype=torch.float64, device=triton_device)
    for scores in (torch.randn(1, 1, 1, 8193), torch.randn(1, 1, 2, 3, dtype=torch.float64)):
        x = scores.to(triton_device)
        ours, theirs = (
            triton_share.select(x, each, "keep", None, None),
            reference.select_share(x, each, "keep", None, None),
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        with pytest.raises(ValueError, match="backend triton takes"):
            select_share(x, 0.5, crossing="keep", backend="triton")
        assert torch.equal(select_share(x, 0.5, crossing="keep").kv_indices, theirs[0])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device():
    scores, each = torch.randn(1, 2, 64, 64, device="cuda"), torch.tensor([0.5, 0.9], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for share in (0.9, each):
            select_share(scores, share, crossing="drop")
    finally:
        torch.cuda.set_sync_debug_mode("default")
