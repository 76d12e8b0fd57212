"""The ops as PyTorch sees them: schemas, fakes, autograd registration, compilation, FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode
from vsa_kernels import Blocks, block_mean_pool, block_sparse_attn, select_topk
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_bwd, block_sparse_fwd
from vsa_kernels.pooling.op import block_mean_pool_bwd, block_mean_pool_fwd
from vsa_kernels.selection.op import select_topk_op
from vsa_kernels.testing import make_case


def permuted(x):
    """The same values, laid out heads first."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("fine", [False, True], ids=["plain", "fine"])
def test_opcheck_block_sparse(backend, fine, device):
    case = make_case([3, 5, 2], [4, 1, 3], batch=2, heads=4, kv_heads=2, fine=fine, kv_valid=fine, device=device)
    mask = BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=case.kv_valid)
    q, k, v, dout = (permuted(x) if fine else x for x in (case.q, case.k, case.v, case.dout))
    args = (*(x.clone().requires_grad_() for x in (q, k, v)), *mask.flatten(), 0.3, backend)
    torch.library.opcheck(block_sparse_fwd, args)
    out, lse = block_sparse_fwd(q, k, v, *args[3:])
    torch.library.opcheck(block_sparse_bwd, (dout, case.dlse, out, lse, q, k, v, *args[3:]))


@pytest.mark.parametrize("sizes", [[3, 3, 3], [2, 4, 3]], ids=str)
def test_opcheck_pooling(sizes, device):
    blocks = Blocks.from_sizes(sizes, device)
    x = permuted(torch.randn(2, 9, 3, 4, device=device)).requires_grad_()
    torch.library.opcheck(block_mean_pool_fwd, (x, blocks.offsets, blocks.max_size, blocks.min_size))
    grad = permuted(torch.randn(2, 3, 3, 4, device=device))
    args = (grad, blocks.offsets, blocks.max_size, blocks.min_size, 9, torch.float32)
    torch.library.opcheck(block_mean_pool_bwd, args)


def test_opcheck_selection(device):
    scores = torch.randn(2, 3, 4, 5, device=device)
    candidates = torch.rand(4, 5, device=device) < 0.5
    rows = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=device)
    torch.library.opcheck(select_topk_op, (scores, 2, None, None, None, 5))
    torch.library.opcheck(select_topk_op, (scores, 2, None, candidates, None, 5))
    torch.library.opcheck(select_topk_op, (scores, None, rows, candidates, ~candidates, 5))


def fine_stage(q, k, v, blocks, topk):
    pooled_q, pooled_k = block_mean_pool(q, blocks), block_mean_pool(k, blocks)
    index = select_topk(torch.einsum("bnhd,bmhd->bhnm", pooled_q, pooled_k), topk)
    out, lse = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks)
    return (out * lse.transpose(1, 2)[..., None].tanh()).sum()


@pytest.mark.parametrize("sizes", [[2] * 70, [1, 3] * 35], ids=["uniform", "ragged"])
def test_compiles_whole_and_topk_recompiles_once(sizes):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fine_stage, backend=counter, fullgraph=True)
    blocks = Blocks.from_sizes(sizes)
    q, k, v = (torch.randn(1, 140, 2, 4, requires_grad=True) for _ in range(3))
    graphs = []
    # capacities 32, 64 and 70, and every block
    for topk in (8, 7, 2, 9, 31, 32, 33, 40, 63, 64, 65, 69, 70, 71, 100, 3):
        actual, expected = compiled(q, k, v, blocks, topk), fine_stage(q, k, v, blocks, topk)
        torch.testing.assert_close(actual, expected)
        pair = zip(torch.autograd.grad(actual, (q, k, v)), torch.autograd.grad(expected, (q, k, v)), strict=True)
        for a, b in pair:
            torch.testing.assert_close(a, b)
        graphs.append(counter.frame_count)
    assert graphs[0] == 1
    assert graphs[-1] == 2, f"compiled graphs after each topk: {graphs}"


def test_layouts_of_any_size_share_a_graph():
    """The checks of a call compare sizes, and must not tie the graph to those of one layout."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fine_stage, backend=counter, fullgraph=True, dynamic=True)
    for sizes in ([2] * 70, [3] * 40, [5, 3] * 30, [7, 6, 2] * 20, [8] * 34):
        q, k, v = (torch.randn(1, sum(sizes), 2, 4) for _ in range(3))
        blocks = Blocks.from_sizes(sizes)
        torch.testing.assert_close(compiled(q, k, v, blocks, 3), fine_stage(q, k, v, blocks, 3))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor():
    torch._dynamo.reset()
    blocks = Blocks.from_sizes([3, 5, 4])
    q, k, v = (torch.randn(2, 12, 2, 4, requires_grad=True) for _ in range(3))
    actual = torch.compile(fine_stage, fullgraph=True)(q, k, v, blocks, 2)
    expected = fine_stage(q, k, v, blocks, 2)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v)), torch.autograd.grad(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


def test_flops_are_the_executed_ones(device):
    blocks = Blocks.from_sizes([4] * 10, device)
    q, k, v = (torch.randn(2, 40, 3, 8, device=device, requires_grad=True) for _ in range(3))
    index = select_topk(torch.randn(2, 3, 10, 10, device=device), 2)
    with FlopCounterMode(display=False) as counter:
        out, _ = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs = 2 * 3 * 40 * (2 * 4)
    assert forward == 4 * pairs * 8
    assert counter.get_total_flops() - forward == 10 * pairs * 8


def test_meta_tensors_need_no_kernel():
    blocks = Blocks(offsets=torch.zeros(4, dtype=torch.int32, device="meta"), max_size=5, min_size=3)
    q = torch.empty(2, 12, 4, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    k = torch.empty(2, 12, 2, 8, device="meta", dtype=torch.bfloat16)
    index = select_topk(torch.empty(2, 4, 3, 3, device="meta"), 2)
    out, lse = block_sparse_attn(q, k, k, index, q_blocks=blocks, kv_blocks=blocks)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 12), torch.float32)
