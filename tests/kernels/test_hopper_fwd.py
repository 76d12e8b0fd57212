"""The forward kernel of Hopper: when it is chosen (any machine), and what it must keep (its chip only)."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from vsa_kernels import Blocks, select_topk
from vsa_kernels.block_sparse import dispatch
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.testing import Case, assert_right, expand_mask, index_of, make_case, run

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def on_hopper(test: Any) -> Any:
    skip = pytest.mark.skipif(
        not HOPPER or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs a CUDA device of capability 9.0 and kernels that are not interpreted",
    )
    return pytest.mark.gpu(skip(test))


@pytest.fixture
def launch():
    """The launches of the kernel; what else runs is not counted."""
    from vsa_kernels.block_sparse import hopper_fwd

    with mock.patch.object(hopper_fwd, "launch", wraps=hopper_fwd.launch) as calls:
        yield calls


def listing(case: Case, topk: int, *, empty: tuple[int, ...] = (), shared: bool = False) -> Case:
    """The case with `topk` random blocks in every row and none in the empty ones, behind them poison.

    Args:
        case: problem.
        topk: listed blocks.
        empty: query blocks that list nothing.
        shared: one list for every sample and head.
    """
    g = torch.Generator().manual_seed(topk)
    batch, heads = (1, 1) if shared else (case.q.shape[0], case.q.shape[2])
    scores = torch.rand(batch, heads, case.q_blocks.num, case.kv_blocks.num, generator=g)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(topk, -1).indices, True)
    mask[:, :, list(empty)] = False
    index = index_of(mask, None, 64, 64, g)
    at = case.q.device
    index = replace(index, kv_indices=index.kv_indices.to(at), kv_num_blocks=index.kv_num_blocks.to(at))
    return replace(case, index=index)


def mask_of(case: Case) -> BlockMask:
    return BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=case.kv_valid)


def kernels(case: Case) -> dispatch.Kernels:
    """The kernels of backend `triton` for a case."""
    return dispatch.kernels_of(case.q, case.k, case.v, mask_of(case))


def large(dtype: torch.dtype, head_dim: int, tokens: int = 4096, heads: int = 12) -> tuple[Any, ...]:
    """q, k, v, mask and scale of a problem that fills the chip."""
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, head_dim, generator=g, device="cuda").to(dtype) for _ in range(3))
    blocks = Blocks.from_sizes([64] * (tokens // 64), "cuda")
    scores = torch.randn(1, heads, blocks.num, blocks.num, generator=g, device="cuda")
    index = select_topk(scores, 16, backend="reference")
    return q, k, v, BlockMask(index=index, q_blocks=blocks, kv_blocks=blocks, kv_valid=None), head_dim**-0.5


def unsuitable() -> dict[str, Case]:
    """What differs in one way from a suitable case."""
    half, sizes = {"head_dim": 64, "heads": 2, "kv_heads": 2, "dtype": torch.bfloat16}, [64, 64]
    case = make_case(sizes, sizes, **half)
    wide, padded = torch.cat([case.q, case.q], -1), torch.cat([case.v, case.v[:, :1]], 1)
    return {
        "dtype": case.to(torch.float32),
        "head dim": make_case(sizes, sizes, **{**half, "head_dim": 96}),
        "ragged queries": make_case([64, 63], sizes, **half),
        "ragged kv": make_case(sizes, [64, 1], **half),
        "query tiles": make_case([96, 96], sizes, **half),
        "kv tiles": make_case(sizes, [128, 128], **{**half, "head_dim": 128}),
        "valid": make_case(sizes, sizes, **half, kv_valid=True),
        "fine masks": make_case(sizes, sizes, **half, fine=True),
        "parts of a wider head": replace(case, q=wide[..., :64]),
        "heads outermost": replace(case, k=case.k.transpose(1, 2).contiguous().transpose(1, 2)),
        "alignment": replace(case, v=padded.flatten()[1 : case.v.numel() + 1].view(case.v.shape)),
    }


@pytest.mark.parametrize("chip", [(0, 0), (8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("q_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_choice_is_for_one_chip(chip, q_size, dtype):
    case = make_case([q_size] * 2, [64] * 3, batch=2, heads=2, head_dim=128, dtype=dtype)
    with mock.patch.object(dispatch, "capability", return_value=chip):
        assert kernels(case).forward == ("hopper_fwd" if chip == (9, 0) else "triton_fwd")


@pytest.mark.parametrize("name", unsuitable())
def test_the_choice_leaves_everything_else_to_the_other_kernel(name):
    case = unsuitable()[name]
    with mock.patch.object(dispatch, "capability", return_value=(9, 0)):
        assert kernels(case) == ("triton_fwd", "triton_bwd", "triton_bwd", 0)


@on_hopper
@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("q_size", [64, 128])
@pytest.mark.parametrize(("head_dim", "kv_size"), [(64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results(dtype, head_dim, kv_size, q_size, topk, launch):
    case = make_case(
        *([q_size] * 5, [kv_size] * 9),
        batch=2,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
        seed=topk,
    )
    for shared in (False, True):
        problem = listing(case, topk, empty=(1, 4), shared=shared)
        actual = run(problem, "triton")
        assert_right(problem, actual, f"shared {shared}")
        empty = slice(q_size, 2 * q_size)
        assert (actual["out"][:, empty] == 0).all()
        assert (actual["lse"][:, :, empty] == -torch.inf).all()
    assert launch.call_count == 2


@on_hopper
@pytest.mark.parametrize(("index_batch", "index_heads"), [(1, 4), (2, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_of_any_length_broadcast(head_dim, index_batch, index_heads, launch):
    case = make_case(
        *([64] * 12, [64] * 10),
        batch=2,
        heads=4,
        kv_heads=1,
        head_dim=head_dim,
        index_batch=index_batch,
        index_heads=index_heads,
        dtype=torch.bfloat16,
        device="cuda",
    )
    # expanded views say the same
    rows = (2, 4, *case.index.kv_indices.shape[2:])
    views = replace(
        case.index,
        kv_indices=case.index.kv_indices.expand(rows),
        kv_num_blocks=case.index.kv_num_blocks.expand(rows[:3]),
    )
    actual, same = run(case, "triton"), run(replace(case, index=views), "triton")
    assert_right(case, actual)
    assert torch.equal(actual["out"], same["out"])
    assert torch.equal(actual["lse"], same["lse"])
    assert launch.call_count == 2


@on_hopper
@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scales(head_dim, scale, launch):
    case = make_case([64] * 3, [64] * 6, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")
    case = replace(listing(case, 3, empty=(2,)), scale=scale)
    actual = run(case, "triton")
    if scale == 0:
        # the smallest normal number stands for 0
        for name in ("dq", "dk"):
            assert actual[name].abs().max() < 1e-36
            actual[name] = torch.zeros_like(actual[name])
    assert_right(case, actual)
    assert launch.call_count == 1


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_parts_of_one_projection(head_dim, launch):
    case = listing(
        make_case(
            [128] * 3, [64] * 6, batch=2, heads=3, kv_heads=3, head_dim=head_dim, dtype=torch.float16, device="cuda"
        ),
        5,
    )
    q, k, v = torch.stack([case.q, case.k, case.v], 2).unbind(2)
    expected, actual = run(case, "triton"), run(replace(case, q=q, k=k, v=v), "triton")
    assert not q.is_contiguous()
    assert torch.equal(actual["out"], expected["out"])
    assert torch.equal(actual["lse"], expected["lse"])
    assert launch.call_count == 2


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_reaches_only_rows_that_list_its_block(head_dim, launch):
    sides = ([64] * 8, [64] * 8)
    case = make_case(*sides, heads=2, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")
    # block 0 too: it is what a list read past its end would fall back to
    for bad in (0, 5):
        problem = listing(case, 3, empty=(2,))
        clean = run(problem, "triton")
        k, v, rows = case.k.clone(), case.v.clone(), slice(64 * bad, 64 * bad + 64)
        k[:, rows, 0], v[:, rows, 0] = torch.nan, torch.nan
        actual = run(replace(problem, k=k, v=v), "triton")
        # [H, L]
        nan_queries = expand_mask(problem)[0, :, :, rows].any(-1).cuda()
        nan_queries[1] = False
        assert nan_queries.any()
        assert not nan_queries[0].all()
        assert actual["out"][0].transpose(0, 1)[nan_queries].isnan().all()
        assert actual["lse"][0][nan_queries].isnan().all()
        assert torch.equal(
            actual["out"][0].transpose(0, 1)[~nan_queries], clean["out"][0].transpose(0, 1)[~nan_queries]
        )
        assert torch.equal(actual["lse"][0][~nan_queries], clean["lse"][0][~nan_queries])
    assert launch.call_count == 4


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats_bit_for_bit(head_dim, launch):
    problem = large(torch.bfloat16, head_dim)
    out, lse = dispatch.forward(*problem)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        again, lse_again = dispatch.forward(*problem)
        differ += (again != out).sum() + (lse_again != lse).sum()
    assert int(differ) == 0
    assert launch.call_count == 201


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_kernels_agree_within_rounding(dtype, head_dim, launch):
    from vsa_kernels.block_sparse import triton_fwd

    q, k, v, mask, scale = large(dtype, head_dim)
    out, lse = dispatch.forward(q, k, v, mask, scale)
    assert launch.call_count == 1
    expected, expected_lse = triton_fwd.forward(q, k, v, mask, scale)
    assert launch.call_count == 1
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    error, size = (out.double() - expected.double()).abs(), expected.double().abs()
    eps = torch.finfo(dtype).eps
    assert error.max() <= eps * size.max()
    assert error.mean() <= eps / 4 * size.mean()


@on_hopper
@pytest.mark.parametrize("slots", [(1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("q_size", [128, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_warpgroups_on_one_list_change_no_bit(head_dim, q_size, slots, launch):
    """`hopper_fwd_wide` with 8 warps: each row is multiplied and added up as with 4."""
    from vsa_kernels.block_sparse import hopper_fwd

    case = make_case(
        [q_size] * 4, [64] * 9, batch=2, heads=4, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, device="cuda"
    )
    results = []
    for warps in (4, 8):
        options = {"K_SLOTS": slots[0], "V_SLOTS": slots[1], "num_warps": warps, "maxnreg": 128}
        with mock.patch.object(hopper_fwd, "config", return_value=options):
            for topk in (1, 2, 3, 8):
                problem = listing(case, topk, empty=(2,))
                results.append(run(problem, "triton"))
                assert_right(problem, results[-1], f"{warps} warps, {topk} blocks")
    for narrow, wide in zip(results[:4], results[4:], strict=True):
        assert torch.equal(narrow["out"], wide["out"])
        assert torch.equal(narrow["lse"], wide["lse"])
    assert launch.call_count == 8


@on_hopper
def test_offsets_beyond_32_bits(launch):
    blocks, heads = 2049, 128
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    q = torch.randn(1, blocks * 64, heads, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 1 << 31
    mask = torch.ones(1, 1, blocks, 2, dtype=torch.bool)
    index = index_of(mask, None, 64, 64, torch.Generator())
    index = replace(index, kv_indices=index.kv_indices.cuda(), kv_num_blocks=index.kv_num_blocks.cuda())
    sides = {"q_blocks": Blocks.from_sizes([64] * blocks, "cuda"), "kv_blocks": Blocks.from_sizes([64, 64], "cuda")}
    out, lse = dispatch.forward(q, k, v, BlockMask(index=index, kv_valid=None, **sides), 128**-0.5)
    assert launch.call_count == 1
    for rows in (slice(0, 64), slice(-64, None)):
        logits = q[0, rows].double() @ k[0, :, 0].double().T / math.sqrt(128)
        torch.testing.assert_close(lse[0, :, rows].T.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        expected = logits.softmax(-1) @ v[0, :, 0].double()
        torch.testing.assert_close(out[0, rows].double(), expected, rtol=2e-2, atol=2e-2)
