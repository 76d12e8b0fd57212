"""The backward kernels of Hopper for lists of blocks of up to 128 tokens (tile128), with and without a workspace."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from vsa_kernels import Blocks, set_workspace_limit, workspace_limit
from vsa_kernels.block_sparse import dispatch
from vsa_kernels.block_sparse.triton_index import TransposedIndex
from vsa_kernels.testing import assert_right, define, make_case, run

from tests.kernels.test_hopper_fwd import listing, mask_of, on_hopper
from tests.kernels.test_hopper_fwd128 import EVEN, RAGGED


@contextmanager
def limited(size: int):
    """Another limit of the workspace."""
    before = workspace_limit()
    set_workspace_limit(size)
    try:
        yield
    finally:
        set_workspace_limit(before)


@pytest.fixture(params=[0, 6 << 20, 4 << 30], ids=("alone", "parts", "workspace"))
def launch(request):
    """The launches of the kernels: without room for ds, with room for two heads of 9 x 9 blocks, and for all."""
    from vsa_kernels.block_sparse import hopper_bwd128

    with limited(request.param), mock.patch.object(hopper_bwd128, "launch", wraps=hopper_bwd128.launch) as calls:
        yield calls


def test_statistics_by_block_of_unaligned_tile128(triton_device):
    from vsa_kernels.block_sparse.hopper_bwd128 import _by_block

    sizes = [128, 65, 100, 127, 128]
    lse, delta = torch.randn(2, 2, 3, sum(sizes), device=triton_device)
    padded_lse, padded_delta = _by_block(lse, delta, Blocks.from_sizes(sizes, triton_device))
    for padded, x, rest in ((padded_lse, lse, torch.inf), (padded_delta, delta, 0.0)):
        assert padded.shape == (2, 3, len(sizes), 128)
        for n, tokens in enumerate(x.split(sizes, -1)):
            assert padded[:, :, n, : sizes[n]].equal(tokens)
            assert (padded[:, :, n, sizes[n] :] == rest).all()


@pytest.mark.parametrize(
    "room", [3, 12, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))], ids="room for {}".format
)
@pytest.mark.parametrize("index_heads", [1, 6])
def test_parts_of_samples_and_heads_are_the_whole_of_tile128(index_heads, room):
    """Each part gets its own lists, statistics and heads of a group; the definition stands for the kernels."""
    from vsa_kernels.block_sparse import hopper_bwd128

    case = make_case([128] * 3, [128] * 4, batch=2, heads=6, kv_heads=3, head_dim=128, index_heads=index_heads)
    mask, parts = mask_of(case), []
    numbers = torch.randn(2, 6, 384)

    def dkv(dout, delta, lse, q, k, v, mask, columns, scale, means, workspace, dk, dv):
        assert columns.rows.equal(mask.index.kv_indices)
        assert columns.row_offsets.equal(mask.index.kv_num_blocks)
        assert workspace.shape[0] >= q.shape[0] * q.shape[2] * 3 * mask.index.kv_indices.shape[-1] * 128
        half = replace(case, q=q, k=k, v=v, dout=dout, dlse=delta + lse, index=mask.index)
        parts.append(define(half))
        dk.copy_(parts[-1]["dk"])
        dv.copy_(parts[-1]["dv"])

    def transpose(lists, counts, _num_kv, *, places):
        # stands for lists by column: parts are cut out of them alike
        assert places
        return TransposedIndex(row_offsets=counts, rows=lists, ids=None)

    with (
        mock.patch.object(hopper_bwd128, "transpose", transpose),
        limited(room * 3 * case.index.kv_indices.shape[-1] * 128 * 128 * 4),
        mock.patch.object(hopper_bwd128, "_run_dkv", dkv),
        mock.patch.object(hopper_bwd128, "dq_from", lambda k, mask, scale, mean, room, dq: dq.copy_(parts[-1]["dq"])),
    ):
        gradients = hopper_bwd128.backward(
            case.dout, numbers, 2 * numbers, case.q, case.k, case.v, mask, 128**-0.5, dispatch.NO_SHARES
        )
    assert len(parts) == {2: 6, 3: 6, 4: 4, 12: 1}[room]
    whole = define(replace(case, dlse=3 * numbers))
    for name, actual in zip(("dq", "dk", "dv"), gradients, strict=True):
        torch.testing.assert_close(actual.double(), whole[name], rtol=1e-5, atol=1e-6)


@on_hopper
@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [EVEN, RAGGED], ids=("even", "ragged"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_tile128(dtype, sizes, topk, launch):
    case = make_case(
        sizes, sizes[::-1], batch=2, heads=4, kv_heads=2, head_dim=128, dtype=dtype, device="cuda", seed=topk
    )
    for shared in (False, True):
        problem = listing(case, topk, empty=(1, 4), shared=shared)
        actual = run(problem, "triton")
        assert_right(problem, actual, f"shared {shared}")
    assert launch.call_count


@on_hopper
@pytest.mark.parametrize("sizes", [[128], [65], [128, 65], [128] * 7], ids=str)
def test_lists_of_any_length_of_tile128(sizes, launch):
    case = make_case(
        sizes, sizes * 5, batch=2, heads=4, head_dim=128, index_heads=1, dtype=torch.bfloat16, device="cuda"
    )
    assert_right(case, run(case, "triton"))
    loud = replace(case, q=case.q * 8, k=case.k * 8)
    assert_right(loud, run(loud, "triton"), "large")
    again = [run(case, "triton") for _ in range(20)]
    assert all(torch.equal(a[name], again[0][name]) for a in again for name in a)
    assert launch.call_count


@on_hopper
def test_nan_of_a_neighbour_stays_out_of_gradients_of_tile128(launch):
    case = make_case(RAGGED, RAGGED, heads=2, kv_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    problem = listing(case, 3)
    clean, (at, bad) = run(problem, "triton"), (case.q_blocks.offsets.tolist(), 2)
    q, rows = case.q.clone(), slice(at[bad], at[bad + 1])
    q[:, rows] = torch.nan
    actual = run(replace(problem, q=q), "triton")
    assert actual["dq"][:, rows].isnan().all()
    # kv blocks that the bad queries do not list
    lists = problem.index.kv_indices[0, :, bad, :3].tolist()
    for h, listed in enumerate(lists):
        for n in set(range(len(RAGGED))) - set(listed):
            tokens = slice(at[n], at[n + 1])
            for name in ("dk", "dv"):
                assert torch.equal(actual[name][:, tokens, h], clean[name][:, tokens, h]), (name, n)


@on_hopper
def test_nan_of_a_key_reaches_only_queries_that_list_it_of_tile128(launch):
    """Rows behind a short block are those of the next one: they are no part of it, whatever they hold."""
    case = make_case(RAGGED, RAGGED, heads=2, kv_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    problem = listing(case, 2)
    clean, at = run(problem, "triton"), case.kv_blocks.offsets.tolist()
    # behind blocks of 1, 65 and 96 tokens
    for bad in (2, 5, 6):
        k, v, rows = case.k.clone(), case.v.clone(), slice(at[bad], at[bad + 1])
        k[:, rows], v[:, rows] = torch.nan, torch.nan
        actual = run(replace(problem, k=k, v=v), "triton")
        for h in range(2):
            lists = [set(row) for row in problem.index.kv_indices[0, h, :, :2].tolist()]
            others = [n for n, row in enumerate(lists) if bad not in row]
            assert others
            reached = set().union(*(row for row in lists if bad in row))
            for n in others:
                tokens = slice(at[n], at[n + 1])
                assert torch.equal(actual["dq"][:, tokens, h], clean["dq"][:, tokens, h]), (bad, n)
            for n in set(range(len(RAGGED))) - reached:
                tokens = slice(at[n], at[n + 1])
                for name in ("dk", "dv"):
                    assert torch.equal(actual[name][:, tokens, h], clean[name][:, tokens, h]), (bad, name, n)
