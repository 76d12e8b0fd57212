"""CUDA graphs of the ops, captured once after eager calls: replays with other values give the bits of eager calls.

A graph keeps pointers, descriptors and launch arguments: whatever a call computes on the host from a value, or takes
from memory that is not kept for it, is wrong in a replay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn, coarse_fine_attn, select_topk
from vsa_kernels.testing import make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs a CUDA device and kernels that are not interpreted",
    ),
]
# equal blocks take descriptors (on Hopper the kernel of `hopper_fwd`), ragged ones padded copies of the tokens; tiles
# of 128 have kernels of their own for both, with a workspace
SIZES = {
    "even": [64] * 6,
    "ragged": [64, 40, 64, 21, 64, 64],
    "tile128": [128] * 6,
    "ragged tile128": [128, 65, 100, 128, 127, 128],
}
HEADS = 2
Step = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def values(sizes: list[int], head_dim: int, seed: int) -> list[Tensor]:
    """q, k, v, both gates and the gradient of the output; means that differ, so that other blocks are chosen."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    shape = (1, sum(sizes), HEADS, head_dim)
    lengths = torch.tensor(sizes, device="cuda")

    def tokens() -> Tensor:
        means = torch.randn(len(sizes), HEADS, head_dim, generator=g, device="cuda")
        x = torch.randn(shape, generator=g, device="cuda") + means.repeat_interleave(lengths, 0)
        return x.to(torch.bfloat16)

    return [tokens() for _ in range(6)]


def operator(blocks: Blocks) -> Step:
    """The whole operator, forward and backward: out, the lists and five gradients."""

    def step(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        *leaves, dout = inputs
        result = coarse_fine_attn(*leaves, q_blocks=blocks, kv_blocks=blocks, topk=2, backend="triton")
        grads = torch.autograd.grad(result.out, leaves, dout)
        return result.out, result.index.kv_indices[..., :2], *grads

    return step


def fine(blocks: Blocks, index: BlockIndex) -> Step:
    """The fine stage alone, forward and backward through both outputs."""

    def step(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves, dout = list(inputs[:3]), inputs[-1]
        out, lse = block_sparse_attn(*leaves, index, q_blocks=blocks, kv_blocks=blocks, backend="triton")
        return out, lse, *torch.autograd.grad((out, lse), leaves, (dout, lse.detach()))

    return step


def leaves_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    *inputs, dout = tensors
    return [*(x.clone().requires_grad_() for x in inputs), dout.clone()]


@pytest.mark.parametrize("name", ["operator", "fine", "masked"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", SIZES)
def test_replays_equal_eager_calls(layout, head_dim, name):
    sizes = SIZES[layout]
    blocks = Blocks.from_sizes(sizes, "cuda")
    index = select_topk(torch.randn(1, HEADS, len(sizes), len(sizes), device="cuda"), 2)
    if name == "masked":
        index = make_case(sizes, sizes, heads=HEADS, kv_heads=HEADS, density=0.8, fine=True, device="cuda").index
    step = operator(blocks) if name == "operator" else fine(blocks, index)
    static = leaves_of(values(sizes, head_dim, 0))
    # the first calls of a kernel load its code, which a capture forbids
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(static)
    before: list[Tensor] = []
    for seed in (1, 2, 3):
        new = values(sizes, head_dim, seed)
        with torch.no_grad():
            for x, value in zip(static, new, strict=True):
                x.copy_(value)
        graph.replay()
        expected = step(leaves_of(new))
        torch.cuda.synchronize()
        for i, (output, eager) in enumerate(zip(outputs, expected, strict=True)):
            assert torch.equal(output, eager), f"replay {seed}, result {i}"
        # control: a replay that kept the old values would be noticed
        assert not any(torch.equal(a, b) for a, b in zip(before, expected, strict=False))
        before = [x.clone() for x in expected]


@pytest.mark.parametrize("layout", SIZES)
def test_reduce_overhead_equals_eager_calls(layout):
    """`torch.compile` captures the graphs itself: forward and backward, one node each, no reason to leave them out."""
    torch._dynamo.reset()
    counters.clear()
    sizes = SIZES[layout]
    blocks = Blocks.from_sizes(sizes, "cuda")

    def attend(*leaves: Tensor) -> Tensor:
        return coarse_fine_attn(*leaves, q_blocks=blocks, kv_blocks=blocks, topk=2, backend="triton").out

    compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    # calls of the same shapes warm up, then record, then replay
    for seed in range(5):
        *leaves, dout = leaves_of(values(sizes, 128, seed))
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*leaves)
        actual = (out.clone(), *(x.clone() for x in torch.autograd.grad(out, leaves, dout)))
        out = attend(*leaves)
        expected = (out, *torch.autograd.grad(out, leaves, dout))
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(a, b), f"call {seed}, result {i}"
    assert counters["inductor"]["cudagraph_skips"] == 0
