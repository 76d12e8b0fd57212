"""Forward kernel of skipping attention: one program per query block, one whole kv block per step.

A step decides for all slices of its rows. Where every slice skips, the load of the values and their product are left
out; where only some do, the weights of these are set to 0.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv blocks, Kmax list capacity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.triton_tiles import LOG2E, Tiles, lists_of, load_tile, rows_ready, span, store_tile
from vsa_kernels.launch import launch, next_power_of_2


@triton.jit(do_not_specialize=["idx_b", "idx_h", "idx_n", "num_b", "num_h", "L", "S", "H", "num_q"])
def _skipping_kernel(
    q, k, v, out, skipped, kv_indices, kv_num_blocks, q_offsets, kv_offsets, thresholds, scale,
    q_b, q_l, q_h, k_b, k_l, k_h, v_b, v_l, v_h, o_b, o_l, idx_b, idx_h, idx_n, num_b, num_h, L, S, H, num_q,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, Q_SIZE: tl.constexpr, EVEN_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, KV_SIZE: tl.constexpr, EVEN_KV: tl.constexpr,
    SLICE: tl.constexpr, KEEPS_SUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_n, i_bh = tl.program_id(0) % num_q, tl.program_id(0) // num_q
    i_b, i_h = i_bh // H, i_bh % H
    i_hk = i_h // GROUP
    q_start, q_size, _ = span(q_offsets, i_n, 0, L, Q_SIZE, BLOCK_M, Q_SIZE > 0)
    p_list = kv_indices + i_b.to(tl.int64) * idx_b + i_h.to(tl.int64) * idx_h + i_n.to(tl.int64) * idx_n
    listed = tl.load(kv_num_blocks + i_b.to(tl.int64) * num_b + i_h.to(tl.int64) * num_h + i_n)
    factor = scale * LOG2E
    bar = tl.load(thresholds + i_h).to(tl.float32) * LOG2E
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_D]
    b_q = load_tile(q, i_b, i_h, q_start, q_size, q_b, q_l, q_h, D, BLOCK_M, BLOCK_D, EVEN_Q)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    count = tl.zeros([BLOCK_M // SLICE], dtype=tl.int32)
    for j in range(listed):
        i_kv = tl.load(p_list + j)
        kv_start, kv_size, _ = span(kv_offsets, i_kv, 0, S, KV_SIZE, BLOCK_N, KV_SIZE > 0)
        b_k = load_tile(k, i_b, i_hk, kv_start, kv_size, k_b, k_l, k_h, D, BLOCK_N, BLOCK_D, EVEN_KV)
        # [BLOCK_M, BLOCK_N]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if not EVEN_KV:
            b_s = tl.where(o_n[None, :] < kv_size, b_s, -float("inf"))
        b_local = tl.max(b_s, 1) * factor
        b_new = tl.maximum(b_max, b_local)
        b_gap = b_local - b_new
        if not EVEN_Q:
            b_gap = tl.where(o_m < q_size, b_gap, -float("inf"))
        # [slices]; one past the end of the block has no rows and skips nothing. A reshape of b_gap in place of the mask
        # is what Triton 3.7 does not compile for sm_100
        m_slice = o_m[None, :] // SLICE == tl.arange(0, BLOCK_M // SLICE)[:, None]
        s_gap = tl.max(tl.where(m_slice, b_gap[None, :], -float("inf")), 1)
        s_keep = (s_gap >= bar) | (s_gap == -float("inf"))
        count += 1 - s_keep.to(tl.int32)
        b_keep = tl.reshape(tl.broadcast_to(s_keep[:, None], [BLOCK_M // SLICE, SLICE]), [BLOCK_M])
        b_p = tl.math.exp2(b_s * factor - b_new[:, None])
        b_kept = tl.where(b_keep[:, None], b_p, 0.0)
        b_rescale = tl.math.exp2(b_max - b_new)
        b_sum = b_sum * b_rescale + tl.sum(b_p if KEEPS_SUM else b_kept, 1)
        b_max = b_new
        # a slice that skips has its old maximum; in a block that all skip, nothing has to be rescaled
        if tl.max(tl.where(s_gap == -float("inf"), 0, s_keep.to(tl.int32)), 0) > 0:
            b_v = load_tile(v, i_b, i_hk, kv_start, kv_size, v_b, v_l, v_h, D, BLOCK_N, BLOCK_D, EVEN_KV)
            b_acc = b_acc * b_rescale[:, None]
            b_acc = tl.dot(b_kept.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    b_out = b_acc / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
    store_tile(out, b_out, i_b, i_h, q_start, q_size, o_b, o_l, D, D, BLOCK_M, BLOCK_D)
    tl.store(skipped + i_bh.to(tl.int64) * num_q + i_n, tl.sum(count, 0))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    thresholds: Tensor,
    slice_rows: int,
    keeps_sum: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and counts int32 `[B, H, Nq]` of `skipping_attn`."""
    B, L, H, D = q.shape
    q, k, v = rows_ready(q), rows_ready(k), rows_ready(v)
    out = q.new_empty((B, L, H, D))
    skipped = q.new_empty((B, H, q_blocks.num), dtype=torch.int32)
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=None)
    lists, list_at = lists_of(mask)
    sizes = [(x.num, x.max_size, x.min_size) for x in (q_blocks, kv_blocks)]
    # tiles of whole blocks, since a slice skips a block and not a part of it
    whole = [max(16, next_power_of_2(largest)) for _, largest, _ in sizes]
    rows, columns = Tiles.of(sizes[0], L, whole[0]), Tiles.of(sizes[1], k.shape[1], whole[1])
    block_m = max(rows.block, slice_rows)
    launch(
        _skipping_kernel, (q_blocks.num * B * H,),
        q, k, v, out, skipped, *lists, q_blocks.offsets, kv_blocks.offsets, thresholds.contiguous(), scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2], *list_at, L, k.shape[1], H, rows.num,
        GROUP=H // k.shape[2], D=D, BLOCK_D=max(16, next_power_of_2(D)),
        BLOCK_M=block_m, Q_SIZE=rows.size, EVEN_Q=rows.even and block_m == rows.block,
        BLOCK_N=columns.block, KV_SIZE=columns.size, EVEN_KV=columns.even,
        SLICE=slice_rows, KEEPS_SUM=keeps_sum, PRECISION="ieee",
        num_warps=8 if block_m * D > 64 * 64 else 4, num_stages=2,
    )  # fmt: skip
    return out, skipped
