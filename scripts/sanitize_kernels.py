"""Forward and backward of every Triton op on 40 ragged problems, to run under compute-sanitizer, see gpu_soak.sh.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py

Every tensor has exactly the size that the op requires, so that an access past its end leaves the allocation. Values are
only checked to be finite; tests/kernels checks their accuracy.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

import torch
from torch import Tensor
from vsa_kernels import (
    BlockIndex,
    TileGroups,
    block_mean_and_similarity,
    block_mean_pool,
    block_sparse_attn,
    gated_residual,
    gathered_attn,
    group_tiles,
    linear_gelu,
    longest_first,
    mean_scores,
    norm_rope,
    residual_norm,
    select_share,
    select_topk,
    skipping_attn,
)
from vsa_kernels.coarse_fine import coarse_fine_attn
from vsa_kernels.testing import make_case

from vsa.errors import one_line_errors


def device() -> torch.device:
    """The GPU, or the CPU if kernels are interpreted."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    raise ValueError("expected a CUDA device (or TRITON_INTERPRET=1, to try the script itself)")


def problem(seed: int, at: torch.device) -> str:
    """Run all ops on one problem; returns its description."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    half = (torch.bfloat16, torch.float16) if at.type == "cuda" else ()
    dtype = rng.choice((*half, torch.float32))
    head_dim, group, kv_heads, batch = rng.choice([16, 32, 48, 64, 128]), rng.choice([1, 2, 3]), rng.choice([1, 2]), 2
    largest = rng.choice(
        [(64, 64), (64, 16), (128, 64), (128, 128), (100, 40)] if at.type == "cuda" else [(16, 16), (20, 9)]
    )
    sizes = [[rng.choice([1, n, rng.randint(1, n)]) for _ in range(rng.randint(1, 6))] for n in largest]
    heads = group * kv_heads
    case = make_case(
        *sizes, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, density=0.4, index_batch=1,
        index_heads=1, fine=True, kv_valid=True, dtype=dtype, device=at, seed=seed,
    )  # fmt: skip
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    gate_coarse, gate_fine = (torch.randn_like(q, requires_grad=True) for _ in range(2))
    q_blocks, kv_blocks, masked = case.q_blocks, case.kv_blocks, case.index
    plain_index = BlockIndex(kv_indices=masked.kv_indices, kv_num_blocks=masked.kv_num_blocks)
    sides: dict[str, Any] = {**case.blocks, "backend": "triton"}
    topk = rng.randint(1, kv_blocks.num)
    gate = rng.choice([None, gate_fine])
    _backward(coarse_fine_attn(q, k, v, gate_coarse, gate, topk=topk, **sides).out, q, k, v, gate_coarse, gate)

    pooled = block_mean_pool(k, kv_blocks, backend="triton")
    _backward(pooled, k)
    weight = torch.ones(q.shape[2] * q.shape[3], device=at, dtype=dtype, requires_grad=True)
    angle = torch.rand(q.shape[1], head_dim // 2, device=at)
    flat = q.detach().flatten(2).requires_grad_()
    rotated = norm_rope(flat, weight, angle.cos(), angle.sin(), num_heads=heads, eps=1e-6, backend="triton")
    _backward(rotated, flat, weight)
    matrix, offset = torch.randn(len(weight), len(weight), device=at, dtype=dtype), torch.randn_like(weight)
    projected = norm_rope(flat, weight, num_heads=heads, eps=1e-6, projection=(matrix, offset), backend="triton")
    _backward(projected, flat, weight)
    widening = torch.randn(rng.randint(1, 600), flat.shape[2], device=at, dtype=dtype, requires_grad=True)
    bias = torch.randn(len(widening), device=at, requires_grad=True)
    _backward(linear_gelu(flat, widening, bias, backend="triton"), flat, widening, bias)
    update = torch.randn_like(flat, requires_grad=True)
    rows = torch.randn(2, batch, 1, flat.shape[2], device=at, requires_grad=True)
    normed = residual_norm(flat, update, rows[0], 1 + rows[1], rows[0], eps=1e-6, backend="triton")
    _backward(torch.cat(normed), flat, update, rows)
    _backward(residual_norm(flat, None, None, weight, weight, eps=1e-6, backend="triton")[1], flat, weight)
    last = {"projection": (matrix, offset.requires_grad_()), "backend": "triton"}
    normed = residual_norm(flat, update, None, 1 + rows[1], rows[0], eps=1e-6, **last)
    _backward(torch.cat(normed), flat, update, rows, offset)
    _backward(gated_residual(flat, update, rows[0], **last), flat, update, rows, offset)
    means, similarity = block_mean_and_similarity(k, kv_blocks, center=k.float().mean(1), backend="triton")
    assert means.isfinite().all()
    assert similarity.isfinite().all()
    q_means = block_mean_pool(q, q_blocks, backend="triton")
    assert mean_scores(q_means, means, half=dtype != torch.float32, backend="triton").isfinite().all()
    scores = torch.randn(batch, heads, q_blocks.num, kv_blocks.num, device=at)
    marks = torch.rand(2, q_blocks.num, kv_blocks.num, device=at) < 0.4
    rows = torch.randint(1, kv_blocks.num + 1, (q_blocks.num,), device=at, dtype=torch.int32)
    indices = [
        select_topk(scores, topk, backend="triton"),
        select_topk(scores, topk, candidates=marks[0], backend="triton"),
        select_topk(scores, rows, candidates=marks[0], always=marks[1], backend="triton"),
        select_share(scores, 0.7, crossing="keep", backend="triton"),
        select_share(scores, rng.random(), crossing="drop", candidates=marks[0], always=marks[1], backend="triton"),
        # broadcast over batch and heads, some empty, with spare entries out of range
        plain_index,
        masked,
        # every other entry of wider tensors
        BlockIndex(
            kv_indices=plain_index.kv_indices.repeat_interleave(2, -1)[..., ::2],
            kv_num_blocks=plain_index.kv_num_blocks.repeat_interleave(2, -1)[..., ::2],
        ),
    ]
    for index in indices:
        valid = rng.choice([None, case.kv_valid])
        out, lse = block_sparse_attn(q, k, v, index, kv_valid=valid, **sides)
        _backward(out, q, k, v)
        assert not lse.isnan().any(), "lse is NaN"
    _without_gradient(q.detach(), k.detach(), v.detach(), scores, sides, largest[0])
    shape = f"B {batch} H {heads}/{kv_heads} D {head_dim} L {q.shape[1]} S {k.shape[1]} blocks {largest} topk {topk}"
    return f"{dtype} {shape}".removeprefix("torch.")


def _without_gradient(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, sides: dict[str, Any], largest: int) -> None:
    """Run the forward-only ops, skipping and gathered attention, over lists of several lengths."""
    batch, heads, num_q, num_kv = scores.shape
    shares = torch.rand(batch, 1, num_q, device=q.device)
    index = select_share(scores, shares, crossing="exceed", backend="triton")
    bars = torch.full((heads,), -1.0, device=q.device)
    rows = 1 << (max(1, largest // 4).bit_length() - 1)
    for keeps_sum in (True, False):
        out, _ = skipping_attn(q, k, v, index, thresholds=bars, slice_rows=rows, keeps_sum=keeps_sum, **sides)
        assert out.isfinite().all()
    for size in (1, 3):
        out, lse = gathered_attn(q, k, v, _groups(index.to_dense(num_kv), size), **sides)
        assert out.isfinite().all()
        assert lse.isfinite().all()


def _groups(mask: Tensor, size: int) -> TileGroups:
    """Groups of tiles with the union of the lists of their members."""
    members = group_tiles(mask, size, backend="triton")
    flat = members.clamp(min=0).long().flatten(2)[..., None].expand(-1, -1, -1, mask.shape[3])
    rows = (mask.gather(2, flat) & (members.flatten(2) >= 0)[..., None]).unflatten(2, members.shape[2:]).any(3)
    index = BlockIndex.from_dense(rows)
    order = longest_first(index.kv_num_blocks)
    return TileGroups(members=members, kv_indices=index.kv_indices, kv_num_blocks=index.kv_num_blocks, order=order)


def _backward(out: Tensor, *inputs: Tensor | None) -> None:
    tensors = [x for x in inputs if x is not None]
    grads = torch.autograd.grad(out, tensors, torch.randn_like(out))
    for x in (out, *grads):
        assert x.isfinite().all(), "a result is not finite"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=40, help="number of problems (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem (default %(default)s)")
    args = parser.parse_args()
    with one_line_errors():
        at = device()
        for seed in range(args.first, args.first + args.problems):
            print(f"{seed}: {problem(seed, at)}", flush=True)
        if at.type == "cuda":
            torch.cuda.synchronize()
        print(f"{args.problems} problems done")


if __name__ == "__main__":
    main()
