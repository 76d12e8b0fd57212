"""Index tensors that are views of others (transposed, strided, sliced, expanded) mean the same as their copies.

Views go to the registered ops as they are: the dataclasses of the public calls would have packed them before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_bwd, block_sparse_fwd
from vsa_kernels.coarse_fine.op import coarse_fine_bwd, coarse_fine_fwd
from vsa_kernels.pooling.op import block_mean_pool_bwd, block_mean_pool_fwd
from vsa_kernels.selection.op import select_topk_op
from vsa_kernels.testing import Case, make_case, run

from tests.kernels.interpreted import further

KINDS = ("strided", "sliced", "transposed", "reversed")


def view(x: Any, kind: str) -> Any:
    """The values of x in a memory layout that a caller may hand in; what lies between them is 0, a value in range."""
    if not isinstance(x, Tensor):
        return x
    if kind == "transposed" and x.ndim > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "reversed" and x.ndim > 1:
        backwards = tuple(reversed(range(x.ndim)))
        return x.permute(backwards).contiguous().permute(backwards)
    step = 1 if kind == "sliced" else 2
    wide = x.new_zeros(*x.shape[:-1], step * x.shape[-1] + 3)
    where = wide[..., 2 : 2 + step * x.shape[-1] : step]
    return where.copy_(x)


def problem(device: torch.device, fine: bool = False) -> Case:
    """Ragged blocks, so that every index tensor is read, and list tails that are in range."""
    case = make_case(
        *([5, 3], [7, 2, 4]),
        batch=2,
        density=0.6,
        fine=fine,
        kv_valid=True,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        device=device,
        seed=1,
    )
    index = case.index
    lists = {"kv_indices": index.kv_indices.clamp(max=2)}
    if index.mask_ids is not None:
        lists["mask_ids"] = index.mask_ids.clamp(max=4)
    return replace(case, index=replace(index, **lists))


def call(case: Case, flat: list[Any], backend: str) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of the registered ops."""
    args = (case.q, case.k, case.v, *flat, 0.3, backend)
    out, lse = block_sparse_fwd(*args)
    return out, lse, *block_sparse_bwd(case.dout, case.dlse, out, lse, *args)


@pytest.mark.parametrize(("backend", "fine"), [("triton", False), further("triton", True), ("gather", True)])
def test_block_sparse(backend, fine, triton_device):
    case = problem(triton_device, fine=fine)
    mask = BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=case.kv_valid)
    flat = list(mask.flatten())
    # lists, counts, both offsets, validity; fine masks are three more
    assert sum(isinstance(x, Tensor) for x in flat) == (8 if fine else 5)
    expected = call(case, flat, backend)
    for kind in KINDS:
        actual = call(case, [view(x, kind) for x in flat], backend)
        for label, a, b in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
            assert torch.equal(a, b), f"{label}, {kind}"


@pytest.mark.parametrize("backend", ["triton", "gather"])
def test_expanded(backend, triton_device):
    """One list for all samples, heads or rows, one count for all rows, one validity for all samples."""
    case = problem(triton_device)
    lists = torch.tensor([0, 1, 2], dtype=torch.int32, device=triton_device)
    count = torch.tensor(2, dtype=torch.int32, device=triton_device)
    valid = torch.tensor([3, 2, 4], dtype=torch.int32, device=triton_device)
    index = BlockIndex(kv_indices=lists.expand(2, 1, 2, 3), kv_num_blocks=count.expand(2, 1, 2))
    full = BlockIndex(kv_indices=lists.repeat(2, 1, 2, 1), kv_num_blocks=count.repeat(2, 1, 2))
    actual = run(replace(case, index=index, kv_valid=valid.expand(2, 3)), backend)
    expected = run(replace(case, index=full, kv_valid=valid.repeat(2, 1)), backend)
    for name in actual:
        assert torch.equal(actual[name], expected[name]), name


def test_pooling(triton_device):
    blocks = Blocks.from_sizes([3, 7, 2], triton_device)
    x, grad = (torch.randn(2, n, 3, 16, device=triton_device) for n in (12, 3))
    sizes = (blocks.max_size, blocks.min_size)
    for backend in ("triton", "reference"):
        results = []
        for offsets in (blocks.offsets, view(blocks.offsets, "strided")):
            means = block_mean_pool_fwd(x, offsets, *sizes, backend)
            results.append((means, block_mean_pool_bwd(grad, offsets, *sizes, 12, torch.float32, backend)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), backend


def test_selection(triton_device):
    scores = torch.randn(1, 2, 3, 40, device=triton_device)
    candidates, always = (torch.rand(3, 40, device=triton_device) < p for p in (0.7, 0.1))
    rows = torch.tensor([4, 2, 9], dtype=torch.int32, device=triton_device)
    args = (scores, None, rows, candidates, always, 40)
    for backend in ("triton", "reference"):
        indices, counts = select_topk_op(*args, backend)
        # entries past a count may be anything
        entries = torch.arange(40, device=triton_device) < counts[..., None]
        for kind in KINDS:
            actual, actual_counts = select_topk_op(*(view(x, kind) for x in args), backend)
            assert torch.equal(actual_counts, counts), f"{kind}, {backend}"
            assert torch.equal(actual[entries], indices[entries]), f"{kind}, {backend}"


def test_coarse_fine(triton_device):
    """Both offsets of the whole operator, and in its backward the saved lists and counts."""
    case = problem(triton_device)
    fixed = (case.q, case.k, case.v, case.dout, case.dout)

    def grads(kind: str | None) -> tuple[Tensor, ...]:
        at = [x if kind is None else view(x, kind) for x in (case.q_blocks.offsets, case.kv_blocks.offsets)]
        blocks = (at[0], 5, 3, at[1], 7, 2)
        arguments = (*fixed, *blocks, 2, 3, 0.3)
        out, *saved_tensors = coarse_fine_fwd(*arguments)
        if kind is not None:
            saved_tensors[4:6] = (view(x, kind) for x in saved_tensors[4:6])
        return out, *saved_tensors, *coarse_fine_bwd(case.dout, *saved_tensors, *arguments)

    expected = grads(None)
    for kind in ("strided", "reversed"):
        for i, (a, b) in enumerate(zip(grads(kind), expected, strict=True)):
            assert torch.equal(a, b), f"{kind}, result {i}"


def test_compiled(triton_device):
    """Views that reach a compiled call, whole graph, forward and backward."""
    torch._dynamo.reset()
    case = problem(triton_device)
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, lists, counts, q_at, kv_at):
        index = BlockIndex(kv_indices=lists, kv_num_blocks=counts)
        blocks = {
            "q_blocks": Blocks(offsets=q_at, max_size=5, min_size=3),
            "kv_blocks": Blocks(offsets=kv_at, max_size=7, min_size=2),
        }
        return block_sparse_attn(q, k, v, index, **blocks, backend="triton")[0]

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    plain = (case.index.kv_indices, case.index.kv_num_blocks, case.q_blocks.offsets, case.kv_blocks.offsets)
    strided = [view(x, "strided") for x in plain]
    results = []
    for function, index in ((attend, plain), (compiled, strided)):
        inputs = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        out = function(*inputs, *index)
        results.append((out, *torch.autograd.grad(out, inputs, case.dout)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert counter.frame_count == 1
