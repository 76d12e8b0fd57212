"""Attention with a pooled tail against one dense softmax in fp64 over tokens and means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn, tail_attn
from vsa_kernels.tail.op import tail_bwd, tail_fwd
from vsa_kernels.testing import Case, assert_within_budget, expand_mask, make_case

from tests.kernels.interpreted import further
from tests.kernels.test_hopper_fwd import mask_of, on_hopper

NAMES = ("out", "dq", "dk", "dv")
SHAPES: dict[str, Any] = {
    "even": (([16] * 3, [16] * 4), {"heads": 2, "kv_heads": 2}),
    "ragged": (([5, 19, 3, 10, 1], [7, 2, 11, 1, 6, 4]), {"heads": 2, "kv_heads": 1, "head_dim": 20}),
    "long": (([70, 33], [8] * 40), {"heads": 1, "head_dim": 48, "density": 0.2}),
    "shared": (([16] * 3, [4] * 9), {"batch": 2, "heads": 2, "kv_heads": 1, "index_batch": 1, "index_heads": 1}),
}


def with_candidates(case: Case, some: bool) -> tuple[Case, Tensor | None]:
    """The case with four of five blocks as candidates, and with a last row that has neither these nor a list."""
    if not some:
        return case, None
    num_q, num_kv = case.q_blocks.num, case.kv_blocks.num
    candidates = torch.arange(num_q * num_kv, device=case.q.device).view(num_q, num_kv) % 5 > 0
    candidates[-1] = False
    counts = case.index.kv_num_blocks.clone()
    counts[:, :, -1] = 0
    return replace(case, index=replace(case.index, kv_num_blocks=counts)), candidates


def define(
    case: Case, exclude: bool, candidates: Tensor | None, *, weighted: bool = True, share: bool = True
) -> dict[str, Tensor]:
    """out, lse and gradients in fp64, by the tokens and the means as keys of one softmax.

    Args:
        weighted: False leaves out ln n, which is wrong.
        share: False leaves out the gradient through the means, which is wrong.
    """
    case = case.to(torch.float64)
    q, k, v = (x.detach().cpu().requires_grad_() for x in (case.q, case.k, case.v))
    group = q.shape[2] // k.shape[2]
    sizes = case.kv_blocks.sizes.cpu()
    pool = torch.block_diag(*(torch.full((1, n), 1 / n, dtype=torch.float64) for n in sizes.tolist()))
    km, vm = (torch.einsum("ns,bshd->bnhd", pool, x if share else x.detach()) for x in (k, v))
    keys, values = (torch.cat(pair, 1).repeat_interleave(group, 2) for pair in ((k, km), (v, vm)))
    logits = torch.einsum("blhd,bshd->bhls", q, keys) * q.shape[3] ** -0.5
    bias = sizes.double().log() if weighted else torch.zeros(len(sizes))
    listed = case.index.to_dense(len(sizes)).cpu()
    tail = ~listed if exclude else torch.ones_like(listed)
    tail = tail if candidates is None else tail & candidates.cpu()
    rows = tail.repeat_interleave(case.q_blocks.sizes.cpu(), 2).expand(*logits.shape[:3], -1)
    mask = torch.cat((expand_mask(case).cpu(), rows), -1)
    some = mask.any(-1, keepdim=True)
    logits = logits + torch.cat((torch.zeros(k.shape[1]), bias))
    logits = logits.masked_fill(~mask, -torch.inf).masked_fill(~some, 0)
    out = torch.einsum("bhls,bshd->blhd", logits.softmax(-1) * some, values)
    lse = logits.logsumexp(-1).masked_fill(~some[..., 0], -torch.inf)
    grads = torch.autograd.grad(out, (q, k, v), case.dout.cpu())
    return {"lse": lse.detach(), **dict(zip(NAMES, (out.detach(), *grads), strict=True))}


def run(case: Case, backend: str, exclude: bool, candidates: Tensor | None) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    how: dict[str, Any] = {**case.blocks, "candidates": candidates, "exclude": exclude, "backend": backend}
    out, lse = tail_attn(*leaves, case.index, **how)
    assert not lse.requires_grad
    grads = torch.autograd.grad(out, leaves, case.dout)
    return {"lse": lse, **dict(zip(NAMES, (out.detach(), *grads), strict=True))}


def check(case: Case, exclude: bool, some: bool, backend: str = "triton") -> None:
    """A backend against the definition, and controls that must fail: without weights, without the means' gradient."""
    case, candidates = with_candidates(case, some)
    actual, plain = (run(case, name, exclude, candidates) for name in (backend, "reference"))
    exact = define(case, exclude, candidates)

    def right(got: dict[str, Tensor]) -> None:
        for name, x in exact.items():
            # values and logits are of order 1; sums of k and v over rows and heads of order 10
            terms = 100.0 if case.q.dtype == torch.float32 else 0.0
            assert_within_budget(got[name].cpu(), plain[name].cpu(), x, name, terms)

    right(actual)
    for wrong in ({"weighted": False}, {"share": False}):
        with pytest.raises(AssertionError):
            right({name: x.to(plain[name].dtype) for name, x in define(case, exclude, candidates, **wrong).items()})


@pytest.mark.parametrize("some", [False, True], ids=["all", "candidates"])
@pytest.mark.parametrize("exclude", [True, False], ids=["excluded", "double"])
@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("name", SHAPES)
def test_definition(name, backend, exclude, some):
    sizes, options = SHAPES[name]
    case, candidates = with_candidates(make_case(*sizes, **options, dtype=torch.float64), some)
    exact = define(case, exclude, candidates)
    for key, x in run(case, backend, exclude, candidates).items():
        torch.testing.assert_close(x, exact[key], rtol=1e-9, atol=1e-10)
    assert (exact["lse"] == -torch.inf).any() == some


@pytest.mark.parametrize(
    ("name", "exclude", "some"),
    [
        ("even", True, False),
        ("ragged", True, True),
        further("ragged", False, False),
        further("ragged", True, False),
        further("even", False, True),
        ("shared", False, True),
        further("long", True, False),
        further("long", False, True),
    ],
)
def test_triton(name, exclude, some, triton_device):
    sizes, options = SHAPES[name]
    check(make_case(*sizes, **options, device=triton_device), exclude, some)


EVEN, RAGGED = [128] * 5, [128, 96, 128, 65, 100, 128, 127]


@on_hopper
@pytest.mark.parametrize("some", [False, True], ids=["all", "candidates"])
@pytest.mark.parametrize("sizes", [[64] * 9, EVEN, RAGGED], ids=("even 64", "even 128", "ragged 128"))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_hopper(dtype, head_dim, sizes, some):
    sides: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": head_dim, "device": "cuda"}
    check(make_case(sizes, sizes[::-1], **sides, density=0.4, dtype=dtype), exclude=True, some=some)


def test_ranges_of_queries_and_repeats(triton_device, monkeypatch):
    """More ranges of queries than programs need, and every call gives the same bits."""
    from vsa_kernels.tail import triton_tail

    case = make_case([5, 9, 3, 10], [2] * 40, density=0.1, device=triton_device)
    # two programs of means, and two ranges of two query blocks each
    monkeypatch.setattr(triton_tail, "_PROGRAMS", 4)
    check(case, exclude=True, some=False)
    first, second = (run(case, "triton", True, None) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finite_inputs_do_not_pay_for_isolation(dtype):
    overflows = pytest.importorskip("vsa_kernels.tail.triton_tail")._overflows
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 6, 2, 8, generator=generator).to(dtype) for _ in range(4))
    delta = torch.randn(1, 2, 6, generator=generator)
    forward, backward = (q, k, v), (q, k, v, dout, delta)
    assert not overflows(forward, 0.5)
    assert not overflows(backward, 0.5)
    # each of them alone, and sizes of two whose product alone is too large
    for value in (torch.nan, torch.inf, -torch.inf, -1e38):
        for x in backward:
            x[..., 3], kept = value, x[..., 3].clone()
            assert overflows(backward, 0.5)
            assert overflows(forward, 0.5) or x is dout or x is delta
            x[..., 3] = kept
    for a, b in ((q, k), (v, dout)):
        large = tuple(x * 1e19 if x is a or x is b else x for x in backward)
        assert all(x.isfinite().all() for x in large)
        assert overflows(large, 0.5)
    assert overflows(forward, 1e38)


def test_all_listed_is_the_sparse_attention(triton_device):
    case = make_case([16] * 3, [16, 9, 16], heads=2, kv_heads=2, device=triton_device)
    every = BlockIndex.from_dense(torch.ones(1, 1, 3, 3, dtype=torch.bool, device=triton_device))
    case = replace(case, index=every)
    for backend in ("reference", "gather", "triton"):
        expected, lse = block_sparse_attn(case.q, case.k, case.v, every, **case.blocks, backend=backend)
        out, total = tail_attn(case.q, case.k, case.v, every, **case.blocks, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(total, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("listed", [0.0, 0.5])
def test_blocks_of_one_token_are_dense_attention(listed, triton_device):
    case = make_case([3, 5], [1] * 37, density=listed, device=triton_device)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (case.q, case.k, case.v)))
    for backend in ("reference", "triton"):
        out, _ = tail_attn(case.q, case.k, case.v, case.index, **case.blocks, backend=backend)
        torch.testing.assert_close(out, exact.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_operator_passes_opcheck_and_compiles(triton_device):
    case = make_case([16] * 3, [16, 9, 16], heads=2, kv_heads=2, device=triton_device)
    args = (case.q, case.k, case.v, *mask_of(case).flatten(), None, True, 0.25)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(tail_fwd, args, test_utils=checks)
    torch.library.opcheck(tail_bwd, (case.dout, *tail_fwd(*args), *args), test_utils=checks)
    counter = CompileCounterWithBackend("aot_eager")

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * tail_attn(q, k, v, case.index, **case.blocks, backend="triton")[0]

    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    grads = [
        torch.autograd.grad(f(*leaves), leaves, case.dout)
        for f in (step, torch.compile(step, backend=counter, fullgraph=True))
    ]
    assert counter.frame_count == 1
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_flops(triton_device):
    case = make_case([16] * 3, [16] * 4, heads=2, kv_heads=1, device=triton_device)
    lists = torch.arange(2, dtype=torch.int32, device=triton_device).expand(1, 2, 3, 2)
    index = BlockIndex(kv_indices=lists, kv_num_blocks=torch.full_like(lists[..., 0], 2), max_blocks=2, min_blocks=2)
    product = 2 * 2 * 48 * 16 * (2 * 16 + 4)
    with FlopCounterMode(display=False) as counter:
        out, _ = tail_attn(case.q.requires_grad_(), case.k, case.v, index, **case.blocks, backend="triton")
        assert counter.get_total_flops() == 2 * product
        out.backward(case.dout)
    assert counter.get_total_flops() == 7 * product


def test_empty_batch(triton_device):
    case = make_case([16] * 3, [16, 9, 16], heads=2, kv_heads=2, device=triton_device)
    index = replace(
        case.index, kv_indices=case.index.kv_indices[:1, :1], kv_num_blocks=case.index.kv_num_blocks[:1, :1]
    )
    for backend in ("reference", "triton"):
        q, k, v = (x[:0].detach().requires_grad_() for x in (case.q, case.k, case.v))
        out, lse = tail_attn(q, k, v, index, **case.blocks, backend=backend)
        assert (out.shape, lse.shape) == ((0, 48, 2, 16), (0, 2, 48))
        out.sum().backward()
        assert q.grad.shape == q.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": torch.ones(2, 2, dtype=torch.bool)}, r"candidates must be bool \[5, 6\]"),
        ({"kv_blocks": Blocks.from_sizes([4, 4])}, "kv_blocks must cover the 31 tokens of k"),
    ],
)
def test_refused(changes, message):
    case = make_case(*SHAPES["ragged"][0])
    with pytest.raises(ValueError, match=message):
        tail_attn(case.q, case.k, case.v, case.index, **{**case.blocks, **changes})


def test_fine_masks_are_refused():
    case = make_case(*SHAPES["ragged"][0], fine=True)
    with pytest.raises(ValueError, match="index must have no fine masks"):
        tail_attn(case.q, case.k, case.v, case.index, **case.blocks)
