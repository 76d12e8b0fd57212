"""The VSA operator on the Triton kernels: pooling, coarse attention, scores, top-k, fine attention, gates.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks, Kmax list capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse import dispatch, triton_bwd, triton_fwd
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.coarse_fine import triton_gate
from vsa_kernels.coarse_fine.op import Call, Saved
from vsa_kernels.pooling import triton_pool
from vsa_kernels.selection import triton_topk
from vsa_kernels.selection.triton_scores import scores as coarse_scores

# bytes of scores that exist at a time; all scores take 230 MB for 1200 blocks and 40 heads
_SCORE_BYTES = 64 << 20


def forward(call: Call) -> tuple[Tensor, ...]:
    """out `[B, L, H, D]`, then the fields of `Saved`."""
    q, k, v, scale, half = call.q, call.k, call.v, call.scale, _is_half(call.q)
    q_blocks, kv_blocks = call.q_blocks, call.kv_blocks
    q_mean, k_mean, v_mean = _means(q, k, v, q_blocks, kv_blocks)
    coarse, coarse_lse = triton_fwd.dense(q_mean, k_mean, v_mean, scale, half=half)
    indices, counts = _select(q_mean, k_mean, scale, call.topk, call.capacity, "tf32" if half else "ieee")
    fine, lse = dispatch.forward(q, k, v, _mask(indices, counts, q_blocks, kv_blocks, call.topk), scale)
    out = triton_gate.combine(fine, coarse, call.gate_coarse, call.gate_fine, q_blocks)
    return out, *Saved(fine, lse, coarse, coarse_lse, indices, counts, q_mean, k_mean, v_mean)


def backward(dout: Tensor, saved: Saved, call: Call) -> list[Tensor]:
    """dq, dk, dv, dgate_coarse and, with a fine gate, dgate_fine."""
    q_blocks, kv_blocks = call.q_blocks, call.kv_blocks
    gate = triton_gate.combine_backward(dout, saved.fine, saved.coarse, call.gate_coarse, call.gate_fine, q_blocks)
    shares = triton_bwd.dense(
        *(gate.dcoarse, gate.delta_coarse, saved.coarse_lse, saved.q_mean, saved.k_mean, saved.v_mean, call.scale),
        half=_is_half(call.q),
    )
    mask = _mask(saved.kv_indices, saved.kv_num_blocks, q_blocks, kv_blocks, call.topk)
    dq, dk, dv = dispatch.backward(gate.dfine, gate.delta, saved.lse, call.q, call.k, call.v, mask, call.scale, shares)
    grads = [dq, dk, dv, gate.dgate_coarse]
    return grads if gate.dgate_fine is None else [*grads, gate.dgate_fine]


def _means(q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks) -> tuple[Tensor, ...]:
    sizes = (q_blocks.max_size, q_blocks.min_size)
    # self-attention passes the same offsets twice and needs one launch
    if q.shape[1] == k.shape[1] and q_blocks.offsets.data_ptr() == kv_blocks.offsets.data_ptr():
        return triton_pool.forward((q, k, v), q_blocks.offsets, *sizes)
    q_mean = triton_pool.forward((q,), q_blocks.offsets, *sizes)
    return (*q_mean, *triton_pool.forward((k, v), kv_blocks.offsets, kv_blocks.max_size, kv_blocks.min_size))


def _select(
    q_mean: Tensor, k_mean: Tensor, scale: float, topk: int, capacity: int, precision: str
) -> tuple[Tensor, Tensor]:
    """Lists `[B, H, Nq, capacity]` and counts `[B, H, Nq]`, for as many heads at a time as `_SCORE_BYTES` allows."""
    B, num_q, H, _ = q_mean.shape
    num_kv, rows = k_mean.shape[1], B * H
    step = max(1, _SCORE_BYTES // (4 * num_q * num_kv))
    if step >= rows:
        scores = coarse_scores(q_mean, k_mean, scale, 0, rows, precision=precision)
        return triton_topk.select(scores.view(B, H, num_q, num_kv), topk, None, None, None, capacity)
    indices = q_mean.new_empty((B, H, num_q, capacity), dtype=torch.int32)
    counts = q_mean.new_empty((B, H, num_q), dtype=torch.int32)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        scores = coarse_scores(q_mean, k_mean, scale, first, count, precision=precision)
        part_indices, part_counts = triton_topk.select(scores[None], topk, None, None, None, capacity)
        indices.view(rows, num_q, capacity)[first : first + count] = part_indices[0]
        counts.view(rows, num_q)[first : first + count] = part_counts[0]
    return indices, counts


def _mask(indices: Tensor, counts: Tensor, q_blocks: Blocks, kv_blocks: Blocks, topk: int) -> BlockMask:
    index = BlockIndex(kv_indices=indices, kv_num_blocks=counts, max_blocks=topk, min_blocks=topk)
    return BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=None)


def _is_half(q: Tensor) -> bool:
    return q.dtype.itemsize == 2
