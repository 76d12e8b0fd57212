"""Backward of one part of a larger softmax (total_lse): with the lse and output of the whole, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from vsa_kernels import BlockIndex, block_sparse_attn, block_sparse_attn_backward, merge_attn
from vsa_kernels.block_sparse.op import block_sparse_bwd
from vsa_kernels.testing import Case, assert_within_budget, define, expand_mask, make_case, summed_terms

from tests.kernels.interpreted import further
from tests.kernels.test_hopper_fwd import mask_of, on_hopper
from tests.kernels.test_hopper_fwd128 import EVEN, RAGGED

GRADIENTS = ("dq", "dk", "dv")
SIDES: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2}
SIZES = {"even": ([4] * 5, [3] * 6), "ragged": ([5, 9, 3, 10, 1], [7, 2, 11, 1, 6, 4])}


def split(case: Case, count: int) -> list[Case]:
    """The case in parts that list disjoint blocks: all of query block 0 in the last one, nothing of block 1 in any."""
    index, g = case.index, torch.Generator().manual_seed(count)
    rows = index.kv_num_blocks.shape
    owner = torch.randint(count, (*rows, case.kv_blocks.num), generator=g)
    owner[:, :, 0] = count - 1
    cases = []
    for part in range(count):
        lists, counts = torch.full(index.kv_indices.shape, 1 << 30).int(), torch.zeros(rows).int()
        ids, full = lists.clone(), counts.clone()
        for row in ((b, h, n) for b in range(rows[0]) for h in range(rows[1]) for n in range(rows[2]) if n != 1):
            entries = index.kv_indices[row][: index.kv_num_blocks[row]].tolist()
            kept = [i for i, block in enumerate(entries) if owner[row][block] == part]
            lists[row][: len(kept)], counts[row] = index.kv_indices[row][kept].cpu(), len(kept)
            if index.mask_ids is not None and index.kv_num_full_blocks is not None:
                ids[row][: len(kept)] = index.mask_ids[row][kept].cpu()
                full[row] = sum(i < index.kv_num_full_blocks[row] for i in kept)
        tensors = {"kv_indices": lists, "kv_num_blocks": counts}
        if index.mask_ids is not None:
            tensors |= {"kv_num_full_blocks": full, "mask_ids": ids, "mask_bits": index.mask_bits}
        cases.append(replace(case, index=BlockIndex(**{k: x.to(case.q.device) for k, x in tensors.items()})))
    return cases


def define_parts(cases: list[Case]) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """out and lse of one dense softmax over the keys of all parts, and the gradients of each part's own q, k and v."""
    whole = cases[0].to(torch.float64)
    leaves = [[x.clone().requires_grad_() for x in (whole.q, whole.k, whole.v)] for _ in cases]
    group, scale = whole.q.shape[2] // whole.k.shape[2], whole.q.shape[3] ** -0.5
    mask = torch.cat([expand_mask(case) for case in cases], -1).to(whole.q.device)
    some = mask.any(-1, keepdim=True)
    logits = torch.cat(
        [torch.einsum("blhd,bshd->bhls", q, k.repeat_interleave(group, 2)) * scale for q, k, _ in leaves], -1
    )
    logits = logits.masked_fill(~mask, -torch.inf).masked_fill(~some, 0)
    values = torch.cat([v.repeat_interleave(group, 2) for *_, v in leaves], 1)
    out = torch.einsum("bhls,bshd->blhd", logits.softmax(-1) * some, values)
    lse = logits.logsumexp(-1).masked_fill(~some[..., 0], -torch.inf)
    grads = torch.autograd.grad((out, lse), [x for part in leaves for x in part], (whole.dout, whole.dlse))
    parts = [dict(zip(GRADIENTS, grads[i : i + 3], strict=True)) for i in range(0, len(grads), 3)]
    return out.detach(), lse.detach(), parts


def attend(cases: list[Case], backend: str) -> tuple[list[Tensor], list[Tensor]]:
    how = [dict(index=c.index, **c.blocks, kv_valid=c.kv_valid, backend=backend) for c in cases]
    results = [block_sparse_attn(c.q, c.k, c.v, **h) for c, h in zip(cases, how, strict=True)]
    return [out for out, _ in results], [lse for _, lse in results]


def backward(case: Case, out: Tensor, lse: Tensor, backend: str) -> dict[str, Tensor]:
    grads = block_sparse_attn_backward(
        *(case.dout, out, lse, case.q, case.k, case.v, case.index),
        **dict(**case.blocks, kv_valid=case.kv_valid, backend=backend, dlse=case.dlse),
    )
    return dict(zip(GRADIENTS, grads, strict=True))


def check(case: Case, count: int, backend: str) -> None:
    """Parts on a backend against their definition, and two controls that must fail: the part's own lse and output."""
    cases = split(case, count)
    listed = torch.stack([expand_mask(part).any(-1) for part in cases])
    assert (listed.any(0) & ~listed[0]).any(), "no query has all its keys in other parts"
    assert (~listed.any(0)).any(), "no query is without keys"
    exact_out, exact_lse, exact = define_parts(cases)
    outs, lses = attend(cases, backend)
    out, lse = merge_attn(outs, lses)
    plain_out, plain_lse = merge_attn(*attend(cases, "reference"))
    terms = summed_terms(case)
    assert_within_budget(out, plain_out, exact_out, "out", terms["out"])
    assert_within_budget(lse, plain_lse, exact_lse, "lse", terms["lse"])
    for i, part in enumerate(cases):
        actual, plain = backward(part, out, lse, backend), backward(part, plain_out, plain_lse, "reference")

        def right(got: dict[str, Tensor], i: int = i, plain: dict[str, Tensor] = plain) -> None:
            for name in GRADIENTS:
                assert got[name].dtype == case.q.dtype
                assert_within_budget(got[name], plain[name], exact[i][name], f"part {i} {name}", terms[name])

        right(actual)
        # [B, L, H]
        absent = ~listed[i].transpose(1, 2).to(actual["dq"].device)
        assert (actual["dq"][absent] == 0).all()
        for other_out, other_lse in ((out, lses[i]), (outs[i], lse)):
            with pytest.raises(AssertionError, match=f"part {i} d"):
                right(backward(part, other_out, other_lse, backend))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("fine", [False, True], ids=["plain", "fine"])
@pytest.mark.parametrize("sizes", SIZES)
def test_total_lse_of_parts(sizes, fine, backend, count, device):
    case = make_case(*SIZES[sizes], **SIDES, fine=fine, kv_valid=fine, density=0.8, dtype=torch.float64, device=device)
    check(case, count, backend)


@pytest.mark.parametrize(
    ("sizes", "fine", "count"),
    [
        further(([16] * 3, [16] * 4), False, 3),
        (([16, 5, 20], [9, 16, 33, 2]), True, 2),
        further(([16] * 3, [16] * 4), True, 3),
        further(([16, 5, 20], [9, 16, 33, 2]), False, 2),
    ],
    ids=["even", "ragged-fine", "even-fine", "ragged"],
)
def test_total_lse_of_parts_triton(sizes, fine, count, triton_device):
    case = make_case(*sizes, heads=2, fine=fine, kv_valid=fine, density=0.9, device=triton_device)
    check(case, count, "triton")


@on_hopper
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("sizes", [[64] * 9, EVEN, RAGGED], ids=("even 64", "even 128", "ragged 128"))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_total_lse_of_parts_hopper(dtype, head_dim, sizes, count):
    check(
        make_case(sizes, sizes[::-1], **SIDES, head_dim=head_dim, density=0.8, dtype=dtype, device="cuda"),
        count,
        "triton",
    )


@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_total_lse_sums_to_autograd_of_the_merged_parts(backend, device):
    case = make_case(*SIZES["ragged"], **SIDES, dtype=torch.float64, device=device)
    cases = split(case, 3)
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    out, lse = merge_attn(*attend([replace(part, q=q, k=k, v=v) for part in cases], backend))
    expected = torch.autograd.grad((out, lse), (q, k, v), (case.dout, case.dlse))
    parts = [backward(part, out.detach(), lse.detach(), backend) for part in cases]
    for name, grad in zip(GRADIENTS, expected, strict=True):
        assert grad.isfinite().all()
        torch.testing.assert_close(sum(part[name] for part in parts), grad, rtol=1e-9, atol=1e-10)


def test_total_lse_of_one_part_is_the_plain_backward(device):
    """Any layout of the arguments gives the same bits."""
    case = make_case(*SIZES["ragged"], **SIDES, dtype=torch.float32, device=device)
    exact = define(replace(case, dlse=torch.zeros_like(case.dlse)))
    out, lse = (x[0] for x in attend([case], "gather"))
    how: dict[str, Any] = {"index": case.index, **case.blocks, "backend": "gather"}
    grads = block_sparse_attn_backward(case.dout, out, lse, case.q, case.k, case.v, **how)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.dout, out, lse)]
    again = block_sparse_attn_backward(*turned, case.q, case.k, case.v, **how)
    for name, grad, other in zip(GRADIENTS, grads, again, strict=True):
        torch.testing.assert_close(grad.double(), exact[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(grad, other)


@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_total_lse_passes_opcheck_and_compiles(backend, device):
    case = make_case(*SIZES["ragged"], **SIDES, dtype=torch.float32, device=device)
    cases = split(case, 2)
    out, lse = merge_attn(*attend(cases, backend))
    args = (case.dout, case.dlse, out, lse, case.q, case.k, case.v, *mask_of(cases[0]).flatten(), 0.25, backend)
    torch.library.opcheck(block_sparse_bwd, args)

    def step(q: Tensor) -> dict[str, Tensor]:
        own = [replace(part, q=q) for part in cases]
        return backward(own[0], *merge_attn(*attend(own, backend)), backend)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    actual, expected = torch.compile(step, backend=counter, fullgraph=True)(case.q), step(case.q)
    assert counter.frame_count == 1
    for name in GRADIENTS:
        torch.testing.assert_close(actual[name], expected[name])


def test_total_lse_refuses_what_does_not_fit(device):
    case = make_case([4, 4], [4, 4], heads=2, dtype=torch.float16, device=device)
    (out,), (lse,) = attend([case], "gather")

    def call(**changed: Tensor) -> Any:
        saved = {"dout": case.dout, "out": out, "lse": lse, "dlse": None} | changed
        return block_sparse_attn_backward(
            **saved, q=case.q, k=case.k, v=case.v, index=case.index, **case.blocks, backend="gather"
        )

    call(out=out.float())
    for name, wrong, said in (
        ("dout", case.dout.float(), r"torch.float16 \[1, 8, 2, 16\] for q, got torch.float32 \[1, 8, 2, 16\]"),
        (
            "out",
            out[:, :-1],
            r"torch.float16 or torch.float32 \[1, 8, 2, 16\] for q, got torch.float16 \[1, 7, 2, 16\]",
        ),
        ("lse", lse.transpose(1, 2), r"torch.float32 \[1, 2, 8\] for q, got torch.float32 \[1, 8, 2\]"),
        ("dlse", lse.double(), r"torch.float32 \[1, 2, 8\] for q, got torch.float64 \[1, 2, 8\]"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be {said}$"):
            call(**{name: wrong})


def fails(outs: list[Tensor], lses: list[Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        merge_attn(outs, lses)


def test_merged_parts_must_fit():
    out, lse = torch.zeros(1, 8, 2, 4), torch.zeros(1, 2, 8)
    fails([], [], "of at least 1, got 0 and 0$")
    fails([out], [lse, lse], "must have the same length of at least 1, got 1 and 2$")
    fails([out], [lse.mT], r"\[1, 8, 2, 4\] with its lse \[B, H, L\], got \[1, 8, 2, 4\] with \[1, 8, 2\]$")
    fails([out, out[:, :7]], [lse, lse], r"got \[1, 7, 2, 4\] with \[1, 2, 8\]$")
