"""The forward kernel of Hopper for lists of blocks of up to 128 tokens (tile128): its choice and its results."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from vsa_kernels import Blocks, select_topk
from vsa_kernels.block_sparse import dispatch, triton_fwd
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.testing import assert_right, expand_mask, make_case, run

from tests.kernels.test_hopper_fwd import kernels, listing, on_hopper

EVEN = [128] * 9
# sizes on both sides of a warpgroup's 64 rows, of a part of 32 rows, and single tokens; the last block is short too
RAGGED = [128, 1, 127, 64, 65, 96, 33, 128, 32]


@pytest.fixture
def launch():
    """The launches of the kernel; what else runs is not counted."""
    from vsa_kernels.block_sparse import hopper_fwd128

    # at head dim 64 even blocks have another kernel
    alone = [row for row in dispatch.FORWARD if row[1] == "hopper_fwd128"]
    with (
        mock.patch.object(dispatch, "FORWARD", alone),
        mock.patch.object(hopper_fwd128, "launch", wraps=hopper_fwd128.launch) as calls,
    ):
        yield calls


@pytest.mark.parametrize("chip", [(0, 0), (8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("sizes", [EVEN, RAGGED, [65]], ids=("even", "ragged", "one"))
def test_the_choice_of_tile128_is_for_one_chip(chip, sizes):
    case = make_case(sizes, sizes, head_dim=128, dtype=torch.bfloat16)
    with mock.patch.object(dispatch, "capability", return_value=chip):
        assert kernels(case).forward == ("hopper_fwd128" if chip == (9, 0) else "triton_fwd")


@pytest.mark.parametrize("sizes", [([64, 64], [128, 128]), ([128, 128], [64, 60]), ([129], [128])], ids=str)
def test_other_blocks_are_not_tile128(sizes):
    case = make_case(*sizes, head_dim=128, dtype=torch.bfloat16)
    with mock.patch.object(dispatch, "capability", return_value=(9, 0)):
        assert "hopper_fwd128" not in kernels(case)


@on_hopper
@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [EVEN, RAGGED], ids=("even", "ragged"))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_of_tile128(dtype, head_dim, sizes, topk, launch):
    case = make_case(
        sizes, sizes[::-1], batch=2, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, device="cuda", seed=topk
    )
    starts = case.q_blocks.offsets.tolist()
    for shared in (False, True):
        problem = listing(case, topk, empty=(1, 4), shared=shared)
        actual = run(problem, "triton")
        assert_right(problem, actual, f"shared {shared}")
        for n in (1, 4):
            empty = slice(starts[n], starts[n + 1])
            assert (actual["out"][:, empty] == 0).all()
            assert (actual["lse"][:, :, empty] == -torch.inf).all()
    assert launch.call_count == 2


@on_hopper
@pytest.mark.parametrize("sizes", [[128], [65], [128, 65]], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_block_and_lists_of_any_length_of_tile128(head_dim, sizes, launch):
    case = make_case(
        sizes, sizes * 5, batch=2, heads=4, head_dim=head_dim, index_heads=1, dtype=torch.bfloat16, device="cuda"
    )
    assert_right(case, run(case, "triton"))
    # logits of a few hundred
    loud = replace(case, q=case.q * 8, k=case.k * 8)
    assert_right(loud, run(loud, "triton"), "large")
    assert launch.call_count == 2


@on_hopper
@pytest.mark.parametrize("sizes", [EVEN, RAGGED], ids=("even", "ragged"))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_reaches_only_rows_that_list_its_block_of_tile128(head_dim, sizes, launch):
    case = make_case(sizes, sizes, heads=2, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")
    starts = case.kv_blocks.offsets.tolist()
    # block 0 too, which an empty list computes with; the others follow a short block
    for bad in (0, 2, 6):
        problem = listing(case, 3, empty=(2,))
        clean = run(problem, "triton")
        k, v, rows = case.k.clone(), case.v.clone(), slice(starts[bad], starts[bad + 1])
        k[:, rows, 0], v[:, rows, 0] = torch.nan, torch.nan
        actual = run(replace(problem, k=k, v=v), "triton")
        # [H, L]
        nan_queries = expand_mask(problem)[0, :, :, rows].any(-1).cuda()
        nan_queries[1] = False
        assert nan_queries.any()
        assert not nan_queries[0].all()
        assert actual["lse"][0][nan_queries].isnan().all()
        for name, got in actual.items():
            if name in ("out", "lse"):
                now, before = (x[0].transpose(0, 1) if name == "out" else x[0] for x in (got, clean[name]))
                assert torch.equal(now[~nan_queries], before[~nan_queries]), name
    # a NaN in a query stays in its row
    q = case.q.clone()
    q[:, starts[3]] = torch.nan
    actual = run(replace(problem, q=q), "triton")["out"][0]
    others = torch.arange(len(actual), device="cuda") != starts[3]
    assert torch.equal(actual[others], clean["out"][0][others])
    assert launch.call_count == 7


@on_hopper
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tile128_repeats_and_agrees_with_the_other_kernel(dtype, head_dim, ragged, launch):
    g = torch.Generator(device="cuda").manual_seed(0)
    sizes = (RAGGED if ragged else EVEN) * 10
    q, k, v = (torch.randn(2, sum(sizes), 12, head_dim, generator=g, device="cuda").to(dtype) for _ in range(3))
    blocks = Blocks.from_sizes(sizes, "cuda")
    scores = torch.randn(2, 12, blocks.num, blocks.num, generator=g, device="cuda")
    index = select_topk(scores, 16, backend="reference")
    mask, scale = BlockMask(index=index, q_blocks=blocks, kv_blocks=blocks, kv_valid=None), head_dim**-0.5
    out, lse = dispatch.forward(q, k, v, mask, scale)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        again, lse_again = dispatch.forward(q, k, v, mask, scale)
        differ += (again != out).sum() + (lse_again != lse).sum()
    assert int(differ) == 0
    assert launch.call_count == 101
    expected, expected_lse = triton_fwd.forward(q, k, v, mask, scale)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    error, size, eps = (out.double() - expected.double()).abs(), expected.double().abs(), torch.finfo(dtype).eps
    assert error.max() <= eps * size.max()
    assert error.mean() <= eps / 4 * size.mean()
