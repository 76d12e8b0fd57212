"""Forward and backward of every Triton op on 40 ragged problems: work for compute-sanitizer, see gpu_tests.sh.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py

Every tensor has exactly the size that the op asks for, so an access past its end leaves the allocation. Values are not
checked beyond being finite; that is what tests/kernels is for.
"""

from __future__ import annotations

import argparse
import os
import random

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks, block_mean_pool, block_sparse_attn, select_topk
from vsa_kernels.coarse_fine import coarse_fine_attn

from vsa.errors import one_line_errors


def device() -> torch.device:
    """The GPU, or the CPU when kernels are interpreted."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    raise ValueError("needs a CUDA device (or TRITON_INTERPRET=1, to try the script itself)")


def problem(seed: int, at: torch.device) -> str:
    """Runs one problem through every op; returns what it was."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    half = (torch.bfloat16, torch.float16) if at.type == "cuda" else ()
    dtype = rng.choice((*half, torch.float32))
    head_dim, group, kv_heads, batch = rng.choice([16, 32, 48, 64, 128]), rng.choice([1, 2, 3]), rng.choice([1, 2]), 2
    largest = rng.choice([(64, 64), (64, 16), (128, 64), (100, 40)] if at.type == "cuda" else [(16, 16), (20, 9)])
    q_blocks, kv_blocks = (_blocks(rng, size, at) for size in largest)
    heads = group * kv_heads

    def tokens(blocks: Blocks, num_heads: int) -> Tensor:
        # the number of tokens is the sum of the sizes, no more
        shape = (batch, int(blocks.offsets[-1]), num_heads, head_dim)
        return torch.randn(shape, device=at, dtype=dtype, requires_grad=True)

    q, gate_coarse, gate_fine = (tokens(q_blocks, heads) for _ in range(3))
    k, v = tokens(kv_blocks, kv_heads), tokens(kv_blocks, kv_heads)
    sides = {"q_blocks": q_blocks, "kv_blocks": kv_blocks, "backend": "triton"}
    topk = rng.randint(1, kv_blocks.num)
    gate = rng.choice([None, gate_fine])
    _backward(coarse_fine_attn(q, k, v, gate_coarse, gate, topk=topk, **sides).out, q, k, v, gate_coarse, gate)

    pooled = block_mean_pool(k, kv_blocks, backend="triton")
    _backward(pooled, k)
    scores = torch.randn(batch, heads, q_blocks.num, kv_blocks.num, device=at)
    marks = torch.rand(2, q_blocks.num, kv_blocks.num, device=at) < 0.4
    rows = torch.randint(1, kv_blocks.num + 1, (q_blocks.num,), device=at, dtype=torch.int32)
    listed = BlockIndex.from_dense(marks[:1, None])
    indices = [
        select_topk(scores, topk, backend="triton"),
        select_topk(scores, topk, candidates=marks[0], backend="triton"),
        select_topk(scores, rows, candidates=marks[0], always=marks[1], backend="triton"),
        # lists without spare entries, broadcast over batch and heads, some empty
        listed,
        # every other entry of wider tensors
        BlockIndex(
            kv_indices=listed.kv_indices.repeat_interleave(2, -1)[..., ::2],
            kv_num_blocks=listed.kv_num_blocks.repeat_interleave(2, -1)[..., ::2],
        ),
    ]
    for index in indices:
        valid = None
        if rng.random() < 0.5:
            sizes = kv_blocks.sizes.expand(batch, -1)
            valid = (torch.rand(sizes.shape, device=at) * (sizes + 1)).int()
        out, lse = block_sparse_attn(q, k, v, index, kv_valid=valid, **sides)
        _backward(out, q, k, v)
        assert not lse.isnan().any(), "lse is NaN"
    shape = f"B {batch} H {heads}/{kv_heads} D {head_dim} L {q.shape[1]} S {k.shape[1]} blocks {largest} topk {topk}"
    return f"{dtype} {shape}".removeprefix("torch.")


def _blocks(rng: random.Random, largest: int, at: torch.device) -> Blocks:
    num = rng.randint(1, 6)
    return Blocks.from_sizes([rng.choice([1, largest, rng.randint(1, largest)]) for _ in range(num)], at)


def _backward(out: Tensor, *inputs: Tensor | None) -> None:
    wanted = [x for x in inputs if x is not None]
    grads = torch.autograd.grad(out, wanted, torch.randn_like(out))
    for x in (out, *grads):
        assert x.isfinite().all(), "a result is not finite"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=40, help="number of problems (default %(default)s)")
    args = parser.parse_args()
    with one_line_errors():
        at = device()
        for seed in range(args.problems):
            print(f"{seed}: {problem(seed, at)}", flush=True)
        if at.type == "cuda":
            torch.cuda.synchronize()
        print(f"{args.problems} problems done")


if __name__ == "__main__":
    main()
