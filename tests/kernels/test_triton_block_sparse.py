"""What the `triton` backend must keep beside its error budget: confinement, exact zeros, block and head sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vsa_kernels import BlockIndex, block_sparse_attn, merge_attn
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_bwd
from vsa_kernels.testing import (
    assert_right,
    assert_within_budget,
    define,
    expand_mask,
    index_of,
    make_case,
    run,
    summed_terms,
)

from tests.kernels.interpreted import further
from tests.kernels.test_block_sparse import assert_alone_is_with_zeros

NAMES = ("out", "lse", "dq", "dk", "dv")


def dtype_of(device: torch.device) -> torch.dtype:
    # the interpreter is wrong in bf16
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@pytest.mark.parametrize(
    ("q_size", "kv_size", "even"),
    [
        (64, 64, True),
        (64, 16, False),
        (128, 64, True),
        (8, 200, False),
        (60, 60, False),
        *(further(size, size, even) for size in (128, 256) for even in (True, False)),
        *(further(*sizes, True) for sizes in ((64, 16), (8, 200), (60, 60))),
        *(further(*sizes, False) for sizes in ((64, 64), (128, 64))),
    ],
)
def test_block_sizes(q_size, kv_size, even, triton_device):
    small = triton_device.type == "cpu"
    q_sizes, kv_sizes = [q_size] * 2, [kv_size] * (3 if kv_size < 100 else 2)
    if not even:
        q_sizes, kv_sizes = [q_size, q_size - 5, 3], [*kv_sizes, max(1, kv_size - 7), 1]
    case = make_case(
        *(q_sizes, kv_sizes),
        heads=1 if small else 4,
        kv_heads=1 if small else 2,
        head_dim=16 if small else 64,
        density=0.7,
        dtype=dtype_of(triton_device),
        device=triton_device,
        seed=1,
    )
    assert_right(case, run(case, "triton"))


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_head_dims(head_dim, half, triton_device):
    if triton_device.type == "cpu" and (half == torch.float16 or head_dim not in (48, 128)):
        pytest.skip("the interpreter runs two head dims in fp32")
    dtype = half if triton_device.type == "cuda" else torch.float32
    sizes = ([64, 40, 64], [64, 64, 21]) if triton_device.type == "cuda" else ([16, 10], [16, 5])
    case = make_case(*sizes, head_dim=head_dim, density=0.8, dtype=dtype, device=triton_device)
    assert_right(case, run(case, "triton"))


def test_rows_without_blocks(triton_device):
    case = make_case([30, 40], [50, 20], batch=2, heads=2, density=0.0, device=triton_device)
    actual = run(case, "triton")
    assert (actual["out"] == 0).all()
    assert (actual["lse"] == -torch.inf).all()
    assert all((actual[name] == 0).all() for name in ("dq", "dk", "dv"))


def test_an_undefined_lse_gradient_of_an_empty_row_stays_there(triton_device):
    case = make_case([30, 40], [50, 20], density=1.0, device=triton_device)
    counts = torch.tensor([[[0, 2]]], dtype=torch.int32, device=triton_device)
    case = replace(case, index=replace(case.index, kv_num_blocks=counts))
    clean = run(case, "triton")
    dlse = case.dlse.clone()
    dlse[..., :30] = torch.nan
    actual = run(replace(case, dlse=dlse), "triton")
    for name in NAMES:
        assert torch.equal(actual[name], clean[name])


def test_outputs_that_are_not_used(triton_device):
    dtype = dtype_of(triton_device)
    case = make_case([30, 40], [50, 20], density=1.0, dtype=dtype, device=triton_device)
    assert_alone_is_with_zeros(case, "triton")


def test_unselected_blocks_get_exactly_zero_gradient(triton_device):
    case = make_case([16] * 3, [16] * 4, heads=2, kv_heads=1, density=1.0, device=triton_device)
    mask = torch.tensor([True, False, True, False], device=triton_device).expand(1, 1, 3, 4)
    actual = run(replace(case, index=BlockIndex.from_dense(mask)), "triton")
    for name in ("dk", "dv"):
        blocks = actual[name].view(4, -1)
        assert (blocks[1::2] == 0).all()
        assert (blocks[::2] != 0).any(-1).all()


@pytest.mark.parametrize(
    ("bad", "sizes"),
    [("q", [20, 13, 20, 7]), ("kv", [20, 13, 20, 7]), ("kv", [16] * 4), further("q", [16] * 4)],
    ids=str,
)
def test_nan_reaches_only_what_lists_its_block(bad, sizes, triton_device):
    # tiles are larger than the blocks or end inside them: the rows behind a block belong to its neighbour
    dtype = dtype_of(triton_device)
    case = make_case(sizes, sizes, heads=2, kv_heads=2, head_dim=64, dtype=dtype, device=triton_device, seed=3)
    at = case.q_blocks.offsets.tolist()
    rows = slice(at[1], at[2])
    mask = expand_mask(case).to(triton_device)
    clean = run(case, "triton")
    if bad == "kv":
        k, v = case.k.clone(), case.v.clone()
        k[:, rows, 0], v[:, rows, 0] = torch.nan, torch.nan
        actual = run(replace(case, k=k, v=v), "triton")
        nan_queries = mask[0, :, :, rows].any(-1)
        nan_queries[1] = False
        # what a NaN query touches becomes NaN in turn
        nan_keys = (mask[0] & nan_queries[..., None]).any(1)
        nan_keys[0, rows] = True
    else:
        q, dout = case.q.clone(), case.dout.clone()
        q[:, rows, 0], dout[:, rows, 0] = torch.nan, torch.nan
        actual = run(replace(case, q=q, dout=dout), "triton")
        nan_queries = torch.zeros(2, mask.shape[2], dtype=torch.bool, device=triton_device)
        nan_queries[0, rows] = mask[0, 0, rows].any(-1)
        nan_keys = (mask[0] & nan_queries[..., None]).any(1)
        # their own outputs may be anything: the query is NaN whatever it lists
        nan_queries[0, rows] = True
    assert nan_queries.any()
    assert not nan_queries.all()
    assert not nan_keys.all()
    for name, nan_rows in (("out", nan_queries), ("dq", nan_queries), ("dk", nan_keys), ("dv", nan_keys)):
        clean_rows = ~nan_rows.T
        assert torch.equal(actual[name][0][clean_rows], clean[name][0][clean_rows]), name
    assert torch.equal(actual["lse"][0][~nan_queries], clean["lse"][0][~nan_queries])


def test_strided_inputs(triton_device):
    case = make_case(
        [40, 9], [30, 21], batch=2, heads=2, kv_heads=2, dtype=dtype_of(triton_device), device=triton_device
    )
    expected = run(case, "triton")
    views = {}
    for name in ("q", "k", "v", "dout"):
        x = getattr(case, name)
        # heads outermost, as [B, H, L, D] kernels leave it, and q, k, v as parts of one projection
        views[name] = x.transpose(1, 2).contiguous().transpose(1, 2) if name != "k" else torch.cat([x, x], -1)[..., :16]
    actual = run(replace(case, **views), "triton")
    for name in NAMES:
        assert torch.equal(actual[name], expected[name]), name


def test_parts_over_disjoint_blocks_merge_by_their_lse(triton_device):
    heads = 1 if triton_device.type == "cpu" else 2
    case = make_case([40, 30], [50, 20, 30, 40], heads=heads, kv_heads=heads, density=1.0, device=triton_device)
    first = torch.tensor([[[[1, 0, 1, 0], [0, 1, 1, 0]]]], dtype=torch.bool, device=triton_device)
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    blocks = dict(q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, backend="triton")
    parts = [block_sparse_attn(q, k, v, BlockIndex.from_dense(m), **blocks) for m in (first, ~first)]
    out, _ = merge_attn(*zip(*parts, strict=True))
    grads = torch.autograd.grad(out, (q, k, v), case.dout)
    whole = run(replace(case, dlse=torch.zeros_like(case.dlse)), "triton")
    torch.testing.assert_close(out, whole["out"], rtol=1e-4, atol=1e-5)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(grad, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("q_sizes", "kv_sizes", "fine"),
    [([16] * 4, [16] * 5, False), further([16, 9, 4], [16, 130, 16, 5, 16], True)],
    ids=["even", "ragged-fine"],
)
def test_the_order_of_programs_changes_no_bit(q_sizes, kv_sizes, fine, triton_device, monkeypatch):
    """Lists with attention sinks, grouped heads, blocks of one and of several tiles."""
    from vsa_kernels.block_sparse import triton_bwd
    from vsa_kernels.block_sparse.triton_tiles import Plan

    sides = {"heads": 4, "kv_heads": 2, "fine": fine, "kv_valid": fine, "dtype": dtype_of(triton_device)}
    case = make_case(q_sizes, kv_sizes, batch=2, **sides, device=triton_device)
    g = torch.Generator().manual_seed(0)
    selection = torch.rand(2, 4, len(q_sizes), len(kv_sizes), generator=g) < 0.2
    selection[..., 3] = True
    masked = (torch.rand(selection.shape, generator=g) < 0.5) & selection if fine else None
    index = vars(index_of(selection, masked, max(q_sizes), max(kv_sizes), g))
    tensors = {name: x.to(triton_device) for name, x in index.items() if isinstance(x, torch.Tensor)}
    case = replace(case, index=BlockIndex(**{**index, **tensors}))
    mask = BlockMask(index=case.index, **case.blocks, kv_valid=case.kv_valid)
    lse = run(case, "reference")["lse"].float()
    plan = Plan.of("dkv", case.q, case.k, mask, False)
    # any delta will do
    args = (case.dout, torch.randn_like(lse), lse, case.q, case.k, case.v, mask, 0.2, plan, (None, None))

    def gradients(order=None):
        if order is not None:
            monkeypatch.setattr(triton_bwd, "long_first", lambda *_: order)
        return torch.stack(triton_bwd._run_dkv(*args))

    orders = []
    long_first = triton_bwd.long_first
    monkeypatch.setattr(triton_bwd, "long_first", lambda *args: orders.append(long_first(*args)) or orders[-1])
    expected = gradients()
    assert expected.isfinite().all()
    (order,) = orders
    natural = torch.arange(len(order), dtype=torch.int32, device=triton_device)
    assert not torch.equal(order, natural)
    permutation = torch.randperm(len(order), generator=g).int().to(triton_device)
    for other in (natural, permutation):
        assert torch.equal(gradients(other), expected)
    # control: a block that no program takes keeps what its memory held, here nan
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert gradients(order).isfinite().all()
        assert gradients(torch.cat([order[:1], order[:-1]])).isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_negative_scale_is_refused(triton_device):
    with pytest.raises(ValueError, match=r"scale must not be negative for backend triton, got -1.0"):
        run(replace(make_case([2], [2], device=triton_device), scale=-1.0), "triton")


@pytest.mark.parametrize("fine", [False, True], ids=["plain", "fine"])
def test_a_scale_of_0_takes_the_mean(fine, triton_device):
    """Ragged blocks, masks, a row without any block: hidden logits are -inf, and -inf * 0 would be nan."""
    case = make_case([9, 4], [7, 16, 3], density=0.7, fine=fine, device=triton_device)
    case = replace(case, scale=0.0)
    exact, plain, terms, actual = define(case), run(case, "reference"), summed_terms(case), run(case, "triton")
    for name in ("out", "lse", "dv"):
        assert_within_budget(actual[name], plain[name], exact[name], name, terms[name])
    for name in ("dq", "dk"):
        assert exact[name].abs().max() == 0
        assert actual[name].abs().max() < 1e-30
    key_counts = expand_mask(case).sum(-1).to(actual["lse"].device)
    assert torch.allclose(actual["lse"].exp(), key_counts.float())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_of_large_activations(head_dim, triton_device):
    """q and k of 30 standard deviations, logits of some thousands: bf16 on a GPU, fp32 in the interpreter."""
    if triton_device.type == "cpu":
        if head_dim == 128:
            pytest.skip("once is enough in the interpreter")
        case = make_case([16, 9], [16, 12, 5], heads=2, kv_heads=1, head_dim=32, density=0.8)
    else:
        sizes = ([64, 40, 64, 64] * 2, [64, 64, 21, 64] * 2)
        sides = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "dtype": torch.bfloat16, "device": triton_device}
        case = make_case(*sizes, batch=2, **sides, density=0.6)
    case = replace(case, q=case.q * 30, k=case.k * 30)
    exact, plain, actual, terms = define(case), run(case, "reference"), run(case, "triton"), summed_terms(case)
    largest = float(exact["lse"][exact["lse"].isfinite()].abs().max())
    assert largest > 2000
    torch.testing.assert_close(actual["lse"].double(), exact["lse"], rtol=1e-5, atol=1e-2)
    # in fp32 the rounding of the logits themselves, which forward and backward may sum in another order, is the error
    spread = largest if case.q.dtype == torch.float32 else 1.0
    mask = BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=None)
    args = (case.q, case.k, case.v, *mask.flatten(), case.q.shape[-1] ** -0.5, "triton")
    rounded_lse = actual["lse"].to(torch.bfloat16).float()
    wrong = dict(zip(NAMES[2:], block_sparse_bwd(case.dout, case.dlse, actual["out"], rounded_lse, *args), strict=True))
    for name in ("out", "dq", "dk", "dv"):
        budget = (plain[name], exact[name], name, spread * terms[name])
        assert_within_budget(actual[name], *budget)
        if name in wrong:
            # control: p from an lse in half precision, which loses whole units there
            with pytest.raises(AssertionError, match=name):
                assert_within_budget(wrong[name], *budget)
