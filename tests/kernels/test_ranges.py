"""Long rows of keys in ranges: pieces of lists, and attention that is merged from them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from vsa_kernels.block_sparse import dispatch
from vsa_kernels.testing import assert_right, make_case, run

from tests.kernels.interpreted import INTERPRETED, further
from tests.kernels.test_hopper_fwd import HOPPER, listing


@pytest.fixture
def in_ranges(triton_device):
    """Rows of any length have three ranges; where kernels are interpreted, that of Triton stands for Hopper's."""
    if not INTERPRETED and not HOPPER:
        pytest.skip("needs a CUDA device of capability 9.0, or interpreted kernels")
    from vsa_kernels.block_sparse import hopper_fwd, triton_fwd, triton_ranges

    def stand_in(q, k, v, mask, scale, into):
        for to, x in zip(into, triton_fwd.forward(q, k, v, mask, scale), strict=True):
            to.copy_(x)

    with ExitStack() as patches:
        if INTERPRETED:
            patches.enter_context(mock.patch.object(dispatch, "_hopper", return_value=True))
            patches.enter_context(mock.patch.object(hopper_fwd, "forward", stand_in))
        for module in (dispatch, triton_ranges):
            patches.enter_context(mock.patch.object(module, "ranges_of", return_value=3))
        yield patches.enter_context(mock.patch.object(triton_ranges, "split", wraps=triton_ranges.split))


@pytest.mark.parametrize(
    ("blocks", "shared"), [further(1, False), (2, True), (7, False), further(7, True), further(12, False)]
)
def test_triton_long_rows_are_merged_from_ranges(in_ranges, triton_device, blocks, shared):
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    case = make_case(
        [64] * 3, [64] * blocks, batch=2, heads=2, kv_heads=1, head_dim=64, dtype=dtype, device=triton_device
    )
    problem = listing(case, min(blocks, 4), empty=(1,), shared=shared)
    actual = run(problem, "triton")
    assert_right(problem, actual)
    assert (actual["lse"][:, :, 64:128] == -torch.inf).all()
    # forward and dq
    assert in_ranges.call_count == 2
    # numpy's kernels repeat themselves
    again = actual if INTERPRETED else run(problem, "triton")
    assert all(torch.equal(again[name], x) for name, x in actual.items())


def test_triton_ranges_are_pieces_of_lists(in_ranges, triton_device):
    case = listing(make_case([64] * 9, [64] * 70, heads=2, head_dim=64, device=triton_device), 33, empty=(0, 5))
    parts = in_ranges(case.index, 70, 4)
    for b, h, n in torch.cartesian_prod(*(torch.arange(x) for x in case.index.kv_num_blocks.shape)).tolist():
        row = case.index.kv_indices[b, h, n, : case.index.kv_num_blocks[b, h, n]]
        for i, part in enumerate(parts):
            piece = part.kv_indices[b, h, n, : part.kv_num_blocks[b, h, n]]
            assert torch.equal(piece, row[(row >= 18 * i) & (row < 18 * (i + 1))])


def test_triton_ranges_miss_nothing(in_ranges, triton_device):
    """The control: attention over two of three ranges is wrong."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    case = listing(make_case([64], [64] * 7, heads=1, head_dim=64, dtype=dtype, device=triton_device), 6)
    from vsa_kernels.block_sparse import triton_ranges

    def short(index, num_kv, parts):
        *kept, last = whole(index, num_kv, parts)
        return [*kept, replace(last, kv_num_blocks=torch.zeros_like(last.kv_num_blocks))]

    whole = in_ranges
    with mock.patch.object(triton_ranges, "split", short), pytest.raises(AssertionError):
        assert_right(case, run(case, "triton"))


def test_ranges_follow_the_cache():
    rows = {76_800: 1, 98_304: 1, 131_072: 2, 221_184: 3}
    for tokens, ranges in rows.items():
        assert dispatch.ranges_of(torch.empty((1, tokens, 1, 128), dtype=torch.bfloat16, device="meta")) == ranges
